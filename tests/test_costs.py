"""What a method says that it holds and computes is what it does: counted in runs of every method."""
import pytest
import toys

import bicl.baselines
import bicl.gem
import bicl.replay
from bicl import bilevel, gem
from bicl.learner import METHODS, fit, make_learner, make_settings

T, N, BLOCK = 3, 40, 10


@pytest.fixture
def stream(): return toys.blobs('toy', (100,), tasks=T, per_task=N)


@pytest.fixture
def count(monkeypatch):
    "How many samples gradients were taken of."
    n = [0]

    def wrap(where, name, samples):
        real = getattr(where, name)
        def counted(*a, **kw):
            n[0] += samples(*a)
            return real(*a, **kw)
        monkeypatch.setattr(where, name, counted)

    given = lambda model, x, *rest: x.shape[1]
    wrap(bicl.replay, 'sgd_step', given) # ER, DER++, MER
    wrap(bicl.baselines, 'sgd_step', given) # Online, Independent, EWC, Joint, the first task of GEM
    wrap(bicl.baselines, 'fisher', given)
    wrap(bicl.gem, 'gradients', given)
    wrap(gem.AGEM, 'gradient', lambda self, x, y: x.shape[1])
    for where in (bicl.baselines, bicl.gem, bicl.replay): monkeypatch.setattr(where, 'engine', lambda *a: a[2]) # the definitions, whose steps can be counted
    real = bilevel.BiCL.batch_sample
    def batch_sample(self, block):
        batches, n_tr = real(self, block)
        n[0] += len(batches) * (self.settings.K * n_tr + batches[0][0].shape[1] - n_tr)
        return batches, n_tr
    monkeypatch.setattr(bilevel.BiCL, 'batch_sample', batch_sample)
    return n


ASKED = {'Online': dict(passes=2), 'Independent': dict(passes=3, hidden=(6,)), 'EWC': dict(samples=8), 'Joint': dict(epochs=2), 'GEM': dict(memory=15),
         'AGEM': dict(memory=15, reference=7, batch=4), 'MER': dict(memory=20, replayed=6, batches=3, engine='torch'),
         'ER': dict(memory=20, current=6, replayed=4, rounds=.5), 'DER++': dict(memory=20, current=8, replayed=4),
         'BiCL': dict(memory=20, current=8, replayed=4, K=2), 'BiCL++': dict(memory=20, current=3, replayed=4, rounds=2.)}


@pytest.mark.parametrize('name', ASKED)
def test_cost_is_what_a_run_counts(name, stream, count):
    learner = make_learner(name, stream, preset=False, **ASKED[name])
    fit(learner, stream, protocol='strict', block=BLOCK, test='new', progress=False)
    held, gradients = METHODS[name].cls.cost(learner.settings, T, N, BLOCK)
    assert count[0] / (T * N) == pytest.approx(gradients), (name, count[0] / (T * N), gradients)
    kept = getattr(learner, 'memory', getattr(learner, 'M', None))
    if kept is not None: assert held == kept.capacity if hasattr(kept, 'capacity') else kept.per_task * T


def test_every_method_of_the_table_says_what_it_costs():
    from bicl.jobs import load_grid
    for job in load_grid('table1').jobs:
        assert all(v == v for v in METHODS[job.method].cls.cost(job.chosen(), 10, 1000, 500)), job.label


def test_the_audits_numbers():
    "Counted by hand in runs of two tasks of version 0.1.0: MER 110 / 258 / 985, BiCL and ER 35 / 50 / 50."
    cost = lambda name, block, **s: METHODS[name].cls.cost(make_settings(METHODS[name], s), 2, 1000, block)[1]
    for memory, replayed, counted in ((200, 10, 110), (500, 25, 258), (5120, 100, 985)):
        assert round(cost('MER', 10, memory=memory, replayed=replayed, batches=10)) == counted
    few, many = dict(current=10, replayed=10, rounds=1.), dict(current=5, replayed=10, rounds=2.)
    assert [cost('BiCL', 500, **s) for s in (few, many)] == [35, 50]
    few, many = dict(current=20, replayed=20, rounds=1.), dict(current=10, replayed=20, rounds=2.)
    assert [cost('ER', 500, **s) for s in (few, many)] == [35, 50]
