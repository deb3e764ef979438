"""What decides a run's numbers is in its identity, what does not is not: each case really changes something."""
import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import toys
import torch
from again import compared

import bicl.alignment
import bicl.data
import bicl.jobs
import bicl.learner
import bicl.streams
from bicl.core import Rng, digest
from bicl.data import available
from bicl.jobs import Job, finished, load_grid, result_rows, write_result
from bicl.learner import METHODS, Run, best_settings
from bicl.runner import Outcome, execute, sort_out, tell

HERE = Path(__file__).parent
ROOT = HERE.parent
SMALL = dict(seeds=(100, 101), settings={'stream.tasks': 2, 'stream.per_task': 30}, device='cpu')
JOBS = dict(rotations=Job('mnist-rotations', 'Online', **SMALL), permutations=Job('mnist-permutations', 'Online', **SMALL),
            classes=Job('mnist-classes', 'Online', **SMALL), letters=Job('notmnist-permutations', 'Online', **SMALL),
            preset=Job('mnist-permutations', 'BiCL', 200, **SMALL), toy=Job('toy', 'Plain', **SMALL),
            alignment=Job('toy', 'Plain', **SMALL, notebook='alignment'), generative=Job('toy', 'Plain', **SMALL, notebook='generative'))


def forget():
    "As in a new process: nothing is known of any stream."
    bicl.jobs.STREAMS.clear()


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


def other_numbers(kind):
    "A generator whose numbers for one purpose are others."
    class Other(Rng):
        def __init__(self, seeds, name='', device='cpu'): super().__init__(seeds, name.replace(f'/{kind}/', '/other/'), device)
    return Other


# ---- (a) what makes finished runs count as unfinished

def rotate(m):
    real = bicl.streams.rotate
    m.setattr(bicl.streams, 'rotate', lambda x, degrees: real(x, degrees + 1))


def permutation(m): m.setattr(bicl.streams, 'Rng', other_numbers('order'))
def draw(m): m.setattr(bicl.streams, 'Rng', other_numbers('draw'))


def shown(m):
    real = bicl.streams.Permute.__call__
    m.setattr(bicl.streams.Permute, '__call__', lambda self, x, t: real(self, x.flip(-1), t))


def span(m):
    b = bicl.streams.BENCHMARKS['mnist-rotations']
    m.setitem(bicl.streams.BENCHMARKS, 'mnist-rotations', replace(b, builder=bicl.streams.rotations('mnist', span=91)))


def labels(m, part='train_y'):
    "The reader takes one label of many for another."
    real = bicl.data.load
    def load(*a, **kw):
        d = real(*a, **kw)
        y = getattr(d, part).clone()
        y[::7] = (y[::7] + 1) % 10
        return replace(d, **{part: y})
    m.setattr(bicl.streams, 'load', load)


def test_labels(m): labels(m, 'test_y')
test_labels.__test__ = False


def split(m):
    "Another part of notMNIST is for testing."
    real = bicl.data.stratified
    m.setattr(bicl.data, 'stratified', lambda y, fraction, name: real(y, fraction, name + '!'))


def version(m): m.setitem(METHODS, 'Online', replace(METHODS['Online'], version=METHODS['Online'].version + 1))


def preset(m):
    "One number in the file of presets."
    real = best_settings
    root = preset.folder
    (root/'nbs'/'experiments').mkdir(parents=True)
    text = (ROOT/'nbs'/'experiments'/'presets.yaml').read_text()
    was = best_settings('BiCL', 'mnist-permutations', 200)
    name, value = next((k, v) for k, v in was.items() if isinstance(v, float))
    changed = text.replace(f'{name}: {value}', f'{name}: {value*.5}')
    assert changed != text
    (root/'nbs'/'experiments'/'presets.yaml').write_text(changed)
    m.setattr(bicl.learner, 'project_files', lambda: root/'nbs')
    assert real('BiCL', 'mnist-permutations', 200) != was


def default(m):
    "A setting that no preset mentions has another default."
    from dataclasses import dataclass
    old = METHODS['Plain']
    @dataclass
    class New(old.settings): lr: float = .2
    m.setitem(METHODS, 'Plain', replace(old, settings=New))


def notebook(m):
    "The experiment trains in another way."
    nb = json.loads((ROOT/'nbs'/'experiments'/'discriminative.ipynb').read_text())
    cell = next(c for c in nb['cells'] if 'fit(learner' in ''.join(c['source']))
    cell['source'] = [s.replace('fit(learner', 'fit(learner.double()') for s in cell['source']]
    (preset.folder/'nbs'/'experiments').mkdir(parents=True)
    (preset.folder/'nbs'/'experiments'/'discriminative.ipynb').write_text(json.dumps(nb))
    m.setattr(bicl.jobs, 'project_files', lambda: preset.folder/'nbs')


def instrument(m):
    "What an experiment measures with has a version, like a method."
    m.setattr(bicl.alignment.Alignment, 'version', 99, raising=False)


def judge(m): m.setitem(METHODS, 'Joint', replace(METHODS['Joint'], version=METHODS['Joint'].version + 1))


CHANGES = [(rotate, 'rotations'), (span, 'rotations'), (permutation, 'permutations'), (shown, 'permutations'),
           (draw, 'permutations'), (draw, 'rotations'), (draw, 'classes'), (labels, 'permutations'), (test_labels, 'rotations'),
           (split, 'letters'), (preset, 'preset'), (version, 'permutations'), (default, 'toy'), (notebook, 'toy'),
           (instrument, 'alignment'), (judge, 'generative')]


@pytest.mark.parametrize('change, which', CHANGES, ids=lambda v: getattr(v, '__name__', v))
def test_a_change_that_matters(tmp_path, monkeypatch, change, which):
    job, preset.folder = JOBS[which], tmp_path/'root'
    if change is split:
        if not available('notmnist'): pytest.skip('notMNIST is not on this machine')
        cached = next(v for v in vars(bicl.data).values() if hasattr(v, 'cache_clear') and 'load' in v.__name__)
    toys.fake(job, tmp_path, T=2)
    assert finished(job, tmp_path)
    forget()
    assert finished(job, tmp_path) # and again, from the beginning
    with monkeypatch.context() as m:
        forget()
        if change is split: cached.cache_clear()
        change(m)
        assert not finished(job, tmp_path)
    if change is split: cached.cache_clear()
    forget()
    assert finished(job, tmp_path)


# ---- methods and benchmarks of a user, in files of their own

PLUGIN = '''
"A plugin."
from dataclasses import dataclass
import torch
from bicl.core import Rng, Settings
from bicl.learner import Learner, register_method
from bicl.models import MLP
from bicl.solvers import sgd_step
from bicl.streams import Stream, register_benchmark
import mine_helper
from mine_numbers import RATE

NAMES = {'eins', 'zwei', 'drei', 'vier'} # a set: its order differs from process to process

@dataclass
class MineSettings(Settings):
    "Settings."
    lr:float=.1 # step

class Mine(Learner):
    "A method."
    def __init__(self, info, settings):
        super().__init__(info, settings)
        if info.classes > 100: raise ValueError('that is too much for me')
        self.model = MLP(self.rng('init'), (info.d, 5, info.classes), dtype=info.dtype)
        self.names = {'a', 'b', 'c', 'd', 'e'}

    @property
    def rate(self): return self.settings.lr*RATE

    def observe(self, block): sgd_step(self.model, block.x, block.y, mine_helper.shorter(self.rate))
    def predict(self, x, t): return self.model(x)

def build(name, seeds, tasks=2, per_task=20, device='cpu', dtype=torch.float32):
    x = Rng([1], 'mine').uniform(100, 6)[0]
    y = (x.sum(1) > 3).long()
    draws = [Rng(seeds, f'{name}/{t}').permutation(60, per_task) for t in range(tasks)]
    return Stream(name, seeds, (x, y), draws, (x[60:], y[60:]), classes=2, device=device, dtype=dtype)

register_method('Mine', Mine, MineSettings)
register_benchmark('mine', build)
'''
FILES = {'mine.py': PLUGIN, 'mine_numbers.py': 'RATE = 1.0\n',
         'mine_helper.py': 'def shorter(x):\n    "Half of it."\n    return x/2 # a half\n'}
ASK = '''
import sys
from bicl.jobs import Job, load_plugins
load_plugins(['mine'])
for job in Job('mine', 'Mine', seeds=(1, 2)), Job('mine', 'Online', seeds=(1, 2)), Job('mine', 'BiCL', 200, (1, 2)): print(job.stamp)
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    "A folder with a plugin, and a function that gives the stamp after an edit of one of its files."
    for name, text in FILES.items(): (tmp_path/name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    def stamp(name='mine.py', old='', new='', job=Job('mine', 'Mine', seeds=(1, 2))):
        assert old in FILES[name]
        (tmp_path/name).write_text(FILES[name].replace(old, new) if old else FILES[name])
        for n in FILES: sys.modules.pop(n[:-3], None) # as in a new process
        importlib.invalidate_caches()
        forget()
        importlib.import_module('mine')
        found = job.stamp
        (tmp_path/name).write_text(FILES[name])
        return found
    yield stamp
    for registry, name in ((METHODS, 'Mine'), (bicl.streams.BENCHMARKS, 'mine')): registry.pop(name, None)
    for n in FILES: sys.modules.pop(n[:-3], None)


@pytest.mark.parametrize('name, old, new', [
    ('mine.py', 'self.settings.lr*RATE', 'self.settings.lr*RATE*2'), # a property
    ('mine.py', "Rng([1], 'mine')", "Rng([2], 'mine')"), # the benchmark
    ('mine.py', "'eins', ", ''), # a set
    ('mine.py', 'lr:float=.1', 'lr:float=.2'), # a default
    ('mine_helper.py', 'x/2', 'x/3'), # a function in another module
    ('mine_numbers.py', '1.0', '1.1'), # a number in another module
])
def test_a_plugin_that_changes(plugin, name, old, new):
    assert plugin() == plugin() != plugin(name, old, new)


def test_a_plugins_benchmark_counts_for_every_method(plugin):
    job = Job('mine', 'Online', seeds=(1, 2))
    assert plugin(job=job) == plugin(job=job) != plugin('mine.py', 'x.sum(1) > 3', 'x.sum(1) > 3.1', job)


# ---- (b) what does not matter

@pytest.mark.parametrize('name, old, new', [
    ('mine.py', 'that is too much for me', 'too many classes'),
    ('mine.py', '"A method."', '"My own method."'),
    ('mine.py', ' # a set: its order differs from process to process', ''),
    ('mine_helper.py', '"Half of it."', '"x/2"'),
])
def test_a_plugin_that_is_reworded(plugin, name, old, new):
    assert plugin() == plugin(name, old, new)


def rewrite(folder):
    "A copy of the package in which an error is reworded, a private function renamed, another moved, and a method added."
    own = folder/'bicl'
    shutil.copytree(ROOT/'bicl', own) # with what Python has compiled, which holds for the files that stay as they are
    for name in ('settings.ini', 'data'): (folder/name).symlink_to(ROOT/name)
    shutil.copytree(ROOT/'nbs'/'experiments', folder/'nbs'/'experiments')
    text = (own/'streams.py').read_text()
    assert '_draws(' in text and 'needs at least one task' in text and 'def rotate(' in text
    text = text.replace('_draws(', '_rows_of_tasks(').replace('needs at least one task', 'without tasks is none')
    start = text.index('def rotate(')
    end = text.index('\n# %%', start)
    corners = text.rindex('\ndef _corners', 0, start) + 1
    (own/'turned.py').write_text('import math\nimport torch\nfrom torch import Tensor\n'
                                 + text[corners:text.index('\n# %%', corners)] + '\n' + text[start:end])
    (own/'streams.py').write_text(text[:corners] + text[text.index('\n# %%', corners):start] + 'from .turned import rotate\n' + text[end:])
    with open(own/'learner.py', 'a') as f: f.write('\n\nregister_method("Another", Learner, order=3)\n')


def stamps(folder, seed=0, code=ASK, package=ROOT):
    "Stamps as another process sees them."
    path = os.pathsep.join([str(package), str(folder)])
    env = os.environ | dict(PYTHONHASHSEED=str(seed), PYTHONPATH=path, PYTHONDONTWRITEBYTECODE='1')
    got = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, cwd=folder)
    assert got.returncode == 0, got.stderr
    return got.stdout.split()


STREAMS = ['mnist-permutations', 'fashion-permutations', 'mnist-rotations', 'mnist-classes']
SHORT = dict(seeds=(100, 101), tasks=2, per_task=30)


def test_other_processes_and_rewritten_code(tmp_path):
    "(b) and (c): other hash seeds, reworded errors, renamed and moved functions, one more method: the same stamps and streams."
    mine, copy = tmp_path/'mine', tmp_path/'copy'
    for d in (mine, copy): d.mkdir()
    for name, text in FILES.items(): (mine/name).write_text(text)
    rewrite(copy)
    ask = ASK + "print(Job('mnist-rotations', 'Online', seeds=(1,), settings={'stream.tasks': 2, 'stream.per_task': 30}).stamp)\n"
    streams = f'''
from bicl.streams import make_stream
for n in {STREAMS}: print(make_stream(n, **{SHORT}).fingerprint())
assert 'torchvision' not in sys.modules, 'it takes seconds to import'
'''
    first = stamps(mine, 123, ask + streams)
    assert first[4:] == [bicl.streams.make_stream(n, **SHORT).fingerprint() for n in STREAMS]
    check = f'import bicl\nassert bicl.__file__.startswith({str(copy)!r})\n'
    assert len(set(first[:4])) == 4
    assert first[:4] == stamps(mine, 1, check + ask, copy)


# ---- (d) one question, one run

def test_two_wordings_are_one_run(tmp_path):
    f = tmp_path/'g.yaml'
    f.write_text('''
plugins: [toys]
benchmark: toy
seeds: [100]
runs:
- {method: Plain}
- {method: plain, memory: 77}
- {method: Plain, settings: {lr: 0.1}}
- {method: Plain, preset: false, settings: {stream.test: all}}
- {method: Plain, settings: {stream.block: 500}}
- {method: Plain, sweep: {lr: [1, 1.0]}}
- {method: Plain, settings: {stream.per_task: 60}}
- {method: Plain, settings: {stream.tasks: 3}}
''')
    jobs = load_grid(f).jobs
    assert [j.label for j in jobs] == ['Plain toy', 'Plain toy lr=1', 'Plain toy per_task=60', 'Plain toy tasks=3']
    names, todo, outcomes = sort_out(jobs, tmp_path)
    assert len(names) == 4 and len(todo) == 2 and not outcomes # what only the data shows is found out here
    toys.fake(jobs[2], tmp_path, T=3)
    assert finished(jobs[0], tmp_path) and len(sort_out(jobs, tmp_path)[1]) == 1


# ---- the identity and its parts

def test_checkpoint_and_job_have_one_identity():
    from bicl.checkpoint import identity
    job = replace(JOBS['preset'], protocol='strict')
    learner, stream = job.make()
    assert job.identity() == identity(learner, stream, 'strict') | dict(code=job.identity()['code'])
    assert job.stamp == digest(job.identity())


def test_without_the_data(tmp_path, monkeypatch):
    "Results that were brought along are shown as they are; nothing can be run."
    job = JOBS['toy']
    toys.fake(job, tmp_path, T=2)
    def gone(name, seeds, **kw): raise bicl.data.DataError('gone')
    monkeypatch.setitem(bicl.streams.BENCHMARKS, 'toy', replace(bicl.streams.BENCHMARKS['toy'], builder=gone))
    forget()
    faster = replace(job, settings=job.settings | dict(lr=.5))
    assert finished(job, tmp_path) and not finished(faster, tmp_path)
    _, todo, outcomes = sort_out([job, faster], tmp_path)
    assert not todo and [o.status for o in outcomes.values()] == ['skipped', 'unavailable']
    monkeypatch.setitem(METHODS, 'Plain', replace(METHODS['Plain'], version=2))
    assert not finished(job, tmp_path)


def test_a_worker_with_other_code(tmp_path):
    "Both versions are named, and nothing is executed or removed."
    job = JOBS['toy']
    toys.fake(job, tmp_path, T=2)
    before = sorted(p.name for p in (tmp_path/'runs').iterdir())
    got = execute(job, tmp_path, job.identity() | dict(version='7'))
    assert got.status == 'failed' and f'version is 7 there and {job.version} here' in got.note
    assert sorted(p.name for p in (tmp_path/'runs').iterdir()) == before
    assert execute(job, tmp_path, job.identity()) == Outcome('skipped', note='finished by another runner')


def test_finished_by_another_while_our_kernel_died(tmp_path):
    "A runner tells of its dead kernel when another has finished the run already: the second try leaves nothing of that."
    job = JOBS['toy']
    toys.fake(job, tmp_path, T=2)
    tell(job, tmp_path, Outcome('died', note='the kernel died'))
    (tmp_path/'checkpoints'/f'{job.name}.log').write_text('Killed')
    assert execute(job, tmp_path).status == 'skipped'
    assert not [*(tmp_path/'checkpoints').iterdir()]


def test_the_device_is_recorded(tmp_path):
    rows = toys.fake(JOBS['toy'], tmp_path, T=2)
    assert set(rows.device) == {'cpu'}
    assert finished(replace(JOBS['toy'], device='auto'), tmp_path)
    assert not finished(replace(JOBS['toy'], device='cuda'), tmp_path)
    assert replace(JOBS['toy'], device='cuda').stamp == JOBS['toy'].stamp


def test_jobs_travel_as_json():
    job = JOBS['preset']
    again = Job(**json.loads(json.dumps(asdict(job))) | dict(seeds=job.seeds))
    assert again == job and again.stamp == job.stamp
    assert torch.equal(job.stream().y, again.stream().y)


def test_any_source_has_a_fingerprint(plugin):
    "Statements that are rare: an error passed on, magic numbers of all kinds, names taken from afar."
    rare = '    try: return x/2\n    except TypeError: raise\n'
    old = '    return x/2 # a half\n'
    assert plugin('mine_helper.py', old, rare) != plugin()
    assert plugin('mine_helper.py', old, rare + '    finally: del x\n') != plugin('mine_helper.py', old, rare)


def test_what_runs_again_is_compared_bit_by_bit(tmp_path):
    "tests/again.py: the last bit of one number is noticed, and a run that is not there."
    a, job = 100*torch.rand(2, 4, 3, dtype=torch.float64), Job('mnist-permutations', 'Online', seeds=(100, 101))
    rows = result_rows(job, Run('mnist-permutations', 'Online', 'buffered', (100, 101), a, task=3))
    other, off = rows.copy(), rows.copy()
    other.loc[3, 'value'] = np.nextafter(other.value[3], 0)
    off.loc[off.index[off.task_trained == 3][0], 'value'] += 2**-10 # one of two seeds, one of three tasks
    for name, r in dict(new=rows, same=rows, other=other, off=off).items(): write_result(r, tmp_path/f'{name}.parquet')
    def against(name): return compared(tmp_path/'new.parquet', tmp_path/f'{name}.parquet')
    n = len(rows)
    assert against('same') == dict(numbers=n, differing=0, most=0, shift=0)
    assert against('other')['differing'] == 1 and 0 < against('other')['most'] < 1e-12
    assert against('none')['numbers'] == 0
    found = against('off')
    assert (found['numbers'], found['differing']) == (n, 1) and abs(found['most'] - 2**-10) < 1e-12
    assert abs(found['shift'] + 2**-10/6) < 1e-12
