"Settings that every test shares."
import compileall, json, multiprocessing, os, resource, shutil, subprocess, sys
from pathlib import Path

import psutil, pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
os.environ['MPLBACKEND'] = 'agg' # no test opens a window
os.environ.setdefault('NUMBA_CACHE_DIR', str(ROOT/'build'/'numba')) # `cold` fills it
os.environ['PATH'] = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
sys.path.insert(0, str(ROOT/'nbs'/'_site')) # build.py: README and site
sys.modules.setdefault('rfc3987_syntax', None) # nbformat needs no grammar of addresses, which takes a second to import

# Children that shall be new, but need not import what takes seconds: a process forks them that has it, and nothing of bicl.
fresh = multiprocessing.get_context('forkserver')
fresh.set_forkserver_preload(('torch pandas seaborn matplotlib.pyplot matplotlib_inline.backend_inline scipy.stats numba.extending '
                              'IPython.display pyarrow.parquet safetensors.torch tqdm.auto psutil yaml nbdev.test').split())

def pytest_configure(config):
    "Many processes will import the package: compile it now, for there are shells that forbid Python to keep what it compiles."
    if not hasattr(config, 'workerinput'): compileall.compile_dir(ROOT/'bicl', quiet=2)

def shared_folder(tmp_path_factory):
    "A folder of this session that all of its processes share."
    own = tmp_path_factory.getbasetemp()
    return own.parent if os.environ.get('PYTEST_XDIST_WORKER') else own

# ---- compiled code: a minute and more of processor time for each number type, so it is compiled once

LIGHT = {f'test_{n}' for n in ('clean', 'data', 'docs', 'house', 'pages')} # train nothing, but for one
DOUBLE = 'test_golden', '14_arithmetic', '15_compiled', '16_rounds' # compile in double precision, too

def pytest_collection_modifyitems(items):
    """With two processes: one compiles, while the other does what needs no compiled code. Whoever needs it waits for
    `cold`, if test_bits.py is among the tests, and in double precision for those who use the same kernels."""
    kind = lambda i: ('bits' if i.module.__name__ == 'test_bits' else 'double' if any(n in i.nodeid for n in DOUBLE) else
                      'light' if i.module.__name__ in LIGHT and i.name != 'test_readme_example_runs' else 'rest')
    sorts = {k: [i for i in items if kind(i) == k] for k in ('bits', 'double', 'light', 'rest')}
    for i in sorts['double']: i.fixturenames = ['in_turn', *i.fixturenames]
    for i in sorts['double'] + sorts['rest'] if sorts['bits'] else []: i.fixturenames = ['cold', *i.fixturenames]
    first, light, rest = sorts['bits'] + sorts['double'], sorts['light'], sorts['rest']
    k = max(0, len(items)//2 - len(first)) # xdist gives each process one half
    items[:] = first + rest[:k] + light + rest[k:]

def bits(cache, *args):
    "What bits.py prints with this cache folder."
    env = os.environ | dict(NUMBA_CACHE_DIR=str(cache))
    done = subprocess.run([sys.executable, ROOT/'tests'/'bits.py', *map(str, args)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

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
    "The bits of two replicas, one thread, compiled here and now; and the cache that this left."
    shared = shared_folder(tmp_path_factory)
    file, cache = shared/'bits.json', shared/'numba'
    with FileLock(shared/'bits.lock'):
        if not file.exists():
            found = bits(cache, 1, '100,103')
            donate(cache)
            file.write_text(json.dumps(found))
    assert any(cache.rglob('*.nbc'))
    return json.loads(file.read_text()), cache

@pytest.fixture
def in_turn(tmp_path_factory):
    "One test at a time, whichever process it is in: what it compiles, the next one finds."
    with FileLock(shared_folder(tmp_path_factory)/'double.lock'): yield

# ---- nothing is left behind

@pytest.fixture(autouse=True)
def same_environment():
    "What a test leaves in the environment, such as plugins for workers, is not for the next one."
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)

# ---- what it costs

def alive():
    "Processor seconds of children that nobody has waited for yet, and of theirs."
    total = 0.
    for p in psutil.Process().children(recursive=True):
        try: total += sum(p.cpu_times()[:4])
        except psutil.NoSuchProcess: pass
    return total

def processor_seconds():
    "Of this process and of all that it has started."
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used) + alive()

missed = [] # seconds of processes for which nobody waits: the system does not add them to those of their parents

def pytest_sessionfinish(session):
    if hasattr(session.config, 'workeroutput'): session.config.workeroutput['missed'] = sum(missed) + alive()

@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node): missed.append(getattr(node, 'workeroutput', {}).get('missed', 0))

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f'{(processor_seconds() + sum(missed))/60:.1f} CPU minutes, children included')
