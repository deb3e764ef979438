"""Every notebook runs from its first cell to its last.

Chapters and tutorials run under nbdev's own runner, which skips cells marked `#| eval: false` and
those with a flag in `tst_flags` of settings.ini (`slow`, `cuda`). Experiments run under papermill
with the defaults of their parameters cell, except `out`, which is a temporary folder, and `quick`,
which is True, where a notebook has them. Pages are executed by test_pages.py.

What a tutorial prints is compared with what is stored in it (`make outputs NB=…` stores it anew): words and
whole numbers must be the same, and accuracies, which have a decimal point, within `POINTS` percent. On one
machine they are the same to the last digit; other processors add in another order, and training makes more of
such differences. Times are not compared. What the index notebook says is what README.md says.
"""
import io, json, re
from contextlib import redirect_stderr
from pathlib import Path

import build, nbdev.test, nbformat, papermill, pytest
from conftest import fresh
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb as run_notebook
from nbformat.v4.rwbase import rejoin_lines

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/'nbs'
FLAGS = get_config(path=ROOT).tst_flags.split()
ALL = sorted(nbglob(NBS, as_path=True))
EXPERIMENTS = [p for p in ALL if p.parent.name == 'experiments']
CHAPTERS = [p for p in ALL if p.parent.name not in ('experiments', 'pages')]

POINTS = 2.5 # by which accuracies may differ

def shown(outputs):
    "What a cell has printed or returned, as text; figures and warnings are left out."
    text = lambda a: a if isinstance(a, str) else ''.join(a)
    parts = [text(o['text'] if o['output_type'] == 'stream' else o['data'].get('text/plain', ''))
             for o in outputs if o.get('name') != 'stderr' and o['output_type'] != 'error']
    return '\n'.join(p.strip() for p in parts if p.strip() and not p.startswith('<Figure'))

def differences(old, new):
    "What differs between two texts, in words; nothing if they tell the same."
    number = r'(?<![\w.])-?\d[\d,]*\.?\d*'
    a, b = (re.sub(r'[\d.]+ s\b', '… s', t) for t in (old, new))
    if re.sub(rf'\s*{number}', ' #', a).split() != re.sub(rf'\s*{number}', ' #', b).split():
        return f'stored:\n{old}\nnow:\n{new}'
    for x, y in zip(re.findall(number, a), re.findall(number, b)):
        u, v = (float(z.replace(',', '').rstrip('.')) for z in (x, y))
        if abs(u - v) > (POINTS if '.' in x + y else 0): return f'{x} is stored, it is {y} now, in:\n{new}'
    return ''

class Shell(nbdev.test.CaptureShell):
    "Keeps what the cells show; figures are drawn once and small, not twice and large as for a reader."
    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self._run("set_matplotlib_formats('png', bbox_inches=None, dpi=50)")
    def run_all(self, nb, **how):
        Shell.nb = nb
        super().run_all(nb, **how)

def child(path, log):
    "Run a notebook; leave its traceback in `log` if it fails, and else the outputs of its cells."
    nbdev.test.CaptureShell = Shell # in this process, which does nothing else
    with redirect_stderr(io.StringIO()) as err:
        ok, _ = run_notebook(path, skip_flags=FLAGS, basepath=ROOT)
    if not ok: log.write_text(err.getvalue(), encoding='utf-8')
    found = {c.id: c.outputs for c in Shell.nb.cells if c.cell_type == 'code'} if ok else {}
    log.with_suffix('.json').write_text(json.dumps(found, default=str), encoding='utf-8')

def name(path): return path.relative_to(NBS).with_suffix('').as_posix()

@pytest.mark.parametrize('path', CHAPTERS, ids=name)
def test_chapter(path, tmp_path):
    "In a process of its own, so that none sees what another has registered."
    p = fresh.Process(target=child, args=(path, log := tmp_path/'error.txt'))
    p.start()
    p.join()
    if log.exists(): pytest.fail(log.read_text(encoding='utf-8'), pytrace=False)
    assert p.exitcode == 0, f'the process that ran {path.name} died with exit code {p.exitcode}'
    now = json.loads(log.with_suffix('.json').read_text(encoding='utf-8'))
    if path.parent.name == 'tutorials': compare(path, now)
    if path.stem == 'index': assert rendered(path, now) == (ROOT/'README.md').read_text(encoding='utf-8'), 'run `make readme`'

def compare(path, now):
    "A tutorial stores what it shows."
    stored = {c.id: shown(c.outputs) for c in nbformat.read(path, 4).cells if c.cell_type == 'code'}
    assert any(stored.values()), f'{path.name} stores nothing: make outputs NB={path.relative_to(ROOT)}'
    bad = [d for k, v in stored.items() if (d := differences(v, shown(now[k])))]
    assert not bad, f'{path.name} has changed (make outputs NB={path.relative_to(ROOT)}):\n' + '\n'.join(bad)

def rendered(path, now):
    "What README.md would be with these outputs: its numbers are those in reports/."
    nb = nbformat.read(path, 4)
    for c in nb.cells:
        if c.cell_type == 'code': c.outputs = nbformat.from_dict(now[c.id])
    return build.render(rejoin_lines(nb))

@pytest.mark.parametrize('old, new, tells', [
    ('BiCL RA 82.0, 3 seeds; trained 9.1 s', 'BiCL RA 84.0, 3 seeds; trained 12.0 s', ''),
    ('BiCL RA 82.0', 'BiCL RA 84.6', '82.0 is stored, it is 84.6 now'), # as it was in 0.1.0: 82.0 and 84.0
    ('the ConvNet: LA 92.3', 'the ConvNet: LA 64.0', '92.3 is stored'),
    ('3 tasks', '4 tasks', '3 is stored'), ('two tasks', 'three tasks', 'stored:'),
    ('tensor([[1.0000,  2.1]])', 'tensor([[1.0001, 2.1]])', ''), ('a 1.0 2.0', 'a 1.0', 'stored:')])
def test_stale_outputs_are_found(old, new, tells):
    assert tells in differences(old, new) and bool(tells) == bool(differences(old, new))

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
