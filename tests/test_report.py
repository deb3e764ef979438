"""The report: complete, reproducible, and honest about what is missing."""
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import toys  # noqa: F401  (registers the toy methods in this process)
import torch

from bicl.learner import Run
from bicl.metrics import METRICS, paper_table
from bicl.report import TABLE_COLUMNS, bicl_report, collect, report, to_csv, to_tex
from bicl.runner import Grid, Job, finish, load_grid, read_result, result_path, write_result

SEEDS = (100, 101, 102)
GRID = '''
title: Toys
plugins: [toys]
seeds: [100, 101, 102]
benchmark: [mnist-rotations, toy]
protocol: strict
runs:
- {method: [Toy, Rival], memory: [10, 20]}
- {method: Plain}
'''


def fake(job, out, level=80., T=4):
    "Write the result of a run that never took place."
    g = torch.Generator().manual_seed(sum(map(ord, job.label)))
    a = level + torch.rand(len(job.seeds), T + 1, T, generator=g, dtype=torch.float64)
    run = Run(job.benchmark, job.method, job.protocol, job.seeds, a, task=T, train_seconds=3., test_seconds=1.)
    return finish(job, run, str(out))


@pytest.fixture
def study(tmp_path):
    "A grid with all its rows on the disk."
    grid = tmp_path/'toys_grid.yaml'
    grid.write_text(GRID)
    for job in load_grid(grid).jobs: fake(job, tmp_path/'out', 85. if job.method == 'Toy' else 80.)
    return grid, tmp_path/'out'


def test_csv_has_exactly_the_columns(study):
    grid, out = study
    report(grid, out)
    t = pd.read_csv(out/'table.csv')
    assert list(t) == TABLE_COLUMNS == ('benchmark method memory metric mean std ci_low ci_high n_seeds '
                                        'paper_mean paper_std verdict').split()
    assert len(t) == 2 * 5 * len(METRICS) and (t.n_seeds == 3).all()
    assert ((t.ci_low <= t['mean']) & (t['mean'] <= t.ci_high)).all()


def test_same_rows_same_bytes(study, tmp_path):
    grid, out = study
    report(grid, out)
    timeless = ('table.csv', 'table.md', 'table.tex', 'figure.svg', 'figure.png')
    first = {n: (out/n).read_bytes() for n in timeless}
    other = tmp_path/'elsewhere'
    shutil.copytree(out/'runs', other/'runs')
    for p in sorted((other/'runs').glob('*.parquet'), reverse=True): # later, slower, in another order
        rows = read_result(p).assign(seconds=999., train_seconds=998.)
        p.unlink()
        write_result(rows.sample(frac=1, random_state=0), p)
    report(grid, other)
    assert {n: (other/n).read_bytes() for n in timeless} == first
    assert (other/'index.md').read_bytes() != (out/'index.md').read_bytes() # there the seconds are


def test_results_hold_rows_and_metrics(study):
    grid, out = study
    report(grid, out)
    rows = pd.read_parquet(out/'results.parquet')
    assert set(rows.metric) == {'accuracy', *METRICS}
    assert (rows.metric == 'accuracy').sum() == 10 * 3 * 5 * 4 and len(rows) == 10 * 3 * (5 * 4 + len(METRICS))
    one = rows[(rows.stamp == rows.stamp[0]) & (rows.seed == 100)]
    last = one[(one.metric == 'accuracy') & (one.task_trained == 4)].value.mean()
    assert np.isclose(one[one.metric == 'RA'].value.item(), last)


def test_nothing_of_this_machine_is_written(study):
    grid, out = study
    report(grid, out)
    for p in out.rglob('*'):
        if p.is_file() and p.suffix in ('.md', '.csv', '.tex', '.svg'):
            text = p.read_text()
            assert str(out) not in text and str(Path.home()) + os.sep not in text, p
            assert not re.search(r'\b20\d\d-\d\d-\d\d\b', text), p


def test_missing_and_older_runs_are_named(study, capsys):
    grid, out = study
    jobs = load_grid(grid).jobs
    result_path(jobs[0], out).unlink()
    old = result_path(jobs[1], out)
    rows = read_result(old).assign(stamp='0' * 16, code_version='older')
    old.unlink()
    write_result(rows, old.with_name(old.name.replace(jobs[1].stamp, '0' * 16)))
    result_path(jobs[2], out).write_bytes(b'damaged')
    assert bicl_report(grid=str(grid), out=str(out)) == 0
    said = capsys.readouterr().out
    assert '8 of 10 runs' in said and jobs[0].label in said and jobs[2].label in said
    assert '1 were made by an older version' in said
    assert said.strip() in (out/'index.md').read_text()
    got = collect(load_grid(grid), out)
    assert [j.label for j in got.older] == [jobs[1].label] and not got.other


def test_rows_of_other_questions_are_left_alone(study):
    "What lies in the folder but is not in the grid does not get into the table."
    grid, out = study
    report(grid, out)
    before = (out/'table.csv').read_bytes()
    fake(Job('toy', 'Toy', 10, (100, 101, 102), 'strict', dict(lr=.5)), out, 99.)
    fake(Job('toy', 'Toy', 10, (103, 104), 'strict'), out, 99.)
    report(grid, out)
    assert (out/'table.csv').read_bytes() == before


def test_new_preset_is_noticed(study):
    "Rows made with settings that the method no longer has are named, not passed off as new ones."
    grid, out = study
    job = load_grid(grid).jobs[0]
    rows = read_result(result_path(job, out))
    settings = json.loads(rows.settings.iloc[0]) | dict(lr=.7)
    result_path(job, out).unlink()
    write_result(rows.assign(stamp='1' * 16, settings=json.dumps(settings)),
                 result_path(job, out).with_name(job.name.replace(job.stamp, '1' * 16) + '.parquet'))
    got = report(grid, out)
    assert f'settings of these have changed since: {job.label}.' in got
    assert 'have changed since' in (out/'index.md').read_text()


def test_no_rows_and_wrong_use(tmp_path, capsys):
    (tmp_path/'g.yaml').write_text(GRID)
    assert bicl_report(grid=str(tmp_path/'g.yaml'), out=str(tmp_path/'out')) == 2
    assert 'no rows' in capsys.readouterr().err
    assert not (tmp_path/'out').exists()
    assert bicl_report(grid='tabel1') == 2
    assert 'table1' in capsys.readouterr().err


def paper_study(tmp_path):
    "The paper's own numbers, dressed up as runs of ours: every verdict must be `reproduced`."
    grid = Grid('like', 'Like the paper', [])
    wide = paper_table().pivot(index=['benchmark', 'method', 'memory'], columns='metric', values=['mean', 'std'])
    for (b, m, memory), r in wide.iterrows():
        memory = None if pd.isna(memory) else int(memory)
        job = replace(Job(b, m, memory, SEEDS, 'strict'), device='cpu')
        T, off = 10, torch.tensor([-1., 0, 1], dtype=torch.float64) * .01
        a = torch.zeros(3, T + 1, T, dtype=torch.float64)
        a[:] = (r['mean', 'RA'] + off)[:, None, None]
        a[:, range(1, T), range(T - 1)] = (r['mean', 'RA'] + (r['mean', 'LA'] - r['mean', 'RA']) * T / (T - 1) + off)[:, None]
        finish(job, Run(b, m, 'strict', SEEDS, a, task=T), str(tmp_path))
        grid.jobs.append(job)
    return collect(grid, tmp_path)


def test_the_paper_reproduces_itself(tmp_path):
    t = paper_study(tmp_path).table
    there = t[t.paper_mean.notna()]
    assert len(there) == 144
    assert set(there.verdict) == {'reproduced'}
    assert np.allclose(there['mean'], there.paper_mean, atol=.011)


def engine():
    return next((e for e in ('pdflatex', 'tectonic', 'lualatex') if shutil.which(e)), None)


@pytest.mark.skipif(engine() is None and not os.environ.get('CI'), reason='no TeX engine here (pdflatex, tectonic or lualatex)')
def test_latex_compiles(tmp_path):
    assert engine(), 'CI needs a TeX engine: pdflatex, tectonic or lualatex'
    tex = to_tex(paper_study(tmp_path).table)
    (tmp_path/'table1.tex').write_text(tex)
    how = ['tectonic'] if engine() == 'tectonic' else [engine(), '-interaction=nonstopmode', '-halt-on-error']
    got = subprocess.run([*how, 'table1.tex'], cwd=tmp_path, capture_output=True, text=True)
    assert got.returncode == 0, got.stdout[-3000:]
    assert (tmp_path/'table1.pdf').stat().st_size > 10_000
    assert 'Overfull' not in got.stdout, re.findall('Overfull.*', got.stdout)


def test_latex_is_well_formed(tmp_path):
    "Where no TeX is installed, at least the structure is right."
    tex = to_tex(paper_study(tmp_path).table)
    assert re.findall(r'\\begin\{(\w+\*?)\}', tex) == re.findall(r'\\end\{(\w+\*?)\}', tex)[::-1]
    body = tex[tex.index(r'\toprule'):tex.index(r'\bottomrule')]
    lines = [line for line in body.splitlines() if line.endswith(r'\\') and 'multicolumn' not in line]
    assert {line.count('&') for line in lines} == {13} and len(lines) == 1 + 2 * 12
    assert tex.isascii() and tex.count('{') == tex.count('}')
    assert not re.search(r'(?<!\\)[%&_#](?![\s\w{}])', tex.replace(' & ', '').replace('#1', ''))


def test_csv_of_the_paper(tmp_path):
    lines = to_csv(paper_study(tmp_path).table).splitlines()
    assert lines[0] == ','.join(TABLE_COLUMNS)
    assert lines[1].startswith('mnist-rotations,Online,,RA,58.5500,0.0100,')
