"Settings that every test shares."
import os, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ['MPLBACKEND'] = 'agg' # no test opens a window
os.environ.setdefault('NUMBA_CACHE_DIR', str(ROOT/'build'/'numba')) # test_bits.py fills it
os.environ['PATH'] = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
sys.path.insert(0, str(ROOT/'nbs'/'_site')) # build.py: README and site

def shared_folder(tmp_path_factory):
    "A folder of this session that all of its processes share."
    own = tmp_path_factory.getbasetemp()
    return own.parent if os.environ.get('PYTEST_XDIST_WORKER') else own

LIGHT = {f'test_{n}' for n in ('clean', 'data', 'docs', 'house', 'pages', 'streams')} # compile nothing

def pytest_collection_modifyitems(items):
    "With two processes: one compiles, while the other does what needs no compiled code."
    first = [i for i in items if i.module.__name__ == 'test_bits']
    light = [i for i in items if i.module.__name__ in LIGHT]
    rest = [i for i in items if i not in first and i not in light]
    k = max(0, len(items)//2 - len(first)) # xdist gives each process one half
    items[:] = first + rest[:k] + light + rest[k:]

@pytest.fixture(autouse=True)
def same_environment():
    "What a test leaves in the environment, such as plugins for workers, is not for the next one."
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
