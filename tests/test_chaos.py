"""A minute of `make chaos`: a full disk, an aimed kill and some at random, one after the other, on one folder.

KILLS=20 kills more often, KILL_SEED repeats the dice."""
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import chaos
import psutil
import pytest

GRID = chaos.GRID[:chaos.GRID.index('runs:')] + '''protocol: strict
settings: {sleep: 0.15}
runs:
- {method: [Toy, Rival], memory: 10}
- {method: Plain}
'''


@pytest.fixture
def turmoil(tmp_path, monkeypatch):
    for k, v in chaos.environment().items(): monkeypatch.setenv(k, v)
    (grid := tmp_path/'g.yaml').write_text(GRID)
    seed = os.environ.get('KILL_SEED', str(time.time_ns()))
    print(f'KILL_SEED={seed}')
    return chaos.Round('a bit of everything', grid, random.Random(seed), chaos.expect(grid, tmp_path), tmp_path)


def test_a_bit_of_everything(turmoil):
    """A full disk. Two runners: one interrupted, one killed. Two more: a kernel dies at the worst moment, and somebody at any.
    No row lost or doubled, no notebook lost, nobody left behind, no litter, the same tables."""
    r, dice = turmoil, turmoil.dice
    pause = lambda: time.sleep(dice.uniform(0, 10))
    full, = r.start(1, before=partial(chaos.limited, 3000)) # no file can be longer: checkpoints cannot be written
    said = chaos.wait(full)
    assert full.returncode == 1 and said.count('the disk is full: make room') >= 3, said
    assert all('reason: OSError' in p.read_text() for p in (r.out/'checkpoints').glob('*.txt'))
    for _ in range(int(os.environ.get('KILLS', 1))):
        a, b = r.start(2)
        chaos.until(lambda a=a, b=b: all(chaos.family(p) or p.poll() is not None for p in (a, b)))
        pause()
        r.hit(chaos.roles(a).get('runner', []), dice.choice(chaos.STOPS)) # Ctrl-C, the end of a batch job, of a session
        pause()
        r.hit(chaos.roles(b).get(dice.choice(['runner', 'everybody']), []), dice.choice((signal.SIGKILL, signal.SIGTERM)))
        said, _ = chaos.wait(a), chaos.wait(b)
        assert a.returncode in (0, 130) and (a.returncode == 0 or 'the same command goes on' in said), said
        r.look()
        r.bury()
    for method in ('Toy', 'Plain'): # so that there is something to do
        for p in (r.out/'runs').glob(f'*_{method}_*'): p.unlink()
    r.finished = chaos.done(r.out)
    c, = r.start(1, CHAOS_AIM='.parquet', CHAOS_MARK=str(r.here/'mark')) # half a file of rows; the kernel dies
    chaos.until(lambda: (r.here/'mark').exists() or c.poll() is not None) # or the other one might leave nothing to do
    d, = r.start(1, '--only', 'Toy')
    chaos.until(lambda: chaos.family(d) or d.poll() is not None)
    pause()
    if (some := chaos.family(d)): r.hit([dice.choice(some)], dice.choice((signal.SIGKILL, signal.SIGTERM)))
    said = [chaos.wait(c), chaos.wait(d)]
    assert [c.returncode, d.returncode] == [0, 0], said # a run that died once is started again
    assert (r.here/'mark').exists(), said
    r.look()
    r.bury()
    r.close_books()
    assert not r.tally.bad, (r.left, r.tally, r.said, said)
    for p in chaos.results(r.out): assert 'injected-parameters' in p.with_suffix('.ipynb').read_text()


def test_only_our_own_processes_are_touched():
    "Not even if somebody hands over another: it has not our sign."
    call = [sys.executable, '-c', 'input()']
    with subprocess.Popen(call, stdin=subprocess.PIPE, env=os.environ | dict(CHAOS_SIGN='another')) as other:
        with subprocess.Popen(call, stdin=subprocess.PIPE, env=chaos.environment()) as own:
            both = [psutil.Process(p.pid) for p in (other, own)]
            chaos.until(lambda: [chaos.ours(p) for p in both] == [False, True], 10) # they have begun
            chaos.signal_all(both)
            assert own.wait(10) == -signal.SIGKILL
        assert other.poll() is None
        other.communicate(b'you may go\n')
    assert other.returncode == 0 and not chaos.family(own) and not chaos.roles(own) # dead: its number is anybody's
