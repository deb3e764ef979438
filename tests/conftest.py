"Settings that every test shares."
import os, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ['MPLBACKEND'] = 'agg' # no test opens a window
os.environ['PATH'] = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
sys.path.insert(0, str(ROOT/'nbs'/'_site')) # build.py: README and site

@pytest.fixture(autouse=True)
def same_environment():
    "What a test leaves in the environment, such as plugins for workers, is not for the next one."
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
