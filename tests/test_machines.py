"""Other people's machines: no home, a read-only one, no cache, a C locale, odd paths, an unknown user; and versions."""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import chaos
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_clean import CFG, ROOT

TINY = '''
import os, sys
from bicl.core import cache_dir
from bicl.data import load, places
from bicl.jobs import Job, finish, read_result, result_path, start
from bicl.learner import fit
import toys
out, *who = sys.argv[1:]
job = Job('toy', 'Toy', 12, (100,), device='cpu')
def go(out):
    learner, stream = job.make()
    finish(job, fit(learner, stream, **job.loop(), **start(job, out)), out)
    assert len(read_result(result_path(job, out))) == 12 and places('mnist')
if who: # somebody whom this machine does not know, and who may not be allowed to read Python: load all of it before
    go(f'{out}-before')
    for become in (os.setgid, os.setuid): become(int(who[0]))
go(out)
print(os.fsencode(cache_dir()).hex())
'''
ODD = 'ordner mit ümläut und 空白'


def bare(folder, **more):
    "An environment without anything that is not needed: no home either."
    path = os.pathsep.join(map(str, (chaos.HERE, ROOT)))
    own = dict(PATH=os.environ['PATH'], PYTHONPATH=path, TMPDIR=str(folder/'tmp'), OMP_NUM_THREADS='1', MPLBACKEND='agg')
    return own | {k: v for k, v in os.environ.items() if k == 'NUMBA_CACHE_DIR'} | more


@pytest.fixture
def place():
    "A folder with an odd name that anybody may use; not below pytest's, which is closed to others."
    with tempfile.TemporaryDirectory() as d:
        for p in (Path(d), folder := Path(d)/ODD, folder/'tmp', folder/'out'):
            p.mkdir(exist_ok=True)
            p.chmod(0o777)
        yield folder


def tiny(folder, *who, **env):
    "Where the cache is, after a run without runner and kernels; and what was said on the side."
    (folder/'tiny.py').write_text(TINY)
    done = subprocess.run([sys.executable, str(folder/'tiny.py'), str(folder/'out'), *who], cwd=folder,
                          env=bare(folder, **env), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return Path(os.fsdecode(bytes.fromhex(done.stdout.decode()))), done.stderr.decode(errors='replace')


@pytest.mark.skipif(os.getuid() != 0, reason='only root can become somebody else')
def test_an_unknown_user_without_a_home(place):
    "The cache goes where temporary files are."
    where, _ = tiny(place, '54321')
    assert where == place/'tmp'/'.cache'/'bicl'


def test_nothing_can_be_written_but_the_results(place):
    "Neither at home nor in a cache."
    (place/'file').touch()
    nowhere = str(place/'file'/'folder')
    _, said = tiny(place, HOME=nowhere, XDG_CACHE_HOME=nowhere, NUMBA_CACHE_DIR=nowhere)
    assert 'Traceback' not in said, said


def test_a_grid_in_the_worst_of_places(place):
    """Runner, kernel and notebook: no home, a C locale, and a path with blanks and foreign letters. Python takes UTF-8
    then; if that is forbidden, one line says what to do."""
    grid = place/'gitter ä.yaml'
    grid.write_text('{plugins: [toys], seeds: [100], benchmark: toy, device: cpu, runs: [{method: Plain}]}')
    (place/'bicl_run.py').write_text(chaos.RUN)
    ask = [sys.executable, str(place/'bicl_run.py'), str(grid), '--out', str(place/'out'), '--jobs', '1']
    run = lambda **env: subprocess.run(ask, cwd=place, env=bare(place, HOME='/nowhere', LC_ALL='C', **env), capture_output=True)
    done = run(PYTHONUTF8='0', PYTHONCOERCECLOCALE='0')
    assert done.returncode == 2 and b'set PYTHONUTF8=1' in done.stderr and b'Traceback' not in done.stderr, done.stderr
    done = run()
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors='replace')
    assert [p.suffix for p in sorted((place/'out'/'runs').iterdir())] == ['.ipynb', '.parquet']
    assert not list((place/'out'/'checkpoints').iterdir()) and not list((place/'tmp').glob('bicl-*'))


# ---- an older processor

OLDER = """
from llvmlite import binding
ask = binding.get_host_cpu_features
def older(): # as numba sees it, too
    known = ask()
    for name in known:
        if name.startswith(('avx512', 'amx')): known[name] = False
    return known
binding.get_host_cpu_features = older
import numpy as np, torch
from bicl import arithmetic, replay, rounds
from bicl.learner import make_learner
from bicl.models import only
from bicl.streams import make_stream
assert arithmetic.LANE == 32 and arithmetic.TILED == 3
rng = np.random.default_rng(0)
for m, k, w in (31, 200, 56), (5, 9, 40), (130, 300, 104):
    A, B, out = (rng.normal(size=s) for s in ((m, k), (k, w), (m, w)))
    want = out + A @ B
    arithmetic.matmul(out.reshape(-1), 0, m, out.reshape(-1), 0, w, A.reshape(-1), 0, k, 1, B.reshape(-1), 0, k, w)
    assert abs(out - want).max() < 1e-11
for share in (0, 1): # matrices, lists
    rounds.SPARSE = share
    stream, ends = make_stream('mnist-permutations', (100, 101), tasks=2, per_task=40, dtype=torch.float64), []
    stream.test_x, stream.test_y = stream.test_x[:600], stream.test_y[:600]
    for kind in ('torch', 'compiled'):
        learner = make_learner('ER', stream, memory=20, preset=False)
        with only(kind):
            for t in range(2):
                for b in stream.blocks(t, size=20): learner.observe(b)
            ends.append((torch.cat([p.flatten() for p in learner.parameters()]), learner.score(stream, [0, 1], 500)))
    (a, x), (b, y) = ends
    assert (a - b).abs().max() < 1e-11 and x.equal(y)
"""


def test_registers_of_32_bytes(tmp_path):
    "Tiles, lists, the rounds of ER and testing, compiled as for a processor without AVX-512, find what the definitions do."
    env = os.environ | dict(NUMBA_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, '-c', OLDER], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- versions

def constraints(path=ROOT/'.ci'/'constraints.txt'):
    return dict(line.split('==') for line in path.read_text().split())


def test_ci_installs_known_versions():
    "One version of everything that is asked for, within its bounds; of torch none: see settings.ini."
    known = constraints()
    assert not [n for n in known if re.match('torch$|torchvision|nvidia|triton|bicl', n)]
    asked = [Requirement(r) for k in ('requirements', 'dev_requirements', 'dask_requirements') for r in CFG[k].split()]
    for r in asked:
        if r.name.startswith('torch') and r.name != 'torchopt': continue
        assert r.specifier.contains(known[r.name.lower().replace('_', '-')]), r
    assert 'CONSTRAINTS' in (ROOT/'Makefile').read_text()


def test_lowest_versions_are_bounds():
    "What `make versions PYTHONS=lowest` installs."
    text = subprocess.run([sys.executable, str(ROOT/'.ci'/'constraints.py'), '--lowest'], capture_output=True, text=True, check=True).stdout
    lowest = dict(line.split('==') for line in text.split())
    for r in map(Requirement, CFG['requirements'].split()):
        if r.name not in ('torch', 'torchvision'): assert SpecifierSet(f'>={lowest[r.name]}') & r.specifier == r.specifier, r
