"""Every notebook runs from its first cell to its last.

Chapters and tutorials run under nbdev's own runner, which skips cells marked `#| eval: false` and
those with a flag in `tst_flags` of settings.ini (`slow`, `cuda`). Experiments run under papermill
with the defaults of their parameters cell, except `out`, which is a temporary folder, and `quick`,
which is True, where a notebook has them.
"""
from pathlib import Path

import papermill, pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb as run_notebook

ROOT = Path(__file__).resolve().parent.parent
CFG = get_config(path=ROOT)
NBS = ROOT/'nbs'
ALL = sorted(nbglob(NBS, as_path=True))
EXPERIMENTS = [p for p in ALL if p.parent.name == 'experiments']
CHAPTERS = [p for p in ALL if p not in EXPERIMENTS]

def name(path): return path.relative_to(NBS).with_suffix('').as_posix()

@pytest.mark.parametrize('path', CHAPTERS, ids=name)
def test_chapter(path, capfd):
    ok, _ = run_notebook(path, skip_flags=CFG.tst_flags.split(), basepath=ROOT)
    if not ok: pytest.fail(capfd.readouterr().err, pytrace=False)

@pytest.mark.parametrize('path', EXPERIMENTS, ids=name)
def test_experiment(path, tmp_path):
    known = papermill.inspect_notebook(str(path))
    given = {k: v for k, v in dict(out=str(tmp_path/'out'), quick=True).items() if k in known}
    papermill.execute_notebook(str(path), str(tmp_path/path.name), parameters=given, cwd=str(path.parent),
                               progress_bar=False)

def test_every_chapter_is_found():
    "The globs above see what is in nbs/: a chapter in a new folder must not escape the tests."
    assert set(ALL) == {p for p in NBS.rglob('*.ipynb') if not any(q[0] in '._' for q in p.parts[-2:])}
    assert len(CHAPTERS) > 1
