"""The same bits: cold and warm caches of compiled code, one thread or two, alone or in company.

Each state is a fresh process with a cache folder of its own; what is compared are digests of all
parameters and accuracies of every method after two short tasks (see bits.py).
"""
import json, os, shutil, subprocess, sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILED = ('Online', 'EWC', 'GEM', 'MER', 'BiCL', 'BiCL++', 'ER', 'DER++')

def run(cache, *args):
    "What bits.py prints with this cache folder, and what it says on the side."
    env = os.environ | dict(NUMBA_CACHE_DIR=str(cache))
    done = subprocess.run([sys.executable, HERE/'bits.py', *map(str, args)], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr

@pytest.fixture(scope='module')
def cold(tmp_path_factory):
    "Two replicas, one thread, compiled here and now; and the cache that this left."
    cache = tmp_path_factory.mktemp('cache')
    bits, _ = run(cache, 1, '100,103')
    assert any(cache.rglob('*.nbc'))
    return bits, cache

def test_alone_with_two_threads_and_half_of_the_cache(cold, tmp_path):
    (bits, cache), half = cold, tmp_path/'half'
    shutil.copytree(cache, half)
    for p in sorted(half.rglob('*.nbi'))[::3]: p.unlink() # without its index, a kernel is compiled anew
    alone, _ = run(half, 2, 103)
    assert alone.keys() == bits.keys() and len(bits) > 15
    assert not [m for m in bits if bits[m]['103'] != alone[m]['103']]

def test_warm_cache(cold):
    bits, cache = cold
    warm, _ = run(cache, 1, '100,103', *COMPILED)
    assert not [m for m in warm if warm[m] != bits[m]] and len(warm) >= len(COMPILED)

def test_no_place_for_a_cache(cold):
    "Nowhere to write: compiled all the same, with one line that says so, and the same bits."
    code = ('import runpy, sys; from numba.core import caching; caching.CacheImpl._locator_classes = []; '
            f'sys.argv = ["bits", "1", "100,103", "Online"]; runpy.run_path({str(HERE/"bits.py")!r}, '
            'run_name="__main__")')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('NUMBA_CACHE_DIR') == 1
    assert all(v == cold[0][m] for m, v in json.loads(done.stdout).items())
