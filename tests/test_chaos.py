"""A minute of `make chaos`: a full disk, an aimed kill and some at random, one after the other, on one folder."""
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

GRID = chaos.GRID[:chaos.GRID.index('runs:')] + '''settings: {sleep: 0.1}
runs:
- {method: [Toy, Rival], memory: 10}
- {method: Plain}
'''


@pytest.fixture
def turmoil(tmp_path, monkeypatch):
    for k, v in chaos.environment().items(): monkeypatch.setenv(k, v)
    (grid := tmp_path/'g.yaml').write_text(GRID)
    seed = time.time_ns() % 10**6
    print(f'seed {seed}')
    return chaos.Round('a bit of everything', grid, random.Random(seed), chaos.expect(grid, tmp_path), tmp_path)


def test_a_bit_of_everything(turmoil):
    "No row lost or doubled, no notebook lost, nobody left behind, no litter, the same tables."
    r = turmoil
    full, = r.start(1, before=partial(chaos.limited, 3000)) # no file can be longer: checkpoints cannot be written
    said = chaos.wait(full)
    assert full.returncode == 1 and said.count('the disk is full: make room') >= 3, said
    assert all('reason: OSError' in p.read_text() for p in (r.out/'checkpoints').glob('*.txt'))
    shot, = r.start(1, CHAOS_AIM='.parquet', CHAOS_MARK=str(r.here/'mark')) # half a file of rows; the kernel dies
    said = chaos.wait(shot)
    assert shot.returncode == 0 and (r.here/'mark').exists(), said # and gets its second chance
    for p in list((r.out/'runs').glob('*Toy*')): p.unlink() # so that there is something to do
    r.finished = chaos.done(r.out)
    tally = chaos.storm(r, 2, 2, ('runner', 'everybody', 'server'), (signal.SIGKILL, signal.SIGTERM))
    assert not tally.bad, (tally, r.left, r.said)


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
