"""Every notebook runs from its first cell to its last.

Chapters and tutorials run under nbdev's own runner, which skips cells marked `#| eval: false` and
those with a flag in `tst_flags` of settings.ini (`slow`, `cuda`). Experiments run under papermill
with the defaults of their parameters cell, except `out`, which is a temporary folder, and `quick`,
which is True, where a notebook has them. Pages are executed by test_pages.py.
"""
import io, multiprocessing as mp
from contextlib import redirect_stderr
from pathlib import Path

import papermill, pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb as run_notebook

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/'nbs'
FLAGS = get_config(path=ROOT).tst_flags.split()
ALL = sorted(nbglob(NBS, as_path=True))
EXPERIMENTS = [p for p in ALL if p.parent.name == 'experiments']
CHAPTERS = [p for p in ALL if p.parent.name not in ('experiments', 'pages')]

# Each chapter gets a process of its own, so that none sees what another has registered; they are
# forked from one that has loaded torch already, which saves some seconds each.
fresh = mp.get_context('forkserver')
fresh.set_forkserver_preload(['torch', 'pandas', 'seaborn', 'nbdev.test'])

def child(path, log):
    "Run a notebook; leave its traceback in `log` if it fails."
    with redirect_stderr(io.StringIO()) as err:
        ok, _ = run_notebook(path, skip_flags=FLAGS, basepath=ROOT)
    if not ok: log.write_text(err.getvalue(), encoding='utf-8')

def name(path): return path.relative_to(NBS).with_suffix('').as_posix()

@pytest.mark.parametrize('path', CHAPTERS, ids=name)
def test_chapter(path, tmp_path):
    p = fresh.Process(target=child, args=(path, log := tmp_path/'error.txt'))
    p.start()
    p.join()
    if log.exists(): pytest.fail(log.read_text(encoding='utf-8'), pytrace=False)
    assert p.exitcode == 0, f'the process that ran {path.name} died with exit code {p.exitcode}'

@pytest.mark.parametrize('path', EXPERIMENTS, ids=name)
def test_experiment(path, tmp_path):
    known = papermill.inspect_notebook(str(path))
    given = {k: v for k, v in dict(out=str(tmp_path/'out'), quick=True).items() if k in known}
    papermill.execute_notebook(str(path), str(tmp_path/path.name), parameters=given,
                               cwd=str(path.parent), progress_bar=False)

def test_every_chapter_is_found():
    "The globs above see what is in nbs/: a chapter in a new folder must not escape the tests."
    hidden = lambda p: any(q[0] in '._' for q in p.relative_to(NBS).parts)
    assert set(ALL) == {p for p in NBS.rglob('*.ipynb') if not hidden(p)}
    assert len(CHAPTERS) > 1
