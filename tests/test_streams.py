"Streams: their fingerprint sees what decides the numbers, tuning never sees a test image, a scenario is kept."
import warnings
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

from bicl.adapters import stream_from_arrays
from bicl import baselines, bilevel, compiled, data, gem, generative, replay, rounds, streams
from bicl.core import Rng
from bicl.data import DATA, Images, available, load
from bicl.learner import METHODS, evaluate, fit, info_of, make_learner, resolve
from bicl.memory import Memory
from bicl.models import Replicated
from bicl.streams import BENCHMARKS, Block, gather, make_stream

SHORT = dict(seeds=(100, 101), tasks=2, per_task=30)
OURS = [n for n, b in BENCHMARKS.items() if b.builder.__module__ != 'toys'] # what other tests register
HERE = [n for n in OURS if available(n.split('-')[0])]
PICTURES = [n for n in HERE if 'classes' not in n]


def show(name, **kw): return make_stream(name, **SHORT | kw).fingerprint()


# What the fingerprint sees ----------------------------------------------------------------------

def other_rotate(patch):
    real = streams.rotate
    patch.setattr(streams, 'rotate', lambda x, degrees: real(x, degrees + .5))


def other_span(patch):
    other = replace(BENCHMARKS['mnist-rotations'], builder=streams.rotations('mnist', span=91))
    patch.setitem(BENCHMARKS, 'mnist-rotations', other)


def other_order(patch):
    real = streams.Permute.__init__
    patch.setattr(streams.Permute, '__init__', lambda self, order: real(self, order.roll(1, -1)))


def other_view(patch):
    real = streams.Permute.__call__
    patch.setattr(streams.Permute, '__call__', lambda self, x, t: real(self, x, t).flip(-1))


def other_test_view(patch):
    def test(self, stream, t, chunk):
        for x, y in stream.pool_test(t, chunk): yield self(x, 0), y
    patch.setattr(streams.Permute, 'test', test)


def other_draw(patch):
    real = streams._draws
    patch.setattr(streams, '_draws', lambda *a: [d.flip(1) for d in real(*a)])


def other_generator(patch):
    real = Rng.permutation
    patch.setattr(Rng, 'permutation', lambda self, n, k=None: (real(self, n) + 1).remainder(n)[:, :k])


def decoded(change):
    "Let MNIST's decoder change what it read."
    def other(patch):
        real = DATA['mnist'].decode
        def decode(contents):
            parts = [a.copy() for a in real(contents)]
            return change(*parts) or parts
        patch.setitem(DATA, 'mnist', replace(DATA['mnist'], decode=decode))
    return other


def relabelled(x, y, test_x, test_y): y[:] = (y + 1) % 10
def one_relabelled(x, y, test_x, test_y): test_y[-1] = (test_y[-1] + 1) % 10
def repainted(x, y, test_x, test_y): x[:, 14, 14] ^= 1
def one_repainted(x, y, test_x, test_y): test_x[-1, 14, 14] ^= 1
def fewer_tests(x, y, test_x, test_y): return x, y, test_x[:-1], test_y[:-1]


TURNED, SHUFFLED = ('mnist-rotations',), ('mnist-permutations',)
BOTH = TURNED + SHUFFLED


@pytest.mark.parametrize('change, seen_by, unseen_by', [
    (other_rotate, TURNED, SHUFFLED), (other_span, TURNED, SHUFFLED),
    (other_order, SHUFFLED, TURNED), (other_view, SHUFFLED, TURNED),
    (other_test_view, SHUFFLED, TURNED), (other_draw, BOTH, ()), (other_generator, BOTH, ()),
    (decoded(relabelled), SHUFFLED, ()), (decoded(one_relabelled), SHUFFLED, ()),
    (decoded(repainted), SHUFFLED, ()), (decoded(one_repainted), SHUFFLED, ()),
    (decoded(fewer_tests), SHUFFLED, ()),
], ids=['rotate', 'span', 'permutation', 'view', 'view of the tests', 'draw', 'generator',
        'training labels', 'one test label', 'training pixels', 'one test pixel', 'test set'])
def test_changes_are_seen(change, seen_by, unseen_by, monkeypatch):
    before = {n: show(n) for n in seen_by + unseen_by}
    change(monkeypatch)
    for n in seen_by: assert show(n) != before[n]
    for n in unseen_by: assert show(n) == before[n]
    monkeypatch.undo()
    for n in seen_by: assert show(n) == before[n]


@pytest.mark.skipif(not available('notmnist'), reason='notMNIST is not on this machine')
@pytest.mark.parametrize('name', ['notmnist-permutations', 'notmnist-classes'])
def test_the_split_of_notmnist_is_seen(name, monkeypatch):
    before, real = show(name), data.stratified
    monkeypatch.setattr(data, 'stratified', lambda y, fraction, _: real(y, fraction, 'other'))
    data._load.cache_clear()
    try: assert show(name) != before
    finally: data._load.cache_clear()


@pytest.mark.parametrize('name', HERE)
def test_what_is_asked_for_is_seen(name):
    many = [{}, dict(tasks=3), dict(per_task=29), dict(seeds=(100, 102)), dict(seeds=(101, 100)),
            dict(seeds=(100,)), dict(tuning=True)]
    assert len({show(name, **kw) for kw in many}) == len(many)


def test_all_benchmarks_differ():
    assert len({show(n) for n in HERE}) == len(HERE)


# What it does not (and other processes agree: test_identity.py) ---------------------------------

@pytest.mark.parametrize('name', HERE)
def test_delivery_is_not_seen(name):
    s = make_stream(name, **SHORT, dtype=torch.float64)
    for t in range(s.T): # use it before it is asked
        for _ in s.blocks(t, 'strict', 7): pass
        next(s.test(t, 33))
    assert s.fingerprint() == show(name) == show(name, dtype=torch.bfloat16)
    if torch.cuda.is_available(): assert show(name, device='cuda') == s.fingerprint()


def arrays(n=60):
    r = Rng([7], 'arrays')
    return r.normal(n, 5)[0], r.integers(3, n)[0], torch.arange(n) // (n//2)


def test_own_arrays():
    x, y, task = arrays()
    one = stream_from_arrays(x, y, task, seeds=[100]).fingerprint()
    pixel, label, moved = x.clone(), y.clone(), task.clone()
    pixel[5, 2] += 1e-6
    label[5] = (label[5] + 1) % 3
    moved[5] = 1
    others = [(pixel, y, task), (x, label, task), (x, y, moved)]
    prints = [stream_from_arrays(*o, seeds=[100]).fingerprint() for o in others]
    tests = [(x[:10], y[:10], task[-10:] * 0), (x[10:20], y[10:20], task[:10])]
    prints += [stream_from_arrays(x[:30], y[:30], task[:30], t, seeds=[100]).fingerprint()
               for t in tests]
    assert len({one, *prints}) == 6
    assert one == stream_from_arrays(x.numpy(), y.numpy(), task.numpy(), seeds=[100],
                                     dtype=torch.float64).fingerprint()


# Tuning -----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Trap:
    "A set of which the test pictures must not be touched."
    real: Images

    def __getattr__(self, k):
        assert k != 'test_x', 'a test picture was asked for'
        return getattr(self.real, k)

    def tuning(self): return Images.tuning(self)


@pytest.mark.parametrize('name', HERE)
def test_tuning_never_asks_for_a_test_picture(name, monkeypatch):
    monkeypatch.setattr(streams, 'load', lambda n: Trap(load(n)))
    s = make_stream(name, **SHORT, tuning=True)
    assert s.tuning and s.benchmark == name
    for t in range(s.T):
        for _ in s.blocks(t): pass
        for _ in s.test(t): pass
    s.fingerprint()
    with pytest.raises(AssertionError, match='test picture'): make_stream(name, **SHORT)


@pytest.fixture
def numbered(monkeypatch):
    "Every set's pictures carry their row as the first four bytes; test pictures count from 2³¹."
    def load_numbered(name):
        d = load(name)
        def number(x, start):
            x = torch.zeros_like(x)
            rows = torch.arange(start, start + len(x))
            for k in range(4): x[:, k] = (rows >> 8*k) & 255
            return x
        return replace(d, train_x=number(d.train_x, 0), test_x=number(d.test_x, 1 << 31))
    monkeypatch.setattr(streams, 'load', load_numbered)


def numbers(x):
    "The rows that these pictures are."
    return set((x.long() << torch.tensor([0, 8, 16, 24])).sum(-1).unique().tolist())


def rows_of(s, r=slice(None)):
    "Which rows a stream trains on and which it is tested on, before a task looks at them."
    x, test = (part.flatten(1)[:, :4] for part in (s.x, s.test_x)) # all that counts of a picture
    train = numbers(torch.cat([x[d[r]].reshape(-1, 4) for d in s.draws]))
    if s.held is None: return train, numbers(test)
    return train, numbers(torch.cat([test[h[r]].reshape(-1, 4) for h in s.held]))


@pytest.mark.parametrize('name', HERE)
def test_tuning_rows(name, numbered):
    train, tested = rows_of(make_stream(name, (100, 101, 0), tuning=True))
    reported = rows_of(make_stream(name, (100, 101, 0, 1, 2, 3, 4)))
    assert max(train | tested) < 1 << 31 # no picture of the test part
    if 'classes' not in name: # here the two sides are the same for all seeds
        assert not train & tested and min(reported[1]) >= 1 << 31


@pytest.mark.parametrize('name', [n for n in HERE if 'classes' in n])
def test_tuning_rows_of_classes(name, numbered):
    s = make_stream(name, (100, 101, 3), tuning=True)
    taboo = rows_of(make_stream(name, range(5)))[1]
    for r, seed in enumerate(s.seeds):
        train, tested = rows_of(s, r)
        own = rows_of(make_stream(name, [seed]))[1]
        assert not train & tested and not (train | tested) & (taboo | own)
        assert .09 < len(tested)/len(train | tested) < .11 and len(tested) > 300


@pytest.mark.parametrize('name', PICTURES)
def test_what_is_kept_aside_is_a_tenth_of_each_class(name):
    s, d = make_stream(name, **SHORT, tuning=True), load(name.split('-')[0])
    assert torch.equal(torch.cat([s.y, s.test_y]).bincount(), d.train_y.bincount())
    assert torch.equal(s.test_y.bincount(), (d.train_y.bincount()/10).round().long())


@pytest.mark.parametrize('name', HERE)
def test_tuning_alone_and_among_others(name):
    alone, among = (make_stream(name, **SHORT | dict(seeds=s), tuning=True)
                    for s in ([101], [100, 101, 0]))
    for t in range(2):
        for a, b in zip(alone.train(t), among.train(t)): assert torch.equal(a[0], b[1])
        for a, b in zip(next(alone.test(t)), next(among.test(t))):
            assert torch.equal(a[0], b[1 if len(b) > 1 else 0])


def test_tasks_of_tuning_are_others():
    "A seed's pixel orders are not those of its reported stream."
    a, b = (make_stream('mnist-permutations', **SHORT, tuning=t) for t in (False, True))
    assert not torch.equal(a.view.order, b.view.order)


# The rest ---------------------------------------------------------------------------------------

def test_gather_is_indexing():
    r = Rng([1, 2, 3], 'gather')
    for shape in ((6,), (6, 2), (6, 2, 3)):
        v = r.normal(*shape)
        for k in ((4,), (4, 2), (1, 2, 5)):
            idx = r.integers(6, *k)
            want = torch.stack([v[i, idx[i]] for i in range(3)])
            assert torch.equal(gather(v, idx), want)
            assert torch.equal(gather(v.transpose(0, 1).contiguous().transpose(0, 1), idx), want)


def test_fields_travel_with_their_samples():
    r = Rng([1, 2], 'fields')
    x, y = r.normal(8, 3), r.integers(4, 8)
    b = Block(x, y, y + 1, dict(a=x[..., :1], b=-y)).take(r.integers(8, 5))
    assert torch.equal(b.extra['a'], b.x[..., :1]) and torch.equal(b.extra['b'], -b.y)
    assert torch.equal(b.task, b.y + 1)
    assert Block(x, y, 0).extra == {} and Block(x, y, 0).extra is not Block(x, y, 0).extra


@pytest.mark.parametrize('name', ['mnist-permutations', 'mnist-rotations', 'mnist-classes'])
def test_whoever_keeps_pictures_keeps_bytes(name):
    "Every method with a memory, in whatever kind of store; and EWC, which keeps samples until the end of a task."
    s, stores = make_stream(name, **SHORT), [dict(store='ring'), dict(store='k-center'), dict(separate=True)]
    ours = {n: m for n, m in METHODS.items() if m.cls.__module__.startswith('bicl.')}
    kept = {n for n, m in ours.items() if 'memory' in (f.name for f in fields(m.settings))}
    assert s.bytes and {'BiCL', 'BiCL++', 'ER', 'DER++', 'MER', 'GEM', 'AGEM', 'VAE-ER'} <= kept
    for n in ours:
        small = dict(hidden=8, latent=2) if 'VAE' in n else dict(hidden=(8,))
        for settings in ({}, *stores)[:4 if 'store' in (f.name for f in fields(ours[n].settings)) else 1]:
            learner = make_learner(n, s, preset=False, memory=8, **small, **settings)
            parts = [m for m in learner.modules() if isinstance(m, Memory)]
            assert bool(parts) == (n in kept | {'EWC'}) and all(m.raw.dtype == torch.uint8 for m in parts), (n, settings)


def test_benchmarks_have_labels_in_the_papers_order():
    known = sorted((BENCHMARKS[n] for n in OURS), key=lambda b: b.order)
    assert [b.label for b in known if b.builder and b.order < 100] == [
        'MNIST rotations', 'MNIST permutations', 'Fashion-MNIST permutations',
        'notMNIST permutations', 'MNIST rotations, 0–180°', 'MNIST classes', 'notMNIST classes',
        'MNIST split', 'Fashion-MNIST split', 'MNIST split, task told', 'Fashion-MNIST split, task told', 'CIFAR-10 split']


# Scenarios --------------------------------------------------------------------------------------

LEARNERS = [n for n, m in METHODS.items() if 'VAE' not in n and m.cls.__module__.startswith('bicl.')]
TINY = dict(EWC=dict(samples=5), Joint=dict(epochs=1), MER=dict(batches=1, replayed=3))


@pytest.fixture(params=['mnist-split', 'fashion-split-task'])
def split(request):
    "Three tasks of two classes, tested on the first pictures of each."
    s = make_stream(request.param, [100, 101], tasks=3, per_task=20)
    s.held = [h[:, :30] for h in s.held]
    return s


def short(name, stream, **kw):
    "A learner with small networks, and its run."
    kw |= TINY.get(name, {}) | dict(preset=False, memory=9, hidden=(8, 8))
    learner = make_learner(name, stream, **kw)
    return learner, fit(learner, stream, block=10, test='seen', progress=False)


@pytest.mark.parametrize('name', LEARNERS)
def test_every_method_learns_new_classes(name, split):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learner, run = short(name, split)
    a = run.accuracy
    assert a[:, 1:].isfinite().sum() == 2 * 6 and run.AAA.isfinite().all()
    told = [str(w.message) for w in said if 'is told' in str(w.message)]
    assert len(told) == (learner.uses_task and split.scenario != 'task')
    assert all(name in t and split.name in t for t in told)
    assert torch.equal(learner.score(split, [2, 0]), a[:, 3, [2, 0]]) # an engine may have been at work
    assert torch.equal(evaluate(learner, split, [2, 0]), a[:, 3, [2, 0]])


@pytest.mark.parametrize('name', LEARNERS)
def test_whoever_is_right_among_all_is_right_among_fewer(name):
    "The same predictions, asked in both scenarios; and nobody is told a task that others are not."
    plain, told = (make_stream(n, [100], tasks=3, per_task=20) for n in ('mnist-split', 'mnist-split-task'))
    for s in (plain, told): s.held = [h[:, :40] for h in s.held]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learner, run = short(name, plain)
    asked, predict = [], learner.predict
    learner.predict = lambda x, t: asked.append(t) or predict(x, t)
    a, b = (evaluate(learner, s) for s in (plain, told))
    assert (b >= a).all() and b.mean() > a.mean()
    assert asked == ([0, 1, 2] if learner.uses_task else [None]*3) + [0, 1, 2]


@pytest.mark.parametrize('name, settings', [('ER', dict(hidden=(8, 8))), ('BiCL', dict(hidden=(8, 8))), ('VAE-Joint', dict(
    hidden=8, latent=2, samples=5, drawn=1, batch=10)), ('VAE-ER', dict(
    hidden=8, latent=2, samples=5, drawn=1, batch=10))], ids=lambda v: v if isinstance(v, str) else '')
def test_what_is_tested_after_each_task(name, settings):
    "Everything, what was seen, or what is new; in the end everything. It is the same learner, whatever is tested."
    T, found = 3, {}
    for test in ('all', 'seen', 'new'):
        s = make_stream('mnist-classes' if 'VAE' in name else 'mnist-split', [100, 101], tasks=T, per_task=20)
        s.held = [h[:, :30 if 'VAE' not in name else 2] for h in s.held]
        learner = make_learner(name, s, preset=False, memory=9, **settings)
        found[test] = fit(learner, s, block=10, test=test, progress=False).accuracy, learner.state_dict()
    (a, end), learnt = found['all'], torch.arange(T + 1)[:, None]
    assert a.isfinite().all()
    for test, here in ('seen', torch.arange(T) < learnt), ('new', torch.arange(T) == learnt - 1):
        here[T] = True
        assert torch.equal(found[test][0].isfinite(), here.expand_as(a))
        assert torch.equal(found[test][0][:, here], a[:, here])
        for k, p in learner.named_parameters(): assert torch.equal(found[test][1][k], end[k]), k


def test_only_independent_uses_the_task():
    assert [n for n in LEARNERS if METHODS[n].cls.uses_task] == ['Independent']


def test_the_mask():
    "Outputs of other classes never win, however large; those of the task keep their order and value."
    told, plain = (make_stream(n, [100], tasks=3, per_task=10) for n in ('mnist-split-task', 'mnist-split'))
    out = Rng([7], 'outputs').normal(2, 50, 10)
    for t in range(3):
        m = told.masked(out, t)
        assert torch.equal(m[..., 2*t:2*t + 2], out[..., 2*t:2*t + 2])
        assert (m.isfinite().sum(-1) == 2).all() and (m.argmax(-1)//2 == t).all()
        assert plain.masked(out, t) is out
    assert torch.equal(told.masked(told.masked(out, 0), 0), told.masked(out, 0))


def test_splits():
    both = [make_stream(n, [100, 101]) for n in ('mnist-split', 'mnist-split-task')]
    assert both[0].fingerprint() != both[1].fingerprint() # what is told decides the numbers
    for s in both:
        for t in range(5):
            (x, y), tested = s.train(t), torch.cat([y for _, y in s.test(t)], 1)
            assert torch.equal(x, both[0].train(t)[0]) and [len(set(d.tolist())) for d in s.draws[t]] == [1000]*2
            assert all((y == c).sum(1).eq(500).all() for c in (2*t, 2*t + 1))
            assert tested.shape == (1, torch.isin(s.test_y, torch.tensor([2*t, 2*t + 1])).sum())
            assert s.labels[t].tolist() == tested.unique().tolist() == [2*t, 2*t + 1]
    odd = streams.splits('mnist', per_task=301, classes_per_task=3)('odd', [100])
    assert odd.T == 3 and (odd.train(2)[1].flatten().bincount()[6:]).tolist() == [101, 100, 100]


@pytest.mark.parametrize('name', [n for n in LEARNERS if n != 'Independent'])
def test_the_shape_of_pictures_changes_nothing(name):
    "A network that flattens its input learns the same from pictures as from rows of numbers."
    r = Rng([7], 'pictures')
    x, y = r.integers(256, 60, 3, 2, 2)[0].byte(), r.integers(4, 60)[0]
    def run(keep_shape):
        s = stream_from_arrays(x, y, torch.arange(60) // 30, seeds=[100, 101], keep_shape=keep_shape)
        assert s.shape == ((3, 2, 2) if keep_shape else (12,)) and s.d == 12
        assert next(s.blocks(0)).x.shape == (2, len(next(s.blocks(0))), *s.shape)
        own = lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))
        m = METHODS[name]
        settings = resolve(m, memory=8, preset=False, **TINY.get(name, {}))
        learner = m.cls(info_of(s), settings, Replicated(own, Rng(s.seeds, 'init')))
        fit(learner, s, block=10, progress=False, test='new')
        return learner.state_dict()
    flat, shaped = run(False), run(True)
    assert flat.keys() == shaped.keys()
    for k, v in flat.items(): assert torch.equal(v.flatten(), shaped[k].flatten()), k
