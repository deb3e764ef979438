"""The commands as a user meets them: an installed package in an empty folder, grids with mistakes, a method of one's own.

What costs seconds is done once: one wheel and one source distribution are built, one kernel runs, one page is written.
"""
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from types import ModuleType

import nbformat
import pandas as pd
import pytest
import toys
import yaml

import bicl
import bicl.commands
import bicl.core
import bicl.runner
from bicl.commands import bicl_new, bicl_report, bicl_run, bicl_status, expected, main, past_runs, pick
from bicl.data import DataError
from bicl.jobs import Job, load_grid, read_result, result_path
from bicl.learner import METHODS, fit
from bicl.runner import Outcome, claim
from bicl.tables import collect, to_md, to_tex, write_tables

HERE = Path(__file__).parent
ROOT = HERE.parent
HEAVY = {'torch', 'pandas', 'numba', 'numpy', 'pyarrow', 'seaborn'}


ASK = f'''
import contextlib, io, json, sys
from bicl.commands import *
from bicl.commands import main
said = []
for line in json.loads(sys.argv[1]):
    sys.argv = line.split()
    with contextlib.redirect_stdout(out := io.StringIO()), contextlib.redirect_stderr(out):
        try: code = main() if sys.argv[0] == 'bicl' else globals()[sys.argv[0]]()
        except SystemExit as e: code = e.code
    said.append([code or 0, out.getvalue(), sorted({HEAVY} & set(sys.modules))])
print(json.dumps(said))
'''


# ---- small questions

SMALL = {
    'bicl --help': 'usage: bicl COMMAND', 'bicl --version': bicl.__version__, 'bicl list': 'Table 1', 'bicl status': 'Table 1',
    'bicl run --help': '--scheduler', 'bicl run --list': 'Table 1', 'bicl report --help': '--seeds', 'bicl data --help': '--download',
    'bicl new --help': 'NAME', 'bicl_run --version': bicl.__version__, 'bicl_report --help': '--seeds', 'bicl_data --help': '--download',
    'bicl_run --help': '--scheduler', 'bicl_run --list': 'table1', 'bicl_run --seeds=1': 'which grid?'}


def test_small_questions_import_nothing_large():
    "One process answers them one after the other; which large packages has it imported then?"
    done = subprocess.run([sys.executable, '-c', ASK, json.dumps([*SMALL])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (line, word), (code, said, large) in zip(SMALL.items(), json.loads(done.stdout), strict=True):
        assert word in said and not large and code == (2 if 'which' in word else 0), (line, code, said, large)


def test_wrong_words(capsys):
    assert main(['rnu', 'quick']) == 2 and "no command 'rnu'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as e: main(['run', '--dryrun'])
    assert e.value.code == 2 and '--dryrun' in capsys.readouterr().err


# ---- where things are

def test_a_foreign_project_is_left_alone(tmp_path, monkeypatch):
    "A settings.ini above us is not ours; nor is a package that was installed somewhere part of any checkout."
    (tmp_path/'site'/'bicl'/'nbs'/'experiments').mkdir(parents=True)
    below = tmp_path/'theirs'/'nbs'/'below'
    below.mkdir(parents=True)
    (tmp_path/'theirs'/'settings.ini').write_text('[DEFAULT]\nlib_name = theirs\n')
    monkeypatch.setattr(bicl.core, '__file__', str(tmp_path/'site'/'bicl'/'core.py'))
    monkeypatch.setattr(bicl, '__file__', str(tmp_path/'site'/'bicl'/'__init__.py'))
    monkeypatch.chdir(below)
    assert bicl.core.project_root() == below
    assert bicl.core.project_files() == tmp_path/'site'/'bicl'/'nbs'
    assert bicl.core.results_root() == below/'reports'
    assert bicl.commands.home_folders() == (bicl.core.project_files(), bicl.core.results_root())
    monkeypatch.chdir(ROOT/'tests')
    assert bicl.core.project_root() == ROOT and bicl.core.results_root() == ROOT/'reports'
    assert bicl.commands.home_folders()[1] == ROOT/'reports'


def test_an_editable_install_writes_below_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bicl.core.project_files() == ROOT/'nbs' and bicl.core.results_root() == tmp_path/'reports'


# ---- grids with mistakes: one line each, before anything runs

TOY = 'plugins: [toys]\nbenchmark: toy\nseeds: [1]\n'


@pytest.mark.parametrize('text, word', [
    (TOY + 'runs: [{method: Toy}]\nruns: [{method: Plain}]', "'runs' is given twice"),
    ('{plugins: [toys], benchmark: {toy: 1}, runs: [{method: Plain}]}', "benchmark must be a name, got {'toy': 1}"),
    ('{plugins: [toys], benchmark: !!set {toy}, runs: [{method: Plain}]}', 'benchmark must be a name'),
    ('{plugins: [toys], benchmark: &b [*b], runs: [{method: Plain}]}', 'benchmark must be a name'),
    (TOY + 'runs: [{method: {Toy: 1}}]', 'method must be a name'),
    (TOY + 'runs: [{method: Plain, protocol: 3}]', 'protocol must be a name'),
    (TOY + 'runs: [{method: Plain, device: [[cpu]]}]', 'device must be a name'),
    (TOY + 'runs: [{method: Plain, settings: {1: 2}}]', '1 as a name'),
    (TOY + 'runs: [{method: Plain, sweep: {1: [2]}}]', '1 as a name'),
    (TOY + 'runs: [{method: Plain, settings: !!set {lr}}]', 'settings must be names and values'),
    (TOY + 'runs: [{method: Plain, seeds: [{a: 1}]}]', 'a seed must be a whole number'),
    (TOY + 'runs: [{method: Plain, seeds: [9223372036854775808]}]', 'less than 2**63'),
    (TOY + 'runs: [{1: 2, method: Plain}]', 'unknown key 1'),
    (TOY + 'runs: &r [*r]', 'entry 1 of runs: expected keys'),
    (TOY + 'runs: [{method: Plain, settings: &s {lr: *s}}]', 'must be of type float'),
    (TOY + 'runs: [{method: Toy, memory: []}]', 'memory is an empty list'),
    (TOY + 'runs: [{method: Plain, sweep: {lr: []}}]', 'lr is an empty list'),
    (TOY + f'runs: [{{method: Plain, sweep: {{lr: {[1]*10_000}, sleep: {[1]*10_000}}}}}]', '100,000,000 runs'),
    (TOY + 'runs: ' + '['*3000, 'not valid YAML'), (TOY + 'runs: [{method: !!bool Toy}]', 'not valid YAML'),
    ('{plugins: toys, benchmark: toy, runs: [{method: Plain}]}', 'plugins must be a list of names'),
    ('{plugins: [1], benchmark: toy, runs: [{method: Plain}]}', 'plugins must be a list of names'),
    ('{plugins: [raises], benchmark: toy, runs: [{method: Plain}]}', "plugin 'raises' cannot be imported: ZeroDivisionError"),
    ('{plugins: [leaves], benchmark: toy, runs: [{method: Plain}]}', "plugin 'leaves' cannot be imported: SystemExit: 3"),
    ('{plugins: [typo], benchmark: toy, runs: [{method: Plain}]}', "plugin 'typo' cannot be imported: SyntaxError"),
    ('{plugins: [../raises], benchmark: toy, runs: [{method: Plain}]}', "plugin '../raises' cannot be imported"),
    ('{plugins: [json], benchmark: toy, runs: [{method: Plain}]}', 'rename json.py')])
def test_a_mistake_is_told_in_one_line(tmp_path, capsys, text, word):
    for name, code in dict(raises='1/0', leaves='import sys; sys.exit(3)', typo='x = (', json='').items():
        (tmp_path/f'{name}.py').write_text(code)
    (tmp_path/'bad.yaml').write_text(text)
    assert bicl_run(grid=str(tmp_path/'bad.yaml'), out=str(tmp_path/'out')) == 2
    said = capsys.readouterr().err
    assert word in said and 'bad.yaml' in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path/'out').exists()


# ---- a grid with something changed

@pytest.fixture
def grid(tmp_path):
    path = tmp_path/'mine.yaml'
    path.write_text('title: Mine\nplugins: [toys]\nbenchmark: toy\nseeds: [100, 101]\nprotocol: strict\nsettings: {sleep: 0, lr: 0.2}\n'
                    'runs:\n- {method: Toy, memory: [10, 20], sweep: {lr: [0.1, 0.3]}}\n- {method: Plain, settings: {stream.tasks: 2}}\n')
    return path


def jobs(*words, **how): return [(j.label, j.seeds, j.settings) for j in pick(words, **how)[1]]


def test_settings_are_merged_and_sweeps_are_in_the_labels(grid):
    assert jobs(str(grid)) == [
        *((f'Toy {m} toy lr={lr}', (100, 101), dict(sleep=0, lr=lr)) for m in (10, 20) for lr in (.1, .3)),
        ('Plain toy', (100, 101), {'sleep': 0, 'lr': .2, 'stream.tasks': 2})]


def test_words_behind_the_grid_win(grid):
    got = jobs(str(grid), 'seeds=[7]', 'lr=1e-3', 'memory=5', 'stream.tasks=1')
    assert got == [('Toy 5 toy', (7,), {'sleep': 0, 'lr': .001, 'stream.tasks': 1}), ('Plain toy', (7,), {'sleep': 0, 'lr': .001, 'stream.tasks': 1})]
    assert [j[0] for j in jobs(str(grid), 'sweep.sleep=[0, 1]', only='Plain')] == ['Plain toy sleep=0', 'Plain toy sleep=1']
    assert load_grid(f'{grid} lr=0.5').title == 'Mine (lr=0.5)'


@pytest.mark.parametrize('word, why', [('lrr=1', "setting 'lrr' is unknown"), ('lr=fast', 'must be of type float'), ('stream.task=1', 'stream.tasks'),
                                       ('seeds=3', 'seeds must be a list'), ('method=Toyy', "method 'Toyy' is unknown"), ('lr=[', 'not valid YAML'),
                                       ('notebook=../evil', 'plain name'), ('plugins=[os]', "setting 'plugins' is unknown"), ('sweep.lr=[]', 'empty list')])
def test_words_are_checked_like_the_grid(grid, capsys, word, why):
    assert bicl_run([str(grid), word], out=str(grid.parent/'out')) == 2
    assert why in capsys.readouterr().err and not (grid.parent/'out').exists()


def test_only(grid, capsys):
    assert [j[0] for j in jobs(str(grid), only='toy 10')] == ['Toy 10 toy lr=0.1', 'Toy 10 toy lr=0.3']
    assert [j[0] for j in jobs(str(grid), only='pl*n')] == ['Plain toy'] and bicl_run([str(grid)], only='lain') == 2
    assert [j[0] for j in jobs(str(grid), only='lr=0.3 memory=20')] == ['Toy 20 toy lr=0.3']
    assert [j[0] for j in jobs(str(grid), only='tasks=2 die=""')] == ['Plain toy'] # a default counts, too
    assert [j[0] for j in jobs(str(grid), 'deaths=3', only='plain')] == ['Plain toy']
    assert jobs(str(grid), 'memory=30', only='Toy 30 lr=0.1') == [('Toy 30 toy lr=0.1', (100, 101), dict(sleep=0, lr=.1))]
    assert bicl_run([str(grid)], only='lr=77') == 2 and "fits 'lr=77'" in capsys.readouterr().err


def test_timeout_is_handed_on(grid, monkeypatch, tmp_path):
    seen = {}
    def run_jobs(jobs, *args, **how):
        seen.update(how)
        return pd.DataFrame([dict(job=j.label, protocol='strict', status='ran', seconds=0., note='') for j in jobs])
    monkeypatch.setattr(bicl.runner, 'run_jobs', run_jobs)
    assert bicl_run([str(grid)], out=str(tmp_path/'out')) == 0 and not seen
    assert bicl_run([str(grid)], out=str(tmp_path/'out'), timeout=5.) == 0 and seen == dict(timeout=5.)


@pytest.mark.parametrize('how, code', [({}, 1), (dict(skip_missing=True), 0)])
def test_missing_data_is_a_failure_unless_it_may_be_skipped(tmp_path, how, code):
    (tmp_path/'g.yaml').write_text('{plugins: [toys], benchmark: toy-nowhere, runs: [{method: Plain}]}')
    assert bicl_run(str(tmp_path/'g.yaml'), out=str(tmp_path/'out'), **how) == code


# ---- how things stand, and how long it will take

def test_status_and_dry_run(grid, tmp_path, capsys, monkeypatch):
    "Every state a run can be in; times from what is recorded; nothing is written."
    monkeypatch.chdir(tmp_path)
    out = tmp_path/'reports'/'mine'
    all_jobs = load_grid(grid).jobs
    done, older, running, begun, waiting = all_jobs
    toys.fake(done, out, T=3)
    toys.fake(older, out, T=3)
    p = result_path(older, out)
    p.unlink()
    bicl.jobs.write_result(toys.fake(older, tmp_path/'x', T=3).assign(stamp='0'*16, version='0'), p.with_name(f'{older.head}{"0"*16}.parquet'))
    (out/'checkpoints').mkdir()
    bicl.jobs.scratch(begun, out, '.safetensors').touch()
    before = sorted(out.rglob('*'))
    with claim(bicl.jobs.scratch(running, out, '.lock')):
        bicl.jobs.scratch(running, out, '.json').write_text('{"done": 1, "total": 4}')
        assert bicl_status([str(grid)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:5]] == ['done', 'older', 'running', 'begun', 'waiting'], said
    assert '(25%)' in said[2] and said[0].endswith('Toy 10 toy lr=0.1') and said[5] == '5 runs: 1 done, 1 older, 1 running, 1 begun, 1 waiting.'
    bicl.jobs.scratch(running, out, '.json').unlink()
    assert bicl_run([str(grid)], dry_run=True, jobs=2) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5 and said[0].split()[:2] == ['4', 's'] and said[-2].split()[0] == '?' # toys say that they took 4 s
    assert said[-1].startswith('5 runs: 1 done, 4 to do. By the record about 4 s with 2 at once; 3 of them have no record') # memory 20 is another one
    assert sorted(out.rglob('*')) == before


def test_what_is_expected_of_a_run(tmp_path):
    "In proportion to seeds, tasks and samples; runs like it count first; damaged files do not count."
    ask = dict(benchmark='toy', method='Plain', protocol='strict')
    job = Job(**ask, seeds=(1, 2))
    toys.fake(job, tmp_path, T=3)
    (tmp_path/'runs'/'damaged.parquet').write_bytes(b'no')
    past = past_runs(tmp_path)
    assert len(past) == 1 and past[0]['seconds'] == 4.
    assert expected(job, past) == expected(replace(job, protocol='buffered'), past) == 4.
    assert expected(replace(job, seeds=(1,)), past) == 2.
    assert expected(replace(job, settings={'stream.tasks': 6, 'stream.per_task': 15}), past) == 4*2/4
    assert expected(Job('toy', 'Toy', 10), past) is None
    other = dict(past[0], protocol='buffered', seconds=100.)
    assert expected(job, [*past, other]) == 4. and expected(replace(job, protocol='buffered'), [*past, other]) == 100.


# ---- tables of a grid of one's own

def test_a_sweep_gets_a_table_like_any_other(grid, tmp_path):
    "Intervals, marks, CSV and LaTeX; what was varied has a column."
    g, out = load_grid(grid), tmp_path/'out'
    for j in g.jobs: toys.fake(j, out, 85. if j.settings['lr'] == .3 else 70., T=2)
    study = collect(g, out)
    write_tables(study, tmp_path, 'table')
    t, text, tex = pd.read_csv(tmp_path/'table.csv'), to_md(study.table), to_tex(study.table)
    assert set(t.variant.dropna()) == {'lr 0.1', 'lr 0.3'} and t.ci_low.notna().all() and (t.ci_low < t.ci_high).any()
    assert '| Varied |' in text and re.search(r'lr 0\.3 \| \*\*8\d\.\d\d\*\* \(\d\.\d\d\) \[8', text), text
    assert 'Varied' in tex and r'\textbf{8' in tex and tex.count(r'\begin{tabular}') == 1


def test_only_the_papers_question_is_set_beside_the_paper(tmp_path):
    "Tasks, samples, network, protocol and test images must be the paper's."
    asked = dict(benchmark='mnist-permutations', method='BiCL', memory=200, seeds=(100, 101))
    def table(T=10, **more):
        job, out = Job(**asked | more), tmp_path/str(len(list(tmp_path.iterdir())))
        toys.fake(job, out, T=T)
        return collect(bicl.jobs.Grid('g', 'G', [job]), out).table
    assert (found := table()).paper_mean.notna().any() and found.verdict.any()
    assert table(protocol='strict').verdict.any() and table(settings={'stream.per_task': 1000, 'stream.block': 500}).verdict.any()
    for T, settings in ((4, {'stream.tasks': 4, 'stream.per_task': 200}), (4, {'stream.tasks': 4}), (10, {'stream.per_task': 200}),
                        (10, dict(hidden=[50, 50])), (10, {'stream.block': 50})):
        t = table(T, settings=settings)
        assert t.paper_mean.isna().all() and not t.verdict.any() and 'paper' not in to_md(t), settings
    assert table(tuning=True).paper_mean.isna().all()


# ---- a method of one's own

def test_new_method(tmp_path, monkeypatch, capsys):
    "What is written runs: every cell of the notebook, and every job of the grid, with the module beside it as a plugin."
    monkeypatch.chdir(tmp_path)
    assert main(['new', 'method', 'Mine']) == 0
    assert 'bicl run mine.yaml' in capsys.readouterr().out
    assert sorted(os.listdir()) == ['mine.ipynb', 'mine.py', 'mine.yaml']
    nb = nbformat.read('mine.ipynb', 4)
    nbformat.validate(nb)
    assert nb.cells[0].source.startswith('# Mine\n\n> ') and 'MyMethod' not in Path('mine.ipynb').read_text()
    before = Path('mine.py').read_text()
    known, module = dict(METHODS), ModuleType('mine_notebook')
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        for c in nb.cells:
            if c.cell_type == 'code': exec(compile(c.source, 'a cell', 'exec'), vars(module))
        assert Path('mine.py').read_text() == before and 'register_method' in before and 'check_learner(' not in before
        METHODS.pop('Mine')
        g = load_grid('mine.yaml')
        assert g.plugins == (str(tmp_path/'mine.py'),) and METHODS['Mine'].cls.__module__ == 'mine'
        assert [j.label for j in g.jobs] == ['Mine mnist-rotations lr=0.03', 'Mine mnist-rotations lr=0.1', 'ER 200 mnist-rotations']
        for j in pick('mine.yaml seeds=[100] stream.tasks=2 stream.per_task=30')[1]:
            learner, stream = j.make()
            assert fit(learner, stream, **j.loop(), progress=False).accuracy.shape == (1, 3, 2) and len(j.stamp) == 16
    finally:
        METHODS.clear(), METHODS.update(known), sys.modules.pop('mine', None)


@pytest.mark.parametrize('words, why', [((), 'method NAME'), (('method',), 'method NAME'), (('grid', 'A'), 'method NAME'), (('method', '../x'), 'one word'),
                                        (('method', 'BiCL'), 'another method'), (('method', 'json'), 'another method or module'), (('method', 'Mine'), 'exists already')])
def test_new_refuses(tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    Path('mine.py').touch()
    assert bicl_new(list(words), '.') == 2 and why in capsys.readouterr().err
    assert os.listdir() == ['mine.py'] and not Path('mine.py').read_text()


# ---- installed

def run(*args, **how):
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, **how)
    assert done.returncode == 0, f'{args}\n{done.stdout}\n{done.stderr}'
    return done.stdout


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "A source distribution of what is here, and a wheel."
    src, dist = tmp_path_factory.mktemp('src'), tmp_path_factory.mktemp('dist')
    for name in ('bicl', 'nbs'): copytree(ROOT/name, src/name, ignore=ignore_patterns('__pycache__', '.*'))
    for p in ROOT.iterdir():
        if p.is_file() and not p.name.startswith('.'): copy(p, src)
    run(sys.executable, '-c', f'from setuptools import build_meta as b; b.build_sdist({str(dist)!r}); b.build_wheel({str(dist)!r})', cwd=src)
    return next(dist.glob('*.tar.gz')), next(dist.glob('*.whl'))


@pytest.fixture(scope='module')
def install(tmp_path_factory):
    "Install a distribution into an environment that has everything but this package."
    def into_new(dist, *how):
        env = tmp_path_factory.mktemp('env')
        run(sys.executable, '-m', 'venv', '--without-pip', env)
        site = next(env.glob('lib/python*/site-packages'))
        (site/'others.pth').write_text('\n'.join(p for p in sys.path if p.endswith('site-packages')))
        run(sys.executable, '-m', 'pip', '--python', env/'bin'/'python', 'install', '--quiet', '--no-deps', '--no-build-isolation',
            '--disable-pip-version-check', *how, dist)
        return env/'bin', site/'bicl'
    return into_new


def needed():
    "What the commands need from nbs/."
    nbs = ROOT/'nbs'
    return {str(p.relative_to(ROOT)) for folder in ('experiments', 'experiments/grids', 'pages', '_templates')
            for p in (nbs/folder).iterdir() if p.suffix in ('.ipynb', '.yaml', '.csv')}


def test_the_wheel_in_an_empty_folder(built, install, tmp_path):
    "Data, a run and its report, below the current folder, although a stranger's project is around it."
    with zipfile.ZipFile(built[1]) as z: inside = set(z.namelist())
    assert {f'bicl/{p}' for p in needed()} <= inside and not [p for p in inside if 'reports' in p or p.startswith('data')]
    bin, package = install(built[1])
    below = tmp_path/'theirs'/'below'
    below.mkdir(parents=True)
    (tmp_path/'theirs'/'settings.ini').write_text('[DEFAULT]\nlib_name = theirs\n')
    pages = {p: p.read_bytes() for p in (package/'nbs'/'pages').iterdir()}
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'BICL_PLUGINS')} | dict(BICL_DATA=str(ROOT/'data'), PATH=f'{bin}:{os.environ["PATH"]}')
    do = lambda *words: run(bin/words[0], *words[1:], cwd=below, env=env)
    assert do('bicl', '--version') == f'bicl {bicl.__version__}\n' and 'Table 1' in do('bicl', 'list')
    assert '7000 each' in do('bicl_data') # Fashion-MNIST
    copy(HERE/'toys.py', below) # nothing of it has to be compiled, and it is found beside its grid
    (below/'tiny.yaml').write_text('{title: Tiny, plugins: [toys], benchmark: toy, protocol: strict, runs: [{method: [Plain, Toy]}]}')
    small = 'tiny.yaml', 'seeds=[100]', 'stream.tasks=2', 'method=Plain'
    assert '1 runs: 1 ran.' in do('bicl_run', *small, '--jobs', '1')
    assert '1 of 1 runs of `tiny` are there.' in do('bicl_report', *small)
    out = below/'reports'/'tiny'
    rows, = (out/'runs').glob('*.parquet')
    assert set(read_result(rows).seed) == {100} and rows.with_suffix('.ipynb').exists()
    assert (out/'index.md').read_text().startswith('# Tiny (seeds=') and (out/'table.tex').exists()
    assert sorted(os.listdir(below)) == ['reports', 'tiny.yaml', 'toys.py'] and sorted(os.listdir(below.parent)) == ['below', 'settings.ini']
    assert {p: p.read_bytes() for p in (package/'nbs'/'pages').iterdir()} == pages


def test_the_source_distribution_gives_the_same(built, install):
    bin, package = install(built[0], '--no-compile')
    with zipfile.ZipFile(built[1]) as z: inside = {p for p in z.namelist() if p.startswith('bicl/')}
    found = {f'bicl/{p.relative_to(package)}' for p in package.rglob('*') if p.is_file() and '__pycache__' not in p.parts}
    assert found == inside
    assert 'Table 1' in run(bin/'bicl', 'list', cwd=package.parent)


# ---- what people find their way by

def test_changelog_and_citation():
    log, cff = (ROOT/'CHANGELOG.md').read_text(), yaml.safe_load((ROOT/'CITATION.cff').read_text())
    assert re.findall(r'^## (\S+)', log, re.M)[:2] == [bicl.__version__, '0.1.0']
    assert cff['version'] == bicl.__version__ and '2011.01168' in json.dumps(cff)
    for p in (ROOT/'.github'/'ISSUE_TEMPLATE').glob('*.md'):
        _, head, body = p.read_text().split('---\n', 2)
        assert {'name', 'about'} <= set(yaml.safe_load(head)) and len(body.split()) < 150
