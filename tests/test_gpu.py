"""On a GPU: every method runs there, waits for it only where that is meant, and finds what the CPU finds.

There is no GPU here: pretend.py plays one, with torch's own rules for mixing devices. What only a real one can
tell is said on the page nbs/pages/gpu.ipynb. The CPU computes with the readable definitions, without engines.

    python tests/test_gpu.py        write reports/gpu.csv, from which that page is made
"""
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from bits import MORE, TINY
from pretend import ACTIVE, Mixed, launches, pretend, watched
from torch import nn
from toys import photographs

from bicl import baselines, bilevel, compiled, gem, generative, replay, vae  # noqa: F401  (they register)
from bicl.bilevel import Replayed, StaticRound
from bicl.checkpoint import check_learner
from bicl.core import Rng, pick_device
from bicl.hypergrad import HYPERGRADIENTS, Options
from bicl.jobs import Job, result_rows
from bicl.learner import METHODS, find_method, fit, info_of, make_learner
from bicl.memory import Batches
from bicl.models import MLP, Replicated, only
from bicl.solvers import SGD, GraphAdam
from bicl.streams import make_stream

OURS = [m for m in METHODS if METHODS[m].cls.__module__.startswith('bicl.')]
BICL = [dict(hypergradient=h) for h in HYPERGRADIENTS] # six rounds a block: three are done, then one is recorded
BICL += [dict(hypergradient=h, split=s, rounds=.2) for h in HYPERGRADIENTS for s in ('reversed', 'vertical')]
BICL += [dict(K=3), dict(inner='sgd', K=2), dict(outer='adam', separate=True), dict(outer_loss='max', store='ring'),
         dict(outer_loss='softmax', store='k-center', bisection='fixed', beta_lam=.5, beta_w=.5, average=0),
         dict(weight_decay=1e-4, average=10), dict(inner='ridge'), dict(inner='ridge', hypergradient='first-order', store='ring'),
         dict(inner='ridge', separate=True, outer='adam', outer_lr=.001)]
PLUS = [dict(hypergradient=h) for h in HYPERGRADIENTS]
PLUS += [dict(split='reversed', rounds=.2), dict(split='vertical', rounds=.2), dict(K=3, alpha_inner=0.), dict(outer='adam', separate=True),
         dict(outer_loss='max', store='ring'), dict(outer_loss='softmax', store='k-center', average=0)]
CASES = {m: MORE.get(m, [{}]) for m in OURS} | {
    'BiCL': BICL, 'BiCL++': PLUS, 'Online': [dict(batch=4, passes=2)], 'EWC': [{}, dict(online=True, decay=.9)],
    'GEM': [dict(margin=.5), dict(batch=4), dict(margin=.5, tasks=4, lr=.1), dict(tasks=4, lr=.1)], # several constraints: the last
    'VAE-BiCL': (VAE := [{}, dict(hypergradient='first-order'), dict(K=2)]), 'VAE-BiCL-reversed': VAE,
    'MER': [dict(batches=2, replayed=2, gamma=.5), dict(batches=2, replayed=2, algorithm=6, engine='torch')]}
SHORT = dict(hidden=(20, 20))

# Waits of the host in `observe`: at most one of each per block, none per round, step or sample.
PER_BLOCK = {
    'baselines.sgd_torch': 'which of the steps of a block are full',
    'memory.Ring._list_held': 'the list of slots in use, made by the host as long as a task is filling its own',
    'gem.shares': 'how many slots of each task are in use, counted by the host',
    'generative.shelves': 'does the memory hold a sample of every task?',
    'models._ending': 'does the network end in a linear layer? asked once in a run'}
# … and outside of it, at the end of a task and when testing: how often at most, see `limits`. None is per chunk.
PER_TASK = {
    'learner.Watch.check': ('tasks', 'is every number finite?'),
    'learner.evaluate': ('calls', 'the accuracies of all tasks'),
    'vae.log_likelihood': ('replicas', 'the log-weights of all samples'),
    'generative.NaiveVAE.score': ('tested', 'the spread of the likelihoods, which are averaged by the host'),
    'core.Rng.__init__': ('sequences', 'the keys of a random sequence: for the noise of a test, and for the codes of what is drawn'),
    'streams.rotate': ('corners', 'which pixels a rotation mixes'),
    'streams.Permute.__call__': ('once', 'the order of the pixels')}

def limits(R, T):
    "How often these things happen in a run of T tasks that tests what is new: T - 1 times a task, in the end all."
    tested = 2*T - 1
    return dict(once=1, tasks=T, calls=T, tested=tested, replicas=R*tested, sequences=(R + 1)*tested,
                corners=8*(2*T + 2)) # places and weights of four; for each task learnt and tested, and for two looks at the first

def only_known(waits, R, T):
    "Assert that nothing else was waited for, and nothing more often."
    (*blocks, total), at_most = waits, limits(R, T)
    for seen in blocks: assert not [(at, n) for (at, _), n in seen.items() if n > (at in PER_BLOCK)], seen
    for (at, what), n in total.items():
        assert at in PER_BLOCK or at in PER_TASK, total
        assert n <= (len(blocks) if at in PER_BLOCK else at_most[PER_TASK[at][0]]), (at, what, n)

def short_stream(method, device, tasks=2):
    draws = issubclass(METHODS[method].cls, generative.NaiveVAE)
    s = make_stream('mnist-classes' if draws else 'mnist-permutations', [0, 1], tasks=tasks, per_task=12, device=device)
    if draws: s.held = [h[:, :2] for h in s.held]
    else: s.test_x, s.test_y = s.test_x[:40], s.test_y[:40]
    return s, TINY | dict(samples=8, batch=3, drawn=2) if draws else SHORT

def fitted(learner, s):
    "A run, and what was waited for: in each block, and in all. Everything is tested in several chunks."
    waits, observe, draws = [], learner.observe, isinstance(learner, generative.NaiveVAE)
    def watch(block):
        with watched() as log: out = observe(block)
        waits.append(log.syncs)
        return out
    with patch.object(generative, 'log_likelihood', partial(vae.log_likelihood, chunk=3)):
        go = partial(fit, learner, s, block=6, test='new', progress=False, chunk=1 if draws else 15)
        if not ACTIVE: return go(), waits
        learner.observe = watch
        with watched() as log: run = go()
    return run, [*waits, log.syncs]

def trained(method, settings, device):
    "A learner after two short tasks, or as many as are asked for, its run, and what was waited for."
    settings = dict(settings)
    s, small = short_stream(method, device, settings.pop('tasks', 2))
    learner = make_learner(method, s, preset=False, **dict(memory=8) | small | settings)
    return learner, *fitted(learner, s)

def tensors(learner): return {k: v.detach().cpu() for k, v in learner.state_dict().items() if torch.is_tensor(v)}

def difference(ours, theirs):
    "The largest difference between numbers of the same names, relative if they are large; all else has to be the same."
    assert ours.keys() == theirs.keys()
    far = []
    for k, b in theirs.items():
        a = ours[k]
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and a.isnan().equal(b.isnan()), k
        if b.is_floating_point(): far.append(torch.where((a == b) | b.isnan(), 0, (a - b).abs()/(1 + b.abs())).flatten().double())
        else: assert a.equal(b), k # what is kept, as bytes; labels, tasks, slots and counters
    far = torch.cat(far)
    assert not far.isnan().any() # of two that are infinite, and differ
    return far.max().item()

def on_the_cpu(method, settings):
    "What the definitions find there."
    with only('torch'), patch.object(vae, 'bernoulli', lambda l, x: vae.pixels(l.mT, x)):
        learner, run, _ = trained(method, settings, 'cpu')
    return tensors(learner) | dict(accuracy=run.accuracy)

def recorded(learner):
    "Were all rounds recorded that should be? Those of BiCL with the head split and plain outer steps."
    s, graphs = learner.settings, vars(learner).get('graphs', {}).values()
    meant = isinstance(learner, bilevel.BiCL) and learner.fast and s.outer == 'sgd' and s.inner != 'ridge'
    return bool(graphs) == meant and all(g.graph for g in graphs)

def test_no_difference_is_overlooked():
    one = dict(x=torch.tensor([1., torch.nan, torch.inf]), n=torch.tensor([1, 2]))
    assert difference(one, one) == 0 and difference(one | dict(x=one['x'] + 1), one) == .5
    for other in (dict(x=torch.tensor([1., 2., torch.inf])), dict(x=torch.tensor([torch.nan, torch.nan, torch.inf])), dict(m=one['n']),
                  dict(x=torch.tensor([1., torch.nan, -torch.inf])), dict(n=torch.tensor([1, 3])), dict(n=one['n'].int())):
        with pytest.raises(AssertionError): difference(one | other, one)

# ---- every method

@pytest.mark.parametrize('method, settings', [(m, s) for m in OURS for s in CASES[m]],
                         ids=lambda v: v if isinstance(v, str) else ' '.join(f'{k}={x}' for k, x in v.items()))
@pytest.mark.filterwarnings('ignore:Independent is told')
def test_a_method_on_a_gpu(method, settings):
    "No mixed devices, no double precision, no wait in a round, a step or a sample loop, and the CPU's numbers."
    with pretend('cuda', double=False):
        learner, run, waits = trained(method, settings, 'cuda')
        only_known(waits, learner.R, learner.info.T)
        assert run.device == 'cuda' and all(p.device.type == 'cuda' for p in learner.parameters())
        assert recorded(learner)
        ours = tensors(learner) | dict(accuracy=run.accuracy)
    assert difference(ours, on_the_cpu(method, settings)) < 1e-5

def test_gem_meets_several_constraints_at_once():
    "In some steps on the device two past tasks or three hold the step back."
    bound, solve = [], gem.duals_at_once
    def noted(P, q, margin):
        v = solve(P, q, margin)
        bound.append((v > margin).sum(1).max())
        return v
    with pretend(), patch.object(gem, 'duals_at_once', noted):
        trained('GEM', CASES['GEM'][-1], 'cuda')
        assert sum(n.item() > 1 for n in bound) > 10 # of 36

def test_gem_waits_if_there_are_many_past_tasks():
    "With more of them than can be tried at once the host solves for the shares, in every step: with the CPU's numbers."
    settings = dict(margin=.5, tasks=3)
    with pretend(), patch.object(gem, 'AT_ONCE', 1):
        learner, run, (*blocks, _) = trained('GEM', settings, 'cuda')
        ours = tensors(learner) | dict(accuracy=run.accuracy)
    waits = [sum(n for (at, _), n in b.items() if at == 'gem.duals') for b in blocks]
    assert len(waits) == 6 and not any(waits[:4]) and min(waits[4:]) >= 6 # samples of a block
    assert difference(ours, on_the_cpu('GEM', settings)) < 1e-5

@pytest.mark.parametrize('method', ['BiCL', 'GEM'])
def test_on_apple(method):
    "An MPS device has no double precision, and the run says where it was."
    with pretend('mps'):
        assert pick_device('auto').type == 'mps'
        _, run, _ = trained(method, {}, 'mps')
        assert run.device == 'mps'

@pytest.mark.parametrize('own', [True, False])
def test_rotations_and_a_network_of_ones_own(own):
    def after(device):
        s = make_stream('mnist-rotations', [0, 1], tasks=2, per_task=12, device=device)
        s.test_x, s.test_y = s.test_x[:40], s.test_y[:40]
        net = lambda: nn.Sequential(nn.Linear(784, 8), nn.Tanh(), nn.Linear(8, 10))
        if own: learner = bilevel.BiCL(info_of(s), bilevel.BiCLSettings(memory=8, rounds=.3), Replicated(net, Rng(s.seeds, 'own', device)))
        else: learner = make_learner('ER', s, memory=8)
        run, waits = fitted(learner, s)
        return tensors(learner) | dict(accuracy=run.accuracy), waits
    with pretend(double=False):
        ours, waits = after('cuda')
        only_known(waits, 2, 2)
        assert 'streams.rotate' in {at for at, _ in waits[-1]}
    with only('torch'): assert difference(ours, after('cpu')[0]) < 1e-5

@pytest.mark.parametrize('method', ['ER', 'BiCL', 'DER++', 'BiCL++'])
def test_a_convolutional_network(method):
    "Pictures keep their shape; on a GPU all copies convolve at once, on the CPU in turn, with the same result."
    def after(device):
        s = photographs((0, 1), device)
        learner, waits = make_learner(method, s, memory=8, hidden=(4, 6)), []
        for b in s.blocks(0, size=20):
            if not ACTIVE: learner.observe(b); continue
            with watched() as log: learner.observe(b)
            waits.append(log.syncs)
        assert learner.model.in_turn == (device == 'cpu')
        return tensors(learner), waits
    with pretend('cuda', double=False): ours, waits = after('cuda')
    for n, seen in enumerate(waits): assert not [at for at, _ in seen if n or at not in PER_BLOCK], seen
    theirs, _ = after('cpu')
    assert difference(ours, theirs) < 1e-5

@pytest.mark.parametrize('method', ['BiCL', 'BiCL++', 'EWC', 'DER++'])
def test_stopped_and_resumed_on_a_gpu(method):
    with pretend():
        s, small = short_stream(method, 'cuda')
        check_learner(lambda: make_learner(method, s, preset=False, memory=8, **small), s, block=6)

# ---- which device

def test_the_compiled_engine_is_refused_by_name():
    with pretend():
        s, _ = short_stream('MER', 'cuda')
        with pytest.raises(ValueError, match='engine="compiled".*mer.*cuda'):
            make_learner('MER', s, memory=8, engine='compiled')
    job = Job('mnist-permutations', 'MER', 8, device='cuda', settings=dict(engine='compiled'))
    with pytest.raises(ValueError, match='engine="compiled" is for the CPU'): job.check() # and so in a grid, wherever it will run

def test_auto_chooses_per_method():
    "A step on one sample is too little for a GPU; rounds of all replicas are not. A device that is named is taken."
    small = {'stream.tasks': 1, 'stream.per_task': 12}
    kind = lambda m, device='auto': Job('mnist-permutations', m, 8, (0,), device=device, settings=small).make()[1].device.type
    with pretend():
        assert {m: kind(m) for m in ('Online', 'EWC', 'MER', 'BiCL', 'ER', 'GEM')} == dict(
            Online='cpu', EWC='cpu', MER='cpu', BiCL='cuda', ER='cuda', GEM='cuda')
        assert kind('Online', 'cuda') == 'cuda' and kind('BiCL', 'cpu') == 'cpu'
        assert make_stream('mnist-permutations', per_task=12, device='auto').device.type == 'cuda' # it knows no method
    assert kind('BiCL') == pick_device().type and find_method('Independent').device == 'cpu'

def test_rows_say_the_kind_of_device():
    with pretend():
        job = Job('mnist-permutations', 'ER', 8, (0, 1), device='cuda:0', preset=False,
                  settings={'stream.tasks': 2, 'stream.per_task': 12, 'hidden': [5]})
        learner, s = job.make()
        s.test_x, s.test_y = s.test_x[:40], s.test_y[:40]
        run = fit(learner, s, progress=False)
    assert set(result_rows(job, run).device) == {'cuda'}

# ---- a recorded round

def plan(seed, device, goals, R=2, b=8, d=12):
    "The batches of a block from two pools of samples; outputs of the second may have to be matched."
    rng = Rng(range(seed, seed + R), 'plan')
    parts = [[rng.uniform(N, d), rng.integers(5, N), rng.integers(N, b, k)] for N, k in ((30, 5), (40, 7))]
    if goals: parts[1] += rng.normal(40, 5), torch.full((7,), .02)
    return Batches([[t.to(device) for t in p] for p in parts])

@pytest.mark.parametrize('how', [Options(), Options(K=2, outer='max'), Options(method='first-order'), Options(K=2, method='printed'),
                                 Options(method='implicit', damping=1.)], ids=str)
@pytest.mark.parametrize('inner', [GraphAdam(.01), SGD(.1)], ids=str)
@pytest.mark.parametrize('goals', [False, True])
def test_a_round_is_recorded_once_and_replayed(how, inner, goals):
    "The graph of the fourth round does all later ones, of this block and of the next; it costs one launch."
    def rounds(device):
        model = MLP(Rng(range(2), 'net', device), (12, 8, 8, 5))
        static = StaticRound(model, plan(0, device, goals), 6, inner, how)
        step = Replayed(static, torch.device(device))
        for block in range(2):
            static.load(plan(10*block, device, goals), static.state | dict(step=8*block*how.K))
            for i in range(8): step()
        if device == 'cuda':
            static.i.zero_()
            with watched() as log: step()
            assert step.graph and log.launches == 1 and not log.syncs
        else:
            static.i.zero_(); step()
        return tensors(model) | dict(loss=static.last.outer_loss.cpu())
    cpu = rounds('cpu')
    with pretend(): assert difference(rounds('cuda'), cpu) < 1e-5

def test_a_wait_cannot_be_recorded():
    with pretend():
        x = torch.ones(3, device='cuda')
        again = Replayed(lambda: x.add_(x.sum().item()), x.device, warm=0)
        with pytest.raises(RuntimeError, match='recorded'): again()

# ---- the pretend device itself

def test_what_the_pretend_device_notices():
    with pretend() as gpu, watched() as log:
        a, b = torch.ones(3, device='cuda'), torch.ones(3)
        assert a.device == gpu.kind and (a + 1).is_cuda and not a.is_cpu and b.is_cpu and a.new_zeros(2).is_cuda
        assert (a + torch.tensor(2.)).is_cuda  # a number may come from the host
        for mixed in (lambda: a + b, lambda: torch.cat([a, b]), lambda: b[a.long()], lambda: torch.addmm(b, a[None], b[:, None])):
            with pytest.raises(Mixed): mixed()
        with pytest.raises(TypeError, match='numpy'): a.numpy()
        assert not log.syncs and 0 < log.launches < 12
        for wait in (lambda: a.sum().item(), lambda: bool(a.any()), lambda: a[a > 0], lambda: a.nonzero(), lambda: a.cpu(),
                     lambda: b.to('cuda'), lambda: torch.tensor([1.], device='cuda'), lambda: a.copy_(b), lambda: a.tolist(),
                     lambda: a[torch.tensor([0])], lambda: b.copy_(a)):
            before = sum(log.syncs.values())
            wait()
            assert sum(log.syncs.values()) > before
        torch.ones(1, device='cuda', dtype=torch.float64)
    with pretend('mps'), pytest.raises(TypeError, match='float64'): torch.ones(1, device='mps').double()

# ---- the page

TABLE = Path(__file__).resolve().parent.parent/'reports'/'gpu.csv'

def counted(method):
    "Operators and waits for one more sample; generative methods: for one more batch of three."
    if 'Joint' in method: return None, None # all of its training belongs to the first block
    _, small = short_stream(method, 'cpu')
    if small is SHORT: return launches(method, (1, 2) if method == 'MER' else (10, 20), preset=False)
    return tuple(3*n for n in launches(method, (6, 12), 'mnist-classes', preset=False, **small))

def checked(method):
    "The largest difference from the CPU of all cases, and the waits per block where there are most."
    far, waits = 0., 0
    for settings in CASES[method]:
        with pretend('cuda', double=False):
            learner, run, (*blocks, _) = trained(method, settings, 'cuda')
            ours = tensors(learner) | dict(accuracy=run.accuracy)
        far = max(far, difference(ours, on_the_cpu(method, settings)))
        waits = max([waits, *(sum(b.values()) for b in blocks)])
    return len(CASES[method]), far, waits

def rows():
    "What the page shows, a row per method."
    import pandas as pd
    out = [(m, METHODS[m].order, *checked(m), *counted(m), METHODS[m].device) for m in OURS]
    with only('torch'): out.append(('BiCL', 70, None, None, None, *counted('BiCL'), 'not recorded'))
    names = 'method order cases difference waits_per_block operators waits device'
    return pd.DataFrame(out, columns=names.split()).sort_values('order', kind='stable')

def test_the_page_says_what_is_counted():
    import pandas as pd
    table = pd.read_csv(TABLE)
    table = table[table.device != 'not recorded'].set_index('method')
    assert dict(table.cases) == {m: len(CASES[m]) for m in OURS} and (table.difference < 1e-5).all(), 'run python tests/test_gpu.py'
    for m, row in table.loc[['BiCL', 'ER', 'GEM', 'VAE-naive']].iterrows():
        assert counted(m) == (row.operators, row.waits), 'run python tests/test_gpu.py'

if __name__ == '__main__': rows().to_csv(TABLE, index=False, float_format='%.6g')
