"""The library as its users meet it: one import, own networks and data sets, Ctrl-C, save and load."""
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import bicl
from bicl.core import Rng
from bicl.learner import METHODS, Callback, fit, make_learner
from bicl.models import only
from bicl.streams import make_stream

ROOT = Path(__file__).resolve().parent.parent
bicl.methods() # every method is known
NAMES = [n for n, m in METHODS.items() if m.cls.__module__.startswith('bicl.')]
LEARNERS = [n for n in NAMES if 'VAE' not in n]
OWN = [n for n in LEARNERS if 'model' in inspect.signature(METHODS[n].cls).parameters]
TINY = dict(EWC=dict(samples=5), Joint=dict(epochs=1), MER=dict(batches=1, replayed=3))
SMALL = dict(memory=9, preset=False)


# One import -------------------------------------------------------------------------------------

IMPORT = '''
import json, sys
import bicl
early = [m for m in ('torch', 'numpy', 'pandas', 'numba') if m in sys.modules]
bicl.make_learner
from bicl.learner import METHODS
print(json.dumps([early, [m for m in sys.modules if m.startswith('bicl.')], list(METHODS)]))
'''


@pytest.fixture(scope='module')
def another(stream, tmp_path_factory):
    "What one new process says, for seconds pass until it has imported: of its import, of a learner, of Ctrl-C; and what is true of the learner."
    learner, _ = trained('BiCL++', stream, hidden=(8, 8))
    bicl.save(learner, path := tmp_path_factory.mktemp('saved')/'a')
    x = stream.test_x[:40]
    load = (f'import numpy as np; x = np.array({x.tolist()}, "uint8")\n'
            f'print(json.dumps(bicl.predict(bicl.load({str(path)!r}), x).tolist()))')
    run = subprocess.run([sys.executable, '-c', '\n'.join([IMPORT, load, STOPPED])], capture_output=True, text=True, cwd=ROOT,
                         env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert run.returncode == 0, run.stderr
    said = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('[')]
    return *said, bicl.predict(learner, x)


def test_one_import(another):
    "It loads nothing, and then knows every method and engine."
    early, late, names = another[0]
    assert not early
    assert set(names) == set(NAMES) and 'BiCL++' in names
    speaks = {f'bicl.{p.stem}' for p in (ROOT/'bicl').glob('*.py')
              if re.search(r'^register_(method|engine)\(', p.read_text(encoding='utf-8'), re.M)}
    assert speaks and speaks <= set(late), 'a module that registers something is not loaded by bicl'


def test_the_names_of_the_library():
    for name in bicl.__all__: assert callable(getattr(bicl, name)), name
    assert {*bicl.__all__, '__version__'} <= set(dir(bicl))
    assert not hasattr(bicl, 'nothing')


# Own networks -----------------------------------------------------------------------------------

def small(info): return nn.Sequential(nn.Linear(info.d, 7), nn.Tanh(), nn.Linear(7, info.classes))


@pytest.fixture(scope='module')
def stream():
    s = make_stream('mnist-split', [100, 101], tasks=2, per_task=20)
    s.held = [h[:, :30] for h in s.held]
    return s


def trained(name, stream, **kw):
    learner = make_learner(name, stream, **TINY.get(name, {}) | SMALL | kw)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # Independent is told more than others
        run = fit(learner, stream, block=10, test='new', progress=False)
    return learner, run


@pytest.mark.parametrize('name', OWN)
def test_own_networks_for_every_method(name, stream, tmp_path):
    (a, run), (b, _) = trained(name, stream, model=small), trained(name, stream, model=small)
    for p, q in zip(a.parameters(), b.parameters()): assert torch.equal(p, q)
    assert run.accuracy[:, -1].isfinite().all()
    bicl.save(a, tmp_path/'a')
    again = bicl.load(tmp_path/'a', model=small)
    assert torch.equal(bicl.predict(again, stream.test_x[:50]), bicl.predict(a, stream.test_x[:50]))
    with pytest.raises(ValueError, match='say what makes it'): bicl.load(tmp_path/'a')


def test_who_takes_networks_and_splits(stream):
    assert set(LEARNERS) - set(OWN) == {'Independent'}
    rule = lambda name: name.startswith('0')
    assert make_learner('BiCL', stream, model=small, split=rule).names.w == ['2.weight', '2.bias']
    assert make_learner('BiCL', stream, model=small).names.w == ['2.weight', '2.bias']
    other = make_learner('BiCL', stream, model=small, split=lambda name: 'bias' in name)
    assert other.names.lam == ['0.bias', '2.bias']
    assert make_learner('BiCL', stream, split='reversed').settings.split == 'reversed'
    for name, kw, says in (('ER', dict(split=rule), 'ER takes no split'), ('ER', dict(split='head'), 'split'),
                           ('Independent', dict(model=small), 'Independent takes no model')):
        with pytest.raises(ValueError, match=says): make_learner(name, stream, **kw)


def test_presets_apply_to_own_networks_and_belong_to_registered_names():
    ours = make_stream('mnist-rotations', [100], tasks=2, per_task=10)
    plain, own = (make_learner('BiCL', ours, **kw).settings for kw in ({}, dict(model=small)))
    assert plain == own != make_learner('BiCL', ours, preset=False).settings
    x, y, task = Rng([7]).normal(40, 5)[0], torch.arange(40) % 2, torch.arange(40) // 20
    user = bicl.stream_from_arrays(x, y, task, name='mnist-rotations')
    assert make_learner('BiCL', user).settings == make_learner('BiCL', user, preset=False).settings != plain


def test_a_rule_is_saved(stream, tmp_path):
    learner, _ = trained('BiCL', stream, split=lambda name: 'layers.0' in name)
    bicl.save(learner, tmp_path/'a')
    again = bicl.load(tmp_path/'a')
    assert again.names == learner.names and not again.fast
    assert torch.equal(bicl.predict(again, stream.test_x[:9]), bicl.predict(learner, stream.test_x[:9]))


# Save and load ----------------------------------------------------------------------------------

@pytest.mark.parametrize('name', LEARNERS)
def test_saved_and_loaded(name, stream, tmp_path):
    learner, _ = trained(name, stream, hidden=(8, 8))
    bicl.save(learner, tmp_path/'a')
    again, x = bicl.load(tmp_path/'a'), stream.test_x[:60]
    told = dict(task=1) if learner.uses_task else {}
    assert torch.equal(bicl.predict(again, x, **told), bicl.predict(learner, x, **told))
    assert again.settings == learner.settings and again.info == learner.info
    assert {k: v.tolist() for k, v in again.state_dict().items()} == {
        k: v.tolist() for k, v in learner.state_dict().items()}
    if told:
        with pytest.raises(ValueError, match='must be told the task'): bicl.predict(learner, x)


def test_loaded_in_another_process(another):
    assert torch.equal(torch.tensor(another[1]), another[-1])


def test_another_version_is_named(stream, tmp_path, monkeypatch):
    learner, _ = trained('ER', stream)
    bicl.save(learner, tmp_path/'a')
    monkeypatch.setitem(METHODS, 'ER', __import__('dataclasses').replace(METHODS['ER'], version=99))
    with pytest.warns(UserWarning, match='this is 99'): bicl.load(tmp_path/'a')


# Ctrl-C -----------------------------------------------------------------------------------------

class Watcher(Callback):
    "Notes the shares of blocks that a learner reports."
    def __init__(self): self.shares = []
    def within_block(self, loop, share): self.shares.append(share)


@pytest.mark.parametrize('name', ['BiCL', 'ER', 'DER++'])
@pytest.mark.parametrize('kind', ['torch', 'auto'])
def test_a_bar_moves_within_a_block_and_changes_nothing(name, kind, stream):
    def run(callbacks):
        learner = make_learner(name, stream, **SMALL, hidden=(8, 8), rounds=2.)
        fit(learner, stream, block=20, test='new', progress=False, callbacks=callbacks)
        return learner.state_dict()
    watcher = Watcher()
    if kind == 'torch':
        with only('torch'): alone, watched = run([]), run([watcher])
    else: alone, watched = run([]), run([watcher])
    assert watcher.shares == [.25, .5, .75, 1.]*2
    for k, v in alone.items(): assert torch.equal(v, watched[k]), k


@pytest.mark.parametrize('name, settings', [('Joint', dict(hidden=(8, 8), batch=10)), *(
    (n, dict(hidden=8, latent=2, samples=5, drawn=1, batch=10)) for n in NAMES if 'VAE' in n)])
def test_passes_over_a_block_are_progress(name, settings, stream):
    "Who passes over a block several times says so after each; Joint, and the joint generator, in the first block only."
    s = stream if name == 'Joint' else make_stream('mnist-classes', seeds=[100], tasks=2, per_task=20)
    if name != 'Joint': s.held = [h[:, :2] for h in s.held]
    fit(make_learner(name, s, preset=False, epochs=3, **settings), s, block=20, test='new', progress=False, callbacks=[watcher := Watcher()])
    assert watcher.shares and watcher.shares[-1] == 1 and {1/3, 2/3} <= set(watcher.shares)
    assert name != 'Joint' or watcher.shares == sorted(watcher.shares)


def test_the_bar(stream, monkeypatch):
    "It moves within blocks, never back, and ends where it should."
    class Fake:
        def __init__(self, total, initial, **_): self.total, self.n, self.seen = total, initial, []; Fake.last = self
        def update(self, k): self.n += k; self.seen.append(self.n)
        def set_postfix(self, **_): pass
        def close(self): self.closed = True
    monkeypatch.setattr('tqdm.auto.tqdm', Fake)
    fit(make_learner('ER', stream, **SMALL, hidden=(8, 8), rounds=2.), stream, block=20, test='new')
    bar = Fake.last
    assert bar.seen == sorted(bar.seen) and set(bar.seen) == set(range(0, 41, 5))
    assert bar.n == bar.total == 40 and bar.closed


STOPPED = '''
import json, os, random, signal, threading, torch, bicl
from bicl.learner import Interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
stream = bicl.make_stream('mnist-split', [100, 101], tasks=2, per_task=40)
stream.held = [h[:, :30] for h in stream.held]
make = lambda: bicl.make_learner('DER++', stream, model=lambda info: torch.nn.Linear(info.d, info.classes),
                                 memory=9, preset=False)
how = dict(block=5, test='new', progress=False)
whole, cut, stops = make(), make(), 0
wanted = bicl.fit(whole, stream, **how)
learn, when = cut.observe, random.sample(range(16), 3) # blocks

def disturbed(block):
    "Learn a block; a signal comes while it is learnt."
    if 16 - len(left) in when: # its number
        threading.Timer(random.uniform(0, .01), os.kill, (os.getpid(), signal.SIGINT)).start()
    learn(block)
    left.pop()
    for t in threading.enumerate():
        if isinstance(t, threading.Timer): t.join() # not later, when nobody waits for it

left, cut.observe = [None]*16, disturbed
while stops < 4:
    try: found = bicl.fit(cut, stream, **how, resume=cut.fitted)
    except Interrupted: stops += 1
    else: break
same = all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), cut.state_dict().values()))
print(json.dumps([stops, found.resumed, same, found.accuracy.nan_to_num().equal(wanted.accuracy.nan_to_num())]))
'''


def test_control_c_at_any_moment(another):
    "A real signal, three times at random moments, and the same bits in the end."
    stops, resumed, *same = another[2]
    assert stops == resumed and stops and all(same)


def test_what_cannot_be_resumed(stream):
    learner = make_learner('Online', stream)
    with pytest.raises(ValueError, match='nothing to resume'): fit(learner, stream, resume=True)

    class Breaks(Callback):
        def after_task(self, loop): raise RuntimeError('a task is over, but not tested')
    with pytest.raises(RuntimeError): fit(learner, stream, progress=False, callbacks=[Breaks()])
    with pytest.raises(ValueError, match='nothing to resume'): fit(learner, stream, resume=True)
    with pytest.raises(ValueError, match='trained already'): fit(learner, stream)


# Data sets --------------------------------------------------------------------------------------

def test_torchvision():
    datasets = pytest.importorskip('torchvision.datasets')
    pictures = datasets.FakeData(size=60, image_size=(3, 8, 6), num_classes=4) # PIL
    s = bicl.stream_from_datasets(pictures, seeds=[100], scenario='task')
    assert s.shape == (3, 6, 8) or s.shape == (3, 8, 6)
    assert s.bytes and s.T == 2 and s.scenario == 'task' and s.classes == 4
    assert len(s.y) == 60 and [int(y) for _, y in (pictures[i] for i in range(60))] == s.y.tolist()


def test_avalanche():
    pytest.importorskip('avalanche')
    from avalanche.benchmarks import nc_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset
    from torch.utils.data import TensorDataset
    x, y = Rng([7], 'x').normal(80, 6)[0], torch.arange(80) % 4
    def data(x, y):
        d = TensorDataset(x, y)
        d.targets = y.tolist()
        return as_classification_dataset(d)
    theirs = nc_benchmark(data(x, y), data(x[:20], y[:20]), n_experiences=2, task_labels=False,
                          fixed_class_order=[2, 0, 1, 3], shuffle=False)
    s = bicl.stream_from_datasets(theirs, scenario='class', seeds=[100, 101])
    assert (s.T, s.R, s.shape, s.sizes, s.scenario) == (2, 2, (6,), (40, 40), 'class')
    assert sorted(map(tuple, s.train(1)[0][0].tolist())) == sorted(map(tuple, x[s_rows(y, s.labels[1])].tolist()))
    assert s.held[0].shape[1] == 10
    assert fit(make_learner('Online', s), s, progress=False).accuracy.isfinite().all()


def s_rows(y, labels): return torch.isin(y, labels)
