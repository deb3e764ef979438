"""The same bits: cold and warm caches of compiled code, one thread or two, alone or in company.

Each state is a fresh process with a cache folder of its own; what is compared are digests of all
parameters and accuracies of every method after two short tasks (see bits.py).
"""
import os, shutil, subprocess, sys

from conftest import ROOT, bits as run

COMPILED = ('Online', 'EWC', 'GEM', 'MER', 'BiCL', 'BiCL++', 'ER', 'DER++')

def test_alone_with_two_threads_and_part_of_the_cache(cold, tmp_path):
    (bits, cache), part = cold, tmp_path/'part'
    shutil.copytree(cache, part)
    for p in sorted(part.rglob('*.nbi'))[::5]: p.unlink() # without its index, a kernel is compiled anew
    alone = run(part, 2, 103)
    assert alone.keys() == bits.keys() and len(bits) > 15
    assert not [m for m in bits if bits[m]['103'] != alone[m]['103']]

def test_warm_cache(cold):
    bits, cache = cold
    warm = run(cache, 1, '100,103', *COMPILED)
    assert not [m for m in warm if warm[m] != bits[m]] and len(warm) >= len(COMPILED)

PRODUCT = '''
import numpy as np
from bicl.arithmetic import aligned, blocks, multiply
x, W = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((30, 200), (200, 112)))
multiply(out := aligned(30, 112, dtype=np.float32), blocks([np.maximum(x, 0)]), W)
'''

def test_no_place_for_a_cache(cold):
    "Nowhere to write: compiled all the same, with one line that says so, and the same bits."
    code = f'from numba.core import caching; caching.CacheImpl._locator_classes = []{PRODUCT}import sys; sys.stdout.buffer.write(out.tobytes())'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.count(b'NUMBA_CACHE_DIR') == 1
    exec(PRODUCT, here := {}) # from the cache
    assert here['out'].any() and done.stdout == here['out'].tobytes()

def test_a_change_of_the_arithmetic_is_noticed(tmp_path):
    "A kernel of another module has it built in: what is in the cache must not be used any more."
    shutil.copytree(ROOT/'bicl', tmp_path/'bicl', ignore=shutil.ignore_patterns('__pycache__'))
    (tmp_path/'own.py').write_text('import numpy as np\nfrom bicl.arithmetic import compiled, inner\n'
                                   '@compiled\ndef square(a): return inner(a, 0, a, 0, 3)\nprint(square(np.arange(1., 4)))\n')
    env = os.environ | dict(NUMBA_CACHE_DIR=str(tmp_path/'cache'), PYTHONPATH=str(tmp_path))
    said = lambda: subprocess.run([sys.executable, 'own.py'], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert said() == '14.0\n' and [*(tmp_path/'cache').rglob('own.square*.nbi')]
    path = tmp_path/'bicl'/'arithmetic.py'
    path.write_text(path.read_text().replace('s += a[i+k]*b[j+k]', 's += 2*a[i+k]*b[j+k]'))
    assert said() == '28.0\n'
