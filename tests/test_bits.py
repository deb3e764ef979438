"""The same bits: cold and warm caches of compiled code, one thread or two, alone or in company.

Each state is a fresh process with a cache folder of its own; what is compared are digests of all
parameters and accuracies of every method after two short tasks (see bits.py).
"""
import json, os, shutil, subprocess, sys
from pathlib import Path

import pytest
from conftest import shared_folder
from filelock import FileLock

HERE = Path(__file__).parent
COMPILED = ('Online', 'EWC', 'GEM', 'MER', 'BiCL', 'ER')

def run(cache, *args):
    "What bits.py prints with this cache folder, and what it says on the side."
    env = os.environ | dict(NUMBA_CACHE_DIR=str(cache))
    done = subprocess.run([sys.executable, HERE/'bits.py', *map(str, args)], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr

def donate(cache):
    "Give what was compiled to the other tests, as far as they have not compiled it themselves."
    to = Path(os.environ['NUMBA_CACHE_DIR'])
    for index in cache.rglob('*.nbi'):
        place = to/index.relative_to(cache)
        if place.exists(): continue
        place.parent.mkdir(parents=True, exist_ok=True)
        for p in (*index.parent.glob(f'{index.stem}.*.nbc'), index): # the index last
            shutil.copy2(p, place.with_name(p.name))

@pytest.fixture(scope='session')
def cold(tmp_path_factory):
    "Two replicas, one thread, compiled here and now; and the cache that this left."
    shared = shared_folder(tmp_path_factory)
    file, cache = shared/'bits.json', shared/'numba'
    with FileLock(shared/'bits.lock'):
        if not file.exists():
            bits, _ = run(cache, 1, '100,103')
            file.write_text(json.dumps(bits))
            donate(cache)
    assert any(cache.rglob('*.nbc'))
    return json.loads(file.read_text()), cache

def test_alone_with_two_threads_and_part_of_the_cache(cold, tmp_path):
    (bits, cache), part = cold, tmp_path/'part'
    shutil.copytree(cache, part)
    for p in sorted(part.rglob('*.nbi'))[::6]: p.unlink() # without its index, a kernel is compiled anew
    alone, _ = run(part, 2, 103)
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
