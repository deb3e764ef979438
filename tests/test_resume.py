"""Real processes, really killed: what a run leaves behind is enough to end with the same bits.

Children come from a fork server that has torch loaded already, so that a kill costs milliseconds
and many of them fit into one test. Each child is a process of its own and dies by SIGKILL.
"""
import os, random, resource, tempfile, time
from pathlib import Path

import pytest, torch
from conftest import fresh as ctx

import bicl.bilevel # registers BiCL
from bicl.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from bicl.learner import Learner, Run, evaluate, fit, info_of, make_learner
from bicl.models import MLP, losses
from bicl.streams import make_stream

def small(seeds=(100, 101), **kw):
    "Three tasks of real digits, tested on 400 of them."
    s = make_stream('mnist-rotations', seeds=seeds, tasks=3, per_task=120, **kw)
    s.test_x, s.test_y = s.test_x[:400], s.test_y[:400]
    # keep only the rows that are used, so that a child reads the stream in no time
    rows, places = torch.cat(s.draws, 1).unique(return_inverse=True)
    s.x, s.y, s.draws = s.x[rows], s.y[rows], list(places.split(120, 1))
    return s

METHODS = dict(
    # feature space, task-level anchor, running average
    head=dict(memory=50, task_beta_lam=.5),
    # general form, outer optimiser with state
    reversed=dict(memory=50, split='reversed', outer='adam', rounds=.2, hidden=(30, 30)),
)

def train(kind, data, path, every):
    "What a child does: go on from `path` until the end."
    torch.set_num_threads(1)
    stream = torch.load(data, weights_only=False)
    learner = make_learner('BiCL', stream, **METHODS[kind])
    fit(learner, stream, block=20, callbacks=[Checkpoint(path, every)], progress=False)

def child(*args):
    p = ctx.Process(target=train, args=args)
    p.start()
    return p

def written(path): return os.stat(path).st_mtime_ns if os.path.exists(path) else 0

@pytest.mark.parametrize('kind', METHODS)
def test_kill_minus_nine(kind, stream, tmp_path):
    "Killed again and again at random moments, a run ends with the bits of an undisturbed one."
    whole, torn, data = (str(tmp_path/n) for n in ('whole', 'torn', 'stream'))
    torch.save(stream, data)
    p = child(kind, data, whole, 60.)
    p.join()
    assert p.exitcode == 0
    rnd, places = random.Random(kind), []
    while len(places) < 8:
        p = child(kind, data, torn, 0.) # writes after every block: many kills fall into a write
        for _ in range(rnd.randrange(6)): # let it write so many; if none, it dies starting
            before = written(torn)
            while p.is_alive() and written(torn) == before: time.sleep(.001)
        p.join(rnd.uniform(0, .15))
        p.kill()
        p.join()
        if p.exitcode == 0: break # it was faster
        assert p.exitcode == -9
        where = load_checkpoint(torn)[1]['where'] if written(torn) else dict(task=0, block=0)
        places.append((where['task'], where['block']))
    else: (p := child(kind, data, torn, 60.)).join() # enough; now it may end
    assert p.exitcode == 0 and len(places) >= 3 and len(set(places)) >= 3, f'killed at {places}'
    a, b = load_checkpoint(whole)[0], load_checkpoint(torn)[0]
    assert a.keys() == b.keys()
    for k in a: assert a[k].equal(b[k]), f'{k} differs after kills at {places}'
    assert (b['run.accuracy'][:, -1] > 15).all() # it did learn something

class Plain(Learner):
    "SGD without anything else, for the tests below."
    def __init__(self, info, settings=None, lr=.1):
        super().__init__(info, settings)
        self.model, self.lr, self.blocks = MLP(self.rng('init'), (info.d, 20, info.classes)), lr, 0

    def observe(self, block):
        self.blocks += 1
        ps = list(self.model.parameters())
        grads = torch.autograd.grad(losses(self.model(block.x), block.y).sum(), ps)
        with torch.no_grad(): torch._foreach_add_(ps, grads, alpha=-self.lr)

    def predict(self, x, t): return self.model(x)

@pytest.fixture(scope='module')
def stream(): return small()

@pytest.fixture
def saved(stream, tmp_path):
    "A learner, its run, and a checkpoint of both."
    learner = Plain(info_of(stream))
    run = Run(stream.name, 'Plain', 'strict', stream.seeds, torch.rand(2, 4, 3), task=1, block=2)
    path = tmp_path/'c.safetensors'
    save_checkpoint(path, learner, run, dict(a=1))
    return learner, run, path

def test_disk_full(saved):
    "The kernel refuses to write further: an error that names the file, and the old file stays."
    learner, run, path = saved
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    run.task = 2
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before)//2, limits[1]))
        with pytest.raises(OSError, match=f'could not write checkpoint {path}'):
            save_checkpoint(path, learner, run, dict(a=1))
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert load_checkpoint(path)[1]['where']['task'] == 1

def _write_as_nobody(info, folder, out):
    learner = Plain(info)
    run = Run(info.name, 'Plain', 'strict', info.seeds, torch.rand(2, 4, 3))
    with tempfile.TemporaryDirectory() as d: # once before, so that all code is loaded
        save_checkpoint(d + '/c.safetensors', learner, run, {})
    if os.geteuid() == 0: os.setuid(65534) # permissions do not bind root
    try: save_checkpoint(folder + '/c.safetensors', learner, run, {})
    except BaseException as e: out.put(f'{type(e).__name__}: {e}')
    else: out.put('written')

def test_read_only_folder(stream):
    with tempfile.TemporaryDirectory() as d:
        (Path(d)/'c.safetensors').write_bytes(b'old')
        os.chmod(d, 0o555)
        out = ctx.Queue()
        p = ctx.Process(target=_write_as_nobody, args=(info_of(stream), d, out))
        p.start()
        said = out.get(timeout=120)
        p.join()
        assert said.startswith('PermissionError') and 'could not write checkpoint' in said
        assert 'untouched' in said
        assert [f.read_bytes() for f in Path(d).iterdir()] == [b'old']
        os.chmod(d, 0o755)

def test_unwritable_path_fails_before_training(stream, tmp_path):
    (tmp_path/'file').write_text('not a folder')
    learner = Plain(info_of(stream))
    with pytest.raises(OSError, match='could not write checkpoint'):
        fit(learner, stream, callbacks=[Checkpoint(tmp_path/'file'/'c.safetensors')], progress=False)
    assert learner.blocks == 0

def test_damage_is_found(saved):
    "Cut off anywhere or with any byte changed, a checkpoint is refused or still says the same."
    _, _, path = saved
    whole, rnd = path.read_bytes(), random.Random(100)
    tensors, head = load_checkpoint(path)
    size = 8 + int.from_bytes(whole[:8], 'little') # of the header
    cuts = [rnd.randrange(len(whole)) for _ in range(30)]
    for n in cuts + [0, 1, 7, 8, 9, size - 1, size, len(whole) - 1]:
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match='is damaged'): load_checkpoint(path)
    refused = 0
    for i in list(range(size)) + [rnd.randrange(size, len(whole)) for _ in range(100)]:
        bad = bytearray(whole)
        bad[i] ^= 1 << rnd.randrange(8)
        path.write_bytes(bad)
        try: t, h = load_checkpoint(path)
        except ValueError as e:
            assert 'is damaged' in str(e)
            refused += 1
        else: # only white space and the like
            assert h == head and t.keys() == tensors.keys(), i
            assert all(t[k].equal(tensors[k]) for k in t), i
    assert refused > .9 * (size + 100)

def test_other_code_and_other_data_are_refused(stream, tmp_path):
    path = tmp_path/'c.safetensors'
    fit(Plain(info_of(stream)), stream, callbacks=[Checkpoint(path)], progress=False, test='new')

    class Other(Plain):
        def predict(self, x, t): return -self.model(x)
    learner = Other(info_of(stream))
    learner.method = 'Plain'
    with pytest.raises(ValueError, match='belongs to another run: version is .* there and .* here'):
        fit(learner, stream, callbacks=[Checkpoint(path)], progress=False, test='new')

    other = small()
    other.draws[1] = other.draws[1].flip(1) # the same samples in another order
    with pytest.raises(ValueError, match='data is .* there and .* here'):
        fit(Plain(info_of(other)), other, callbacks=[Checkpoint(path)], progress=False, test='new')
    with pytest.raises(ValueError, match=r'seeds is \[100, 101\] there and \[102\] here'):
        lone = small((102,))
        fit(Plain(info_of(lone)), lone, callbacks=[Checkpoint(path)], progress=False, test='new')

def test_leftovers_of_kills_are_swept(saved):
    learner, run, path = saved
    old, new = path.parent/f'.{path.name}.old.tmp', path.parent/f'.{path.name}.new.tmp'
    for p in (old, new): p.write_bytes(b'half')
    os.utime(old, (time.time() - 3600,) * 2)
    save_checkpoint(path, learner, run, {})
    assert not old.exists() and new.exists() # the new one may belong to a live process

def test_non_finite_replica_is_named_and_never_saved(tmp_path):
    "One replica of two breaks in the second task: the run fails, the checkpoint is from before."
    stream, path = small(), tmp_path/'c.safetensors'

    class Breaks(Plain):
        def observe(self, block):
            super().observe(block)
            if block.task == 1:
                with torch.no_grad(): self.model.layers[1].weight[1, 3, 4] = torch.inf
    with pytest.raises(RuntimeError, match=r'task 1: replica 1 \(seed 101, after 6 good blocks\)'):
        fit(Breaks(info_of(stream)), stream, block=20, callbacks=[Checkpoint(path, 0)], progress=False)
    tensors, head = load_checkpoint(path)
    assert all(t.isfinite().all() for k, t in tensors.items() if k != 'run.accuracy')
    assert (head['where']['task'], head['where']['block']) == (1, 0)

def test_progress_bar(stream, capsys):
    fit(Plain(info_of(stream)), stream, block=60, test='seen')
    bar = capsys.readouterr().err
    assert '100%' in bar and '360/360' in bar and 'RA=' in bar and 'tasks=3' in bar
