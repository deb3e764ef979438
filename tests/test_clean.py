"What is committed is what the tools produce: exported code, clean notebooks, README, versions."
import configparser, filecmp, re, shutil, subprocess, sys
from importlib import import_module
from pathlib import Path

import build, nbformat, numpy as np, pytest, yaml
from packaging.requirements import Requirement

import bicl

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/'nbs'
INI = configparser.ConfigParser(delimiters=['='])
INI.read(ROOT/'settings.ini', encoding='utf-8')
CFG = INI['DEFAULT']

def read(path): return path.read_text(encoding='utf-8')
def cells(path): return nbformat.read(path, 4).cells

def run(*args, cwd=ROOT):
    "Run a command; its output is the message if it fails."
    done = subprocess.run(args, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f'{args}\n{done.stdout}\n{done.stderr}'
    return done.stdout

def tracked(*patterns):
    "Files that git knows, relative to the root."
    if not (ROOT/'.git').exists(): pytest.skip('not a git checkout')
    names = run('git', 'ls-files', '-z', '--', *patterns).split('\0')
    return [Path(n) for n in names if n and (ROOT/n).exists()]

@pytest.fixture
def copy(tmp_path):
    "A copy of the project that tools may write to, without data and results."
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', 'README.md'):
        shutil.copy(ROOT/f, tmp_path)
    for d in ('nbs', 'bicl'):
        shutil.copytree(ROOT/d, tmp_path/d, ignore=shutil.ignore_patterns('__pycache__', '.*'))
    return tmp_path

# ----------------------------------------------------------------------------------- notebooks

def test_exported_code_is_what_the_notebooks_say(copy):
    for f in (copy/'bicl').glob('*.py'): f.unlink()
    run('nbdev_export', cwd=copy)
    made, kept = ({f.name for f in (d/'bicl').glob('*.py')} for d in (copy, ROOT))
    assert made == kept, f'bicl/ differs from the notebooks in {made ^ kept}: run `make export`'
    _, differ, missing = filecmp.cmpfiles(copy/'bicl', ROOT/'bicl', made, shallow=False)
    assert not differ + missing, f'{differ + missing} differ from the notebooks: run `make export`'

def test_notebooks_are_clean(copy):
    run('nbdev_clean', cwd=copy)
    names = [p.relative_to(copy) for p in (copy/'nbs').rglob('*.ipynb')]
    changed = [n for n in names if read(copy/n) != read(ROOT/n)]
    assert names and not changed, f'{changed} are not clean: run `make export`'

def test_cleaning_keeps_the_parameters_tag(copy):
    "papermill finds its parameters by a tag; nbdev_clean keeps it only if settings.ini says so."
    cell = nbformat.v4.new_code_cell('a = 1', metadata=dict(tags=['parameters'], other=1))
    path = copy/'nbs'/'tagged.ipynb'
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    run('nbdev_clean', '--fname', 'nbs/tagged.ipynb', cwd=copy)
    assert cells(path)[0].metadata == dict(tags=['parameters'])

@pytest.mark.parametrize('path', sorted(NBS.glob('experiments/*.ipynb')), ids=lambda p: p.stem)
def test_experiments_have_one_parameters_cell(path):
    assert sum('parameters' in c.metadata.get('tags', []) for c in cells(path)) == 1

def test_notebooks_hold_no_errors():
    outputs = [(p.name, o) for p in NBS.rglob('*.ipynb') for c in cells(p)
               for o in c.get('outputs', [])]
    assert outputs and not [(n, o.ename) for n, o in outputs if o.output_type == 'error']

def test_chapters_start_with_title_and_summary():
    "The summary is the module's docstring and stands in the README's table."
    for p in NBS.glob('[0-9]*.ipynb'):
        start = cells(p)[0].source[:200]
        assert re.match(r'# \S.*\n\n> \S.{0,98}(\n|$)', start), f'{p.name} starts with {start!r}'

# ------------------------------------------------------------------------------------- README

def test_readme_is_index_notebook():
    "As it is stored; test_notebooks.py executes it anew: its numbers are those in reports/."
    text = build.render(nbformat.read(NBS/'index.ipynb', 4))
    assert read(ROOT/'README.md') == text, 'run `make readme`'

def test_links_are_moved_to_the_root():
    moved = {'[a](01_data.ipynb)': '[a](nbs/01_data.ipynb)',
             '[b](../reports/x.md#y)': '[b](reports/x.md#y)',
             '[c](https://x.org/a)': '[c](https://x.org/a)', '[d](#here)': '[d](#here)',
             '<img src="a.svg">': '<img src="nbs/a.svg">'}
    assert build.to_root(' '.join(moved)) == ' '.join(moved.values())

def test_readme_links_exist():
    links = re.findall(r'\]\(([^)#\s]+)', read(ROOT/'README.md'))
    assert links and not [x for x in links if ':' not in x and not (ROOT/x).exists()]

def test_readme_example_runs():
    "The code for one's own stream, on three small arrays."
    code, = re.findall(r'```python\n(.*?)```', read(ROOT/'README.md'), re.S)
    task, y = np.repeat([0, 1], 60), np.tile([0, 1, 2], 40)
    noise = np.random.default_rng(100).normal(size=(120, 8))
    names = dict(x=(noise + 3 * np.eye(8)[y]).astype('float32'), y=y, task=task)
    exec(code, names)
    accuracy = names['run'].accuracy
    assert accuracy.shape == (5, 3, 2) and accuracy[:, -1].mean() > 60

# --------------------------------------------------------------------------------------- code

def test_ruff():
    run(sys.executable, '-m', 'ruff', 'check', 'bicl', 'tests', 'nbs/_site', 'setup.py')

def test_console_scripts_exist():
    for line in filter(None, CFG['console_scripts'].splitlines()):
        module, name = line.split('=')[1].split(':')
        assert callable(getattr(import_module(module), name)), line

# ----------------------------------------------------------------------------------- versions

def specs(lines): return {(r.name.lower(), str(r.specifier)) for r in map(Requirement, lines)}

def test_environment_yml_matches_settings():
    env = yaml.safe_load(read(ROOT/'environment.yml'))['dependencies']
    conda = [d for d in env if isinstance(d, str)]
    pip = next(d['pip'] for d in env if isinstance(d, dict))
    assert '-e .' in pip and f'python>={CFG["min_python"]}' in conda
    tools = ('python', 'pip', 'make', '-e .')
    have = [d for d in conda + pip if d.split('>')[0] not in tools]
    assert len(have) == len(specs(have)), 'a package is listed twice'
    assert specs(have) == specs((CFG['requirements'] + ' ' + CFG['dev_requirements']).split())

def test_versions_agree():
    cff = yaml.safe_load(read(ROOT/'CITATION.cff'))
    assert CFG['version'] == bicl.__version__ == cff['version']

# ---------------------------------------------------------------------------------- committed

def test_no_machine_paths():
    "Nothing committed names a folder of the machine that made it."
    bad = re.compile(r'/(?:work|root|home|Users)/[\w.-]|[A-Z]:\\\\Users|/tmp/[\w.-]+/')
    texts = [p for p in tracked() if p.suffix not in ('.gz', '.png', '.parquet')
             and p.name != Path(__file__).name]
    found = [(str(p), m[0]) for p in texts
             if (m := bad.search((ROOT/p).read_text(encoding='utf-8', errors='ignore')))]
    assert texts and not found

def test_only_free_data_is_committed():
    "MNIST and Fashion-MNIST as their official files; notMNIST has no licence and stays out."
    files = ['t10k-images-idx3', 't10k-labels-idx1', 'train-images-idx3', 'train-labels-idx1']
    allowed = {Path(f'data/{s}/raw/{f}-ubyte.gz') for s in ('MNIST', 'FashionMNIST') for f in files}
    binary = ('.npz', '.npy', '.pt', '.gz', '.tar', '.tgz', '.zip', '.idx', '.safetensors')
    assert set(tracked('data')) == allowed
    drawn = {p for p in tracked('reports/generative/runs') if p.suffix == '.npz'}
    assert {p for p in tracked() if p.suffix in binary} == allowed | drawn
    for p in drawn:
        with np.load(ROOT/p) as z: assert set(z) == {'drawn'}, 'pictures by a model, nothing else'

def test_top_level_is_as_agreed():
    agreed = ('nbs bicl data reports tests .ci .github settings.ini environment.yml README.md Makefile setup.py '
              'pyproject.toml MANIFEST.in LICENSE CITATION.cff CHANGELOG.md CONTRIBUTING.md .gitignore').split()
    assert {p.parts[0] for p in tracked()} <= set(agreed)
