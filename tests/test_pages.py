"""The pages: complete, reproducible, honest about what is missing, and safe against names that mean something.

A kernel costs seconds, so one test starts one, by the command; the others execute the cells of a page in this
process.
"""
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import IPython.display
import nbformat
import numpy as np
import pandas as pd
import pytest
import toys
from scipy import stats

import bicl.core
import bicl.figures
import bicl.tables
from bicl.commands import bicl_report
from bicl.figures import page_md, pages, relink
from bicl.jobs import COLUMNS, Grid, Job, load_grid, read_result, result_path, write_result
from bicl.learner import METHODS, register_method
from bicl.metrics import METRICS, paper_table
from bicl.tables import TABLE_COLUMNS, Study, collect, status, to_csv, to_md, to_tex, write_tables

HERE = Path(__file__).parent
ROOT = HERE.parent


@pytest.fixture
def study(tmp_path):
    "A grid with all its rows on the disk: the grid's file, and its folder."
    return toys.study(tmp_path)


@pytest.fixture
def execute(monkeypatch):
    "Execute a page in this process: the Markdown that it shows."
    def run(name, **given):
        nb, names, current = nbformat.read(pages()[name], 4), {}, None
        def display(*texts):
            for t in texts: current.outputs.append(nbformat.v4.new_output('display_data', {'text/markdown': t.data}))
        monkeypatch.setattr(IPython.display, 'display', display)
        monkeypatch.chdir(pages()[name].parent)
        for current in nb.cells:
            if current.cell_type != 'code': continue
            current.outputs = []
            exec(current.source, names)
            if 'parameters' in current.metadata.get('tags', []): names |= given
        return page_md(nb)
    return run


# ---- a grid of one's own

def test_the_command(study, capfd, monkeypatch):
    "Tables, figure, rows and page, with what is missing or older named, and nothing of this machine, nor of a killed report."
    grid, out = study
    jobs = load_grid(grid).jobs
    result_path(jobs[0], out).unlink()
    old = result_path(jobs[1], out)
    rows = read_result(old).assign(stamp='0' * 16, version='0')
    old.unlink()
    write_result(rows, old.with_name(f'{jobs[1].head}{"0" * 16}.parquet'))
    result_path(jobs[2], out).write_bytes(b'damaged')
    monkeypatch.setenv('PYTHONPATH', str(HERE))
    before = pages()['grid'].read_bytes()
    with tempfile.TemporaryDirectory() as own, monkeypatch.context() as m: # short: sockets go there, too
        m.setattr(tempfile, 'tempdir', own)
        (Path(own)/f'bicl-{2**22 + 1}-killed').mkdir() # no process has such a number
        assert bicl_report(grid=str(grid), out=str(out)) == 0
        assert not os.listdir(own)
    said, page = capfd.readouterr().out.strip(), (out/'index.md').read_text()
    assert '8 of 10 runs' in said and jobs[0].label in said and jobs[2].label in said
    assert '1 were made by an older version' in said and said in page
    assert page.startswith('# Toys\n') and pages()['grid'].read_bytes() == before
    for link in re.findall(r'\]\(([^)]+)\)', page): assert (out/link).exists(), link
    for p in out.iterdir():
        if p.suffix not in ('.md', '.csv', '.tex', '.svg'): continue
        text = p.read_text()
        assert str(out) not in text and str(Path.home()) + os.sep not in text, p
        assert not re.search(r'\b20\d\d-\d\d-\d\d\b', text), p


def test_csv_has_exactly_the_columns(study, tmp_path):
    grid, out = study
    write_tables(collect(load_grid(grid), out), tmp_path, 'table')
    t = pd.read_csv(tmp_path/'table.csv')
    assert list(t) == TABLE_COLUMNS == ('benchmark method memory metric mean std ci_low ci_high n_seeds '
                                        'paper_mean paper_std verdict').split()
    assert len(t) == 2 * 5 * len(METRICS) and (t.n_seeds == 3).all()
    assert ((t.ci_low <= t['mean']) & (t['mean'] <= t.ci_high)).all()


def test_same_rows_same_bytes(study, tmp_path, execute):
    grid, out = study
    first = execute('grid', grid=str(grid), rows=str(out), out=str(out))
    timeless = ('table.csv', 'table.md', 'table.tex', 'figure.svg', 'figure.png')
    made = {n: (out/n).read_bytes() for n in timeless}
    other = tmp_path/'elsewhere'
    shutil.copytree(out/'runs', other/'runs')
    for p in sorted((other/'runs').glob('*.parquet'), reverse=True): # later, slower, in another order
        rows = read_result(p).assign(seconds=999., train_seconds=998.)
        p.unlink()
        write_result(rows.sample(frac=1, random_state=0), p)
    again = execute('grid', grid=str(grid), rows=str(other), out=str(other))
    assert {n: (other/n).read_bytes() for n in timeless} == made
    before, after = (t.split('## Time')[0] for t in (relink(first, pages()['grid'].parent, out), relink(again, pages()['grid'].parent, other)))
    assert before == after and first != again # only the seconds differ
    rows = pd.read_parquet(out/'results.parquet')
    assert set(rows.metric) == {'accuracy', *METRICS}
    assert (rows.metric == 'accuracy').sum() == 10 * 3 * 5 * 4 and len(rows) == 10 * 3 * (5 * 4 + len(METRICS))
    one = rows[(rows.stamp == rows.stamp[0]) & (rows.seed == 100)]
    last = one[(one.metric == 'accuracy') & (one.task_trained == 4)].value.mean()
    assert np.isclose(one[one.metric == 'RA'].value.item(), last)


def test_rows_of_other_questions_are_left_alone(study):
    "What lies in the folder but is not in the grid does not get into the table."
    grid, out = study
    before = to_csv(collect(load_grid(grid), out).table)
    toys.fake(Job('toy', 'Toy', 10, (100, 101, 102), 'strict', dict(lr=.5)), out, 99.)
    toys.fake(Job('toy', 'Toy', 10, (103, 104), 'strict'), out, 99.)
    assert to_csv(collect(load_grid(grid), out).table) == before


def test_new_preset_is_noticed(study):
    "Rows made with settings that the method no longer has are named, not passed off as new ones."
    grid, out = study
    job = load_grid(grid).jobs[0]
    rows = read_result(result_path(job, out))
    settings = json.loads(rows.settings.iloc[0]) | dict(lr=.7)
    result_path(job, out).unlink()
    write_result(rows.assign(stamp='1' * 16, settings=json.dumps(settings)),
                 result_path(job, out).with_name(f'{job.head}{"1" * 16}.parquet'))
    got = collect(load_grid(grid), out)
    assert got.older == got.other == [job]
    assert f'settings of these have changed since: {job.label}.' in status(got)


def test_no_rows_and_wrong_use(tmp_path, capsys):
    (tmp_path/'g.yaml').write_text(toys.GRID)
    assert bicl_report(grid=str(tmp_path/'g.yaml'), out=str(tmp_path/'out')) == 2
    assert 'no rows' in capsys.readouterr().err
    assert not (tmp_path/'out').exists()
    assert bicl_report(grid='tabel1') == 2
    assert 'table1' in capsys.readouterr().err
    (tmp_path/'h.yaml').write_text('report: no-such-page\n' + toys.GRID)
    for job in load_grid(tmp_path/'h.yaml').jobs[:1]: toys.fake(job, tmp_path/'h')
    assert bicl_report(grid=str(tmp_path/'h.yaml'), out=str(tmp_path/'h')) == 2
    assert 'no-such-page' in (said := capsys.readouterr().err) and 'table1' in said


# ---- names that mean something

EVIL = r'my_method|<script>alert(1)</script> \input{/etc/passwd} $x$ & 5 % #1 [a](javascript:b) `c` {d} ^ ~'


def test_names_are_escaped(study, monkeypatch):
    "A label is text, whatever it looks like: in Markdown as in LaTeX."
    grid, out = study
    monkeypatch.setitem(METHODS, 'Toy', METHODS['Toy'])
    register_method('Toy', toys.Toy, toys.WithMemory, label=EVIL)
    s = collect(load_grid(grid), out)
    text, tex = to_md(s.table), to_tex(s.table)
    lines = [line for line in text.splitlines() if line.startswith('|')]
    bars = [len(re.findall(r'(?<!\\)\|', line)) for line in lines]
    assert len(set(bars)) <= 2 and any('alert' in line for line in lines) # one number per benchmark's table
    assert '<' not in text and not re.search(r'(?<!\\)\]\(', text)
    body = [line for line in tex.splitlines() if line.endswith(r'\\') and 'multicolumn' not in line]
    assert len({len(re.findall(r'(?<!\\)&', line)) for line in body}) == 1
    assert r'\input' not in tex and r'my\_method' in tex
    assert len(re.findall(r'(?<!\\)\{', tex)) == len(re.findall(r'(?<!\\)\}', tex))


# ---- the paper's own numbers

@pytest.fixture(scope='module')
def paper():
    "The paper's own numbers, dressed up as runs of ours."
    frames, T, off, seeds = [], 10, np.array([-1., 0, 1])[:, None, None] * .01, (100, 101, 102)
    t = paper_table()
    wide = t[t.benchmark != 'mnist-rotations-180'].pivot(index=['benchmark', 'method', 'memory'], columns='metric', values='mean')
    for (b, m, memory), r in wide.iterrows():
        a = np.full((3, T + 1, T), r.RA) + off
        a[:, range(1, T), range(T - 1)] += (r.LA - r.RA) * T / (T - 1)
        index = pd.MultiIndex.from_product([seeds, range(T + 1), range(1, T + 1)], names=['seed', 'task_trained', 'task_tested'])
        frames.append(pd.DataFrame(dict(value=a.ravel()), index).reset_index().assign(
            benchmark=b, method=m, memory=memory, protocol='strict', metric='accuracy', stamp=f'{b}{m}{memory}', settings='{}', tuning=False))
    rows = pd.concat(frames, ignore_index=True).reindex(columns=COLUMNS).astype(dict(memory='Int64'))
    return Study(Grid('like', 'Like the paper', []), rows).table


def test_the_paper_reproduces_itself(paper):
    "Unless its own spread is so large that nothing could: then nobody knows."
    there = paper[paper.paper_mean.notna()]
    assert len(there) == 144
    ours, theirs = there['std']**2/3, there.paper_std**2/5
    df = (ours + theirs)**2/(ours**2/2 + theirs**2/4)
    wide = (there['mean'] - there.paper_mean).abs() + stats.t.ppf(.975, df)*np.sqrt(ours + theirs) > 2.5
    assert set(there[~wide].verdict) == {'reproduced'} and set(there[wide].verdict) == {'undecided'} and 0 < wide.sum() < 30
    assert np.allclose(there['mean'], there.paper_mean, atol=.011)
    lines = to_csv(paper).splitlines()
    assert lines[0] == ','.join(TABLE_COLUMNS)
    assert lines[1].startswith('mnist-rotations,Online,,RA,58.5500,0.0100,')


def engine():
    return next((e for e in ('pdflatex', 'tectonic', 'lualatex') if shutil.which(e)), None)


@pytest.mark.skipif(engine() is None and not os.environ.get('CI'), reason='no TeX engine here (pdflatex, tectonic or lualatex)')
def test_latex_compiles(paper, tmp_path):
    assert engine(), 'CI needs a TeX engine: pdflatex, tectonic or lualatex'
    (tmp_path/'table1.tex').write_text(to_tex(paper))
    how = ['tectonic'] if engine() == 'tectonic' else [engine(), '-interaction=nonstopmode', '-halt-on-error']
    got = subprocess.run([*how, 'table1.tex'], cwd=tmp_path, capture_output=True, text=True)
    assert got.returncode == 0, got.stdout[-3000:]
    assert (tmp_path/'table1.pdf').stat().st_size > 10_000
    assert 'Overfull' not in got.stdout, re.findall('Overfull.*', got.stdout)


def test_latex_is_well_formed(paper):
    "Where no TeX is installed, at least the structure is right."
    tex = to_tex(paper)
    assert re.findall(r'\\begin\{(\w+\*?)\}', tex) == re.findall(r'\\end\{(\w+\*?)\}', tex)[::-1]
    body = tex[tex.index(r'\toprule'):tex.index(r'\bottomrule')]
    lines = [line for line in body.splitlines() if line.endswith(r'\\') and 'multicolumn' not in line]
    assert {line.count('&') for line in lines} == {13} and len(lines) == 1 + 2 * 12
    assert tex.isascii() and tex.count('{') == tex.count('}')
    assert not re.search(r'(?<!\\)[%&_#](?![\s\w{}])', tex.replace(' & ', '').replace('#1', ''))


# ---- the pages of the project

OWN = [n for n in pages() if n != 'grid']


@pytest.mark.parametrize('name', [*pages()])
def test_a_page_has_one_parameters_cell(name):
    cells = [c for c in nbformat.read(pages()[name], 4).cells if 'parameters' in c.metadata.get('tags', [])]
    assert len(cells) == 1


@pytest.mark.parametrize('name', [*pages()])
def test_what_is_stored_is_what_the_rows_say(name, execute, tmp_path, monkeypatch):
    "Executed anew, a page says the same and writes the same tables; figures are not drawn, that takes long."
    any_grid = name not in OWN # it shows one, as an example
    for f in [f for f in dir(bicl.figures) if f.endswith('_figure')]: monkeypatch.setattr(bicl.figures, f, lambda *a, **kw: any_grid)
    monkeypatch.setattr(bicl.figures, 'save_figure', lambda fig, path, title='': IPython.display.Markdown(
        f'![{bicl.tables.md(title)}]({bicl.figures.link(path)}.svg)'))
    there = os.path.relpath(tmp_path, pages()[name].parent)
    text, stored = execute(name, out=str(tmp_path/'strict' if any_grid else tmp_path)), page_md(nbformat.read(pages()[name], 4))
    assert text.replace(there, '../../reports') == stored, 'run `make outputs NB=nbs/pages/grid.ipynb`' if any_grid else f'run `bicl_report {name}`'
    made = [p.relative_to(tmp_path) for p in tmp_path.rglob('*.*') if p.suffix in ('.csv', '.tex', '.md', '.json')]
    for p in made: assert (tmp_path/p).read_bytes() == (ROOT/'reports'/p).read_bytes(), p


def test_the_benchmark_has_all_that_was_asked_for():
    "How time and memory grow, what was asked of the start, and the launches that were counted on the pretend device."
    t, counted = (pd.read_csv(ROOT/'reports'/f'{name}.csv') for name in ('benchmark', 'gpu'))
    for system, last in ('BiCL', 'inner steps'), ('GEM', 'hidden units'):
        grown = t[t.workload.str.startswith('growth, ') & (t.system == system)].workload.str.split('[,=]').str[1].str.strip()
        assert {'replicas', 'memory', 'tasks', 'hidden units', last} == set(grown)
    assert len(t[t.workload == 'start'].asked.dropna()) == 5
    counted = counted.dropna(subset='operators')
    names = counted.method + np.where(counted.device == 'not recorded', ', not recorded', '')
    started = t.dropna(subset='launches').set_index('system').launches
    assert dict(started.round(3)) == dict(zip(names, counted.operators.round(3))), 'run `make bench`'


@pytest.mark.parametrize('name', OWN)
def test_the_markdown_of_a_page_is_the_page(name):
    "reports/*.md is what the notebook shows, with links from there; every link leads somewhere."
    nb = nbformat.read(pages()[name], 4)
    path = ROOT/'reports'/bicl.figures.asked(nb).get('page', f'{name}.md')
    text = path.read_text(encoding='utf-8')
    assert text == relink(page_md(nb), pages()[name].parent, path.parent), f'run `bicl_report {name}`'
    links = [re.sub('#.*', '', x) for x in re.findall(r'(?<!\\)\]\(([^)\s]+)', text) if ':' not in x]
    assert not [x for x in links if not (path.parent/x).exists()]


def test_what_make_reproduce_leaves_is_not_counted(execute, tmp_path):
    for name in ('listing', 'quick', 'of_a_reader'): (tmp_path/name).symlink_to(ROOT/'reports'/'listing')
    assert '**12 runs of 1 grids' in execute('reproducibility', rows=str(tmp_path))


@pytest.mark.parametrize('grid, methods', [
    ('search', {'BiCL++', 'DER++', 'BiCL', 'ER', 'Online', 'Independent', 'EWC', 'Joint', 'AGEM', 'GEM', 'MER'}), ('search_split', {'BiCL++', 'DER++', 'BiCL', 'ER', 'GEM', 'MER'}),
    ('search_cifar10', {'BiCL++', 'DER++', 'BiCL', 'ER', 'Online', 'Joint'})])
def test_presets_are_what_the_search_found(grid, methods, monkeypatch):
    monkeypatch.syspath_prepend(ROOT/'nbs'/'experiments')
    from choose_presets import found, one, searched
    path = ROOT/'nbs'/'experiments'/'presets.yaml'
    stored, text = bicl.core.load_yaml(path), path.read_text(encoding='utf-8')
    assert {m for m in stored if grid in searched(text, m)} == methods
    for m in methods:
        won = found(grid, m)
        assert won and {b: stored[m][b] for b in won} == won, 'run nbs/experiments/choose_presets.py'
    if grid == 'search':
        stored = (ROOT/'nbs'/'experiments'/'grids'/'one.yaml').read_text(encoding='utf-8')
        assert stored == one(grid, 'ER', 'DER++', 'BiCL++'), 'run nbs/experiments/choose_presets.py search --one …'
