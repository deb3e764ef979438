"""The house: chapters import from above, and what is said once is not said again elsewhere."""
import ast, re
from pathlib import Path

import nbformat, pytest

from bicl import baselines, bilevel, compiled, gem, generative, replay, rounds # register their methods
from bicl.data import DATA
from bicl.learner import METHODS
from bicl.streams import BENCHMARKS

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/'nbs'
CHAPTERS = sorted(NBS.glob('[0-9]*.ipynb'))
ABOUT = 350 # exported lines of a chapter, and a sixth more

def code_cells(path):
    return [c.source for c in nbformat.read(path, 4).cells if c.cell_type == 'code']

def module(path):
    found = re.search(r'^#\| *default_exp +(\S+)', '\n'.join(code_cells(path)), re.M)
    return found[1] if found else None

ORDER = {module(p): i for i, p in enumerate(CHAPTERS)}

def parsed(source):
    "A cell without the lines that only Jupyter understands."
    return ast.parse(re.sub(r'^\s*[%!].*$', '', source, flags=re.M))

def imports(source):
    "(module, name) of everything that a cell takes from the package; strings with code are read, too."
    tree = parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'bicl':
            inner = node.module.split('.')[1:]
            for a in node.names: yield (inner[0], a.name) if inner else (a.name, '')
        elif isinstance(node, ast.Import):
            for a in node.names:
                if a.name.startswith('bicl.'): yield a.name.split('.')[1], ''
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and 'import' in node.value:
            for m in re.finditer(r'^\s*from bicl\.(\w+) import', node.value, re.M): yield m[1], ''

def test_chapters_are_numbered_without_gaps():
    assert [p.name[:2] for p in CHAPTERS] == [f'{i:02}' for i in range(28)]
    assert None not in ORDER

@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_imports_from_above_only(path):
    "In every cell: exported, hidden, slow, demonstrations."
    here = ORDER[module(path)]
    below = {(m, n) for s in code_cells(path) for m, n in imports(s) if ORDER.get(m, -1) >= here}
    assert not below, f'{path.name} takes {sorted(below)} from itself or from a later chapter'

@pytest.mark.parametrize('path', sorted(NBS.rglob('[!.]*.ipynb')), ids=lambda p: p.stem)
def test_private_names_stay_in_their_module(path):
    bad = {(m, n) for s in code_cells(path) for m, n in imports(s) if n.startswith('_')}
    for s in code_cells(path):
        names = {a.asname or a.name for node in ast.walk(parsed(s)) if isinstance(node, ast.ImportFrom)
                 and node.module == 'bicl' for a in node.names}
        bad |= {(node.value.id, node.attr) for node in ast.walk(parsed(s))
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                and node.value.id in names and node.attr.startswith('_')}
    assert not bad, f'{path.name} uses {sorted(bad)}'

@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_can_be_read_in_a_sitting(path):
    exported = [s for s in code_cells(path) if re.search(r'^#\| *export', s, re.M)]
    lines = [[x for x in s.splitlines() if x.strip() and not x.startswith('#|')] for s in exported]
    assert sum(map(len, lines)) <= ABOUT * 7 / 6
    assert max(map(len, lines)) <= 40, 'an exported cell is a screen at most'

def test_names_are_defined_once():
    "A public function, class or constant has one home; methods added by @patch are their class's."
    homes = {}
    for m in ORDER:
        for node in ast.parse((ROOT/'bicl'/f'{m}.py').read_text(encoding='utf-8')).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                if any('patch' in ast.unparse(d) for d in node.decorator_list): continue
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [n.id for t in node.targets for n in ast.walk(t)
                         if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            else: continue
            for n in names:
                if not n.startswith('_'): homes.setdefault(n, set()).add(m)
    twice = {n: sorted(v) for n, v in homes.items() if len(v) > 1}
    assert not twice

REGISTER = {m.cls.__module__.split('.')[1] for m in METHODS.values() if m.cls.__module__[:5] == 'bicl.'}
REGISTER |= {'data', 'streams', 'compiled', 'vae'}

@pytest.mark.parametrize('name', sorted(set(ORDER) - REGISTER))
def test_nobody_else_knows_names(name):
    "Methods, benchmarks and data sets are known by name where they are registered, and nowhere else."
    tree = ast.parse((ROOT/'bicl'/f'{name}.py').read_text(encoding='utf-8'))
    known = {*METHODS, *BENCHMARKS, *DATA}
    said = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert not said & known


# ---- speed is shown in a benchmark, never asserted

CLOCKS = {'perf_counter', 'process_time', 'thread_time', 'perf_counter_ns', 'process_time_ns', 'thread_time_ns'}

def asserted_times(source):
    "Assertions about what was read from a clock, in the same module or cell."
    tree, timed = parsed(source), set()
    def on_time(node):
        return any(isinstance(n, ast.Attribute) and n.attr in CLOCKS or isinstance(n, ast.Name) and n.id in CLOCKS | timed
                   for n in ast.walk(node))
    while True: # whatever is computed from a time is one, too
        known = len(timed)
        for n in ast.walk(tree):
            if isinstance(n, ast.Assign | ast.AugAssign | ast.NamedExpr | ast.AnnAssign) and n.value and on_time(n.value):
                for t in n.targets if isinstance(n, ast.Assign) else [n.target]:
                    timed |= {x.id for x in ast.walk(t) if isinstance(x, ast.Name)}
            elif isinstance(n, ast.FunctionDef) and any(isinstance(r, ast.Return) and r.value and on_time(r.value) for r in ast.walk(n)):
                timed.add(n.name)
        if len(timed) == known: break
    return [ast.unparse(n.test) for n in ast.walk(tree) if isinstance(n, ast.Assert) and on_time(n.test)]

def test_what_an_assertion_about_time_is():
    assert asserted_times('a = time.process_time()\nf()\nb = time.process_time() - a\nassert b < 1')
    assert asserted_times('def took(): return perf_counter() - start\nassert took() < 1')
    assert not asserted_times('a = time.process_time()\nprint(a)\nassert f() < 1')

@pytest.mark.parametrize('path', [*sorted(NBS.rglob('[!.]*.ipynb')), *sorted((ROOT/'tests').glob('*.py'))], ids=lambda p: p.stem)
def test_speed_is_never_asserted(path):
    cells = [path.read_text('utf-8')] if path.suffix == '.py' else code_cells(path)
    assert not [a for s in cells for a in asserted_times(s)]
