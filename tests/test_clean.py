"What is committed is what the tools produce: exported code, clean notebooks, README, versions."
import configparser, filecmp, re, shutil, subprocess, sys
from pathlib import Path

import build, nbformat, pytest, yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
INI = configparser.ConfigParser(delimiters=['='])
INI.read(ROOT/'settings.ini', encoding='utf-8')
CFG = INI['DEFAULT']

def run(*args, cwd=ROOT):
    "Run a command; its output is the message if it fails."
    done = subprocess.run(args, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f'{args}\n{done.stdout}\n{done.stderr}'
    return done.stdout

def tracked(*patterns):
    "Files that git knows."
    if not (ROOT/'.git').exists(): pytest.skip('not a git checkout')
    return [ROOT/p for p in run('git', 'ls-files', '-z', '--', *patterns).split('\0') if p and (ROOT/p).exists()]

@pytest.fixture
def copy(tmp_path):
    "A copy of the project that tools may write to, without data and results."
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', 'README.md'): shutil.copy(ROOT/f, tmp_path)
    for d in ('nbs', 'bicl'):
        shutil.copytree(ROOT/d, tmp_path/d, ignore=shutil.ignore_patterns('__pycache__', '.*'))
    return tmp_path

# ----------------------------------------------------------------------------------- notebooks

def test_exported_code_is_what_the_notebooks_say(copy):
    for f in (copy/'bicl').glob('*.py'):
        if f.name != '__init__.py': f.unlink()
    run('nbdev_export', cwd=copy)
    made, kept = ({f.name for f in (d/'bicl').glob('*.py')} for d in (copy, ROOT))
    assert made == kept, f'bicl/ differs from the notebooks in {made ^ kept}: run `make export`'
    _, different, errors = filecmp.cmpfiles(copy/'bicl', ROOT/'bicl', made, shallow=False)
    assert not different + errors, f'{different + errors} differ from their notebooks: run `make export`'

def test_notebooks_are_clean(copy):
    run('nbdev_clean', cwd=copy)
    changed = [p.relative_to(copy) for p in (copy/'nbs').rglob('*.ipynb')
               if p.read_text(encoding='utf-8') != (ROOT/p.relative_to(copy)).read_text(encoding='utf-8')]
    assert not changed, f'{changed} are not clean: run `make export`'

def test_cleaning_keeps_the_parameters_tag(copy):
    "papermill finds its parameters by a tag, which nbdev_clean deletes unless settings.ini keeps it."
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('a = 1', metadata=dict(tags=['parameters'], x=1))])
    nbformat.write(nb, copy/'nbs'/'tagged.ipynb')
    run('nbdev_clean', '--fname', 'nbs/tagged.ipynb', cwd=copy)
    assert nbformat.read(copy/'nbs'/'tagged.ipynb', 4).cells[0].metadata == dict(tags=['parameters'])

@pytest.mark.parametrize('path', sorted((ROOT/'nbs'/'experiments').glob('*.ipynb')), ids=lambda p: p.stem)
def test_experiments_have_one_parameters_cell(path):
    tags = [c.metadata.get('tags', []) for c in nbformat.read(path, 4).cells]
    assert sum('parameters' in t for t in tags) == 1

def test_notebooks_hold_no_errors():
    bad = [(p.name, o.ename) for p in (ROOT/'nbs').rglob('*.ipynb') for c in nbformat.read(p, 4).cells
           for o in c.get('outputs', []) if o.output_type == 'error']
    assert not bad

def test_chapters_start_with_title_and_summary():
    for p in (ROOT/'nbs').glob('[0-9]*.ipynb'):
        first = nbformat.read(p, 4).cells[0].source
        assert re.match(r'# \S.*\n\n> \S.{0,98}(\n|$)', first), f'{p.name} starts with {first[:200]!r}'

# ------------------------------------------------------------------------------------- README

def test_readme_is_index_notebook():
    text = build.render(nbformat.read(ROOT/'nbs'/'index.ipynb', 4))
    assert (ROOT/'README.md').read_text(encoding='utf-8') == text, 'run `make readme`'

def test_readme_tells_what_reports_say():
    "Executed anew, the index notebook says the same: its numbers are those in reports/."
    text = build.render(build.executed())
    assert (ROOT/'README.md').read_text(encoding='utf-8') == text, 'run `make readme`'

def test_links_are_moved_to_the_root():
    text = '[a](01_data.ipynb) [b](../reports/x.md#y) [c](https://x.org/a) [d](#here) <img src="a.svg">'
    assert build.to_root(text) == ('[a](nbs/01_data.ipynb) [b](reports/x.md#y) [c](https://x.org/a) [d](#here) '
                                   '<img src="nbs/a.svg">')

def test_readme_links_exist():
    links = re.findall(r'\]\(([^)#\s]+)', (ROOT/'README.md').read_text(encoding='utf-8'))
    assert links and not [x for x in links if ':' not in x and not (ROOT/x).exists()]

def test_readme_example_runs():
    "The code for one's own stream, on three small arrays."
    import numpy as np
    code, = re.findall(r'```python\n(.*?)```', (ROOT/'README.md').read_text(encoding='utf-8'), re.S)
    gen = np.random.default_rng(100)
    task, y = np.repeat([0, 1], 60), np.tile([0, 1, 2], 40)
    x = gen.normal(size=(120, 8)).astype('float32') + 3 * np.eye(8, dtype='float32')[y]
    names = dict(x=x, y=y, task=task)
    exec(code, names)
    assert names['run'].accuracy.shape == (5, 3, 2) and names['run'].accuracy[:, -1].mean() > 60

# --------------------------------------------------------------------------------------- code

def test_ruff(): run(sys.executable, '-m', 'ruff', 'check', 'bicl', 'tests', 'nbs/_site', 'setup.py')

def test_console_scripts_exist():
    from importlib import import_module
    for line in filter(None, CFG['console_scripts'].splitlines()):
        module, name = line.split('=')[1].split(':')
        assert callable(getattr(import_module(module), name)), line

# ----------------------------------------------------------------------------------- versions

def specs(lines): return {(r.name.lower(), str(r.specifier)) for r in map(Requirement, lines)}

def test_environment_yml_matches_settings():
    env = yaml.safe_load((ROOT/'environment.yml').read_text(encoding='utf-8'))['dependencies']
    conda, pip = [d for d in env if isinstance(d, str)], next(d['pip'] for d in env if isinstance(d, dict))
    assert '-e .' in pip and f'python>={CFG["min_python"]}' in conda
    have = [d for d in conda if d.split('>')[0] not in ('python', 'pip', 'make')] + [d for d in pip if d != '-e .']
    assert len(have) == len(specs(have)), 'a package is listed twice'
    assert specs(have) == specs((CFG['requirements'] + ' ' + CFG['dev_requirements']).split())

def test_versions_agree():
    import bicl
    cff = yaml.safe_load((ROOT/'CITATION.cff').read_text(encoding='utf-8'))
    assert CFG['version'] == bicl.__version__ == cff['version']

# ---------------------------------------------------------------------------------- committed

def test_no_machine_paths():
    "Nothing committed names a folder of the machine that made it."
    bad = re.compile(r'/(?:work|root|home|Users)/[\w.-]|[A-Z]:\\\\Users|/tmp/[\w.-]+/')
    found = [(str(p.relative_to(ROOT)), m[0]) for p in tracked() if p.suffix not in ('.gz', '.png', '.parquet')
             and p.name != 'test_clean.py' for m in [bad.search(p.read_text(encoding='utf-8', errors='ignore'))] if m]
    assert not found

def test_only_free_data_is_committed():
    "MNIST and Fashion-MNIST as their official files; notMNIST has no licence and stays out."
    files = ['t10k-images-idx3', 't10k-labels-idx1', 'train-images-idx3', 'train-labels-idx1']
    allowed = {f'data/{s}/raw/{f}-ubyte.gz' for s in ('MNIST', 'FashionMNIST') for f in files}
    assert {p.relative_to(ROOT).as_posix() for p in tracked('data')} == allowed
    arrays = {p.name for p in tracked() if p.suffix in ('.npz', '.npy', '.pt', '.gz', '.tar', '.zip', '.idx')}
    assert arrays == {f.rsplit('/', 1)[1] for f in allowed}

def test_top_level_is_as_agreed():
    agreed = {'nbs', 'bicl', 'data', 'reports', 'tests', '.ci', 'settings.ini', 'environment.yml', 'README.md',
              'Makefile', 'setup.py', 'pyproject.toml', 'LICENSE', 'CITATION.cff', '.gitignore'}
    assert {p.relative_to(ROOT).parts[0] for p in tracked()} <= agreed
