"""The runner under fire: real kernels, real kills, two runners, a dask cluster that loses a worker."""
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import toys  # noqa: F401  (registers the toy methods in this process)

from bicl.report import report
from bicl.runner import Job, bicl_run, load_grid, read_result, remote, result_path, run_jobs, scratch

HERE = Path(__file__).parent
GRID = '''
title: Toys
plugins: [toys]
seeds: [100, 101, 102]
benchmark: toy
protocol: strict
device: cpu
runs:
- {method: [Toy, Rival], memory: 10, settings: {sleep: 0.15}}
- {method: Plain, settings: {sleep: 0.15}}
'''
TABLES = ('table.csv', 'table.md', 'table.tex', 'figure.svg', 'figure.png')


@pytest.fixture(autouse=True)
def see_toys(monkeypatch):
    "Workers and kernels find the toys too."
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(HERE), os.environ.get('PYTHONPATH', '')]))


@pytest.fixture(scope='session')
def grid(tmp_path_factory):
    path = tmp_path_factory.mktemp('grid')/'toys_grid.yaml'
    path.write_text(GRID)
    return path


def tables(grid, out):
    "The bytes of everything that must not depend on how the rows came about."
    report(grid, out)
    return {name: (Path(out)/name).read_bytes() for name in TABLES}


@pytest.fixture(scope='session')
def quiet(grid, tmp_path_factory):
    "What an uninterrupted run gives; parallel test processes share it, as runners do."
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base)/'quiet'
    with pytest.MonkeyPatch.context() as m:
        m.setenv('PYTHONPATH', os.pathsep.join([str(HERE), os.environ.get('PYTHONPATH', '')]))
        done = run_jobs(load_grid(grid).jobs, out, workers=2, plugins=['toys'], quiet=True)
    assert set(done.status) <= {'ran', 'skipped'}, done
    return tables(grid, out)


def start(grid, out, *more):
    "The command, in a process of its own (written out, so that it need not be installed)."
    script = grid.with_name('bicl_run.py')
    script.write_text('import sys\nfrom bicl.runner import bicl_run\nsys.exit(bicl_run())\n')
    return subprocess.Popen([sys.executable, str(script), str(grid), '--out', str(out), '--jobs', '2', *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait(proc, seconds=900):
    try: return proc.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        proc.kill()
        raise AssertionError('the runner does not end:\n' + proc.communicate()[0]) from None


def results(out): return sorted((Path(out)/'runs').glob('*.parquet'))


def until(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(.05)


def exactly_once(grid, out):
    "Every row of the grid is there once, and nothing else."
    jobs = load_grid(grid).jobs
    assert results(out) == sorted(result_path(j, Path(out).resolve()) for j in jobs)
    for j in jobs:
        rows = read_result(result_path(j, out))
        assert not rows.duplicated(['seed', 'task_trained', 'task_tested']).any()
        assert len(rows) == 3 * 4 * 3


def leftovers(out):
    return [p for p in (Path(out)/'checkpoints').iterdir() if not p.name.endswith('.log')]


# ---- wrong use is answered before anything runs

@pytest.mark.parametrize('text, word', [
    ('runs: [', 'not valid YAML'),
    ('just a word', 'list `runs`'),
    ('{benchmark: toy, runs: [{method: Toy, memroy: 10}]}', "unknown key 'memroy'"),
    ('{benchmark: toy, runs: [{method: Toyy}]}', "method 'Toyy' is unknown"),
    ('{benchmark: tog, runs: [{method: Toy}]}', "benchmark 'tog' is unknown"),
    ('{benchmark: toy, runs: [{method: Toy, settings: {learning: 1}}]}', "setting 'learning' is unknown"),
    ('{benchmark: toy, runs: [{method: Toy, settings: {lr: fast}}]}', 'must be of type float'),
    ('{benchmark: toy, runs: [{method: Toy, protocol: loose}]}', "protocol 'loose' is unknown"),
    ('{benchmark: toy, seeds: [1, 1], runs: [{method: Toy}]}', 'different'),
    ('{benchmark: toy, seeds: 3, runs: [{method: Toy}]}', 'seeds'),
    ('{benchmark: toy, plugins: [no_such_module], runs: [{method: Toy}]}', 'no_such_module'),
    ('{runs: [{method: Toy}]}', 'benchmark'),
])
def test_bad_grid(tmp_path, capsys, text, word):
    (tmp_path/'bad.yaml').write_text(text)
    assert bicl_run(grid=str(tmp_path/'bad.yaml'), out=str(tmp_path/'out')) == 2
    said = capsys.readouterr().err
    assert word in said and 'bad.yaml' in said
    assert not (tmp_path/'out').exists()


def test_unknown_grid(tmp_path, capsys):
    assert bicl_run(grid='tabel1', out=str(tmp_path/'out')) == 2
    assert 'table1' in capsys.readouterr().err
    assert not (tmp_path/'out').exists()


def test_folder_that_cannot_be_written(tmp_path, capsys, grid):
    (tmp_path/'file').write_text('in the way')
    assert bicl_run(grid=str(grid), out=str(tmp_path/'file'/'out')) == 2
    assert '--out' in capsys.readouterr().err


# ---- failures are contained

def test_failures_do_not_stop_the_grid(tmp_path, capsys):
    "A failing run, a kernel that dies once, one that always dies, missing data, and one that is well."
    (tmp_path/'mixed.yaml').write_text(f'''
plugins: [toys]
seeds: [100]
device: cpu
runs:
- {{benchmark: toy, method: Plain, settings: {{fail: true}}}}
- {{benchmark: toy, method: Plain, settings: {{die: "{tmp_path}/once"}}}}
- {{benchmark: toy, method: Plain, settings: {{die: "{tmp_path}/always", deaths: 99}}}}
- {{benchmark: toy-nowhere, method: Plain}}
- {{benchmark: toy, method: Toy, memory: 10}}
''')
    out = tmp_path/'out'
    assert bicl_run(grid=str(tmp_path/'mixed.yaml'), out=str(out), jobs=2) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:5]] == ['failed', 'ran', 'failed', 'unavailable', 'ran'], said
    assert 'the toy fails on purpose' in said[0]
    assert 'the kernel died (twice)' in said[2]
    assert 'not on this machine' in said[3]
    assert re.match(r'5 runs: 2 ran, 1 unavailable, 2 failed\.', said[5])
    assert len(os.listdir(tmp_path/'once')) == 1 and len(os.listdir(tmp_path/'always')) == 2
    assert len(results(out)) == 2
    fails = load_grid(tmp_path/'mixed.yaml').jobs[0]
    assert 'on purpose' in scratch(fails, out, '.ipynb').read_text() # kept, to be looked at
    assert not list((out/'checkpoints').glob('*.lock'))


def test_damaged_result_is_done_again(tmp_path):
    job = Job('toy', 'Plain', seeds=(100,), device='cpu')
    path = result_path(job, tmp_path)
    assert run_jobs([job], tmp_path, plugins=['toys'], quiet=True).status[0] == 'ran'
    good = path.read_bytes()
    notebook = path.with_suffix('.ipynb').read_text()
    assert str(tmp_path) not in notebook and len(notebook) < 100_000
    path.write_bytes(good[:len(good) // 2])
    again = run_jobs([job], tmp_path, plugins=['toys'], quiet=True).iloc[0]
    assert again.status == 'ran' and 'damaged' in again.note
    a, b = read_result(path), tmp_path/'good.parquet'
    b.write_bytes(good)
    timeless = [c for c in a if 'seconds' not in c]
    assert a[timeless].equals(read_result(b)[timeless])


# ---- kills

def family(proc):
    "Worker and kernel processes of a runner."
    try: return psutil.Process(proc.pid).children(recursive=True)
    except psutil.NoSuchProcess: return []


def test_kills_at_random_moments(grid, quiet, tmp_path):
    "The runner, its workers and its kernels are killed with -9, again and again; then it may finish."
    dice, out, killed = random.Random(os.environ.get('KILL_SEED', time.time_ns())), tmp_path/'out', []
    print('dice:', dice.getstate()[1][0])
    for _ in range(3): # the runner itself
        proc = start(grid, out)
        relatives, end = [], time.monotonic() + dice.uniform(4, 15)
        while time.monotonic() < end and proc.poll() is None:
            relatives = family(proc) or relatives
            time.sleep(.1)
        killed.append(proc.poll() is None)
        proc.kill()
        proc.wait()
        psutil.wait_procs(relatives, timeout=90)
        assert not [p for p in relatives if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    proc = start(grid, out)
    for _ in range(2): # a worker or a kernel
        end = time.monotonic() + dice.uniform(3, 8)
        while time.monotonic() < end and proc.poll() is None: time.sleep(.1)
        if (some := family(proc)): dice.choice(some).kill()
    said = wait(proc)
    if proc.returncode: # both kills may have hit the same run, which has two tries: the same command goes on
        assert proc.returncode == 1 and 'twice' in said, said
        last = start(grid, out)
        assert wait(last) and last.returncode == 0
    assert any(killed)
    exactly_once(grid, out)
    assert not leftovers(out)
    assert tables(grid, out) == quiet


def test_interrupt_and_continue(grid, quiet, tmp_path):
    "Ctrl-C when the first run is done: a clean end, and nothing is done twice afterwards."
    out = tmp_path/'out'
    proc = start(grid, out)
    until(lambda: results(out) or proc.poll() is not None)
    relatives = family(proc)
    proc.send_signal(signal.SIGINT)
    said = wait(proc)
    assert proc.returncode == 130 and 'the same command goes on' in said, said
    psutil.wait_procs(relatives, timeout=90)
    assert not [p for p in relatives if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    before = {p.name: p.stat().st_mtime_ns for p in results(out)}
    assert 1 <= len(before) < 3
    proc = start(grid, out)
    said = wait(proc)
    assert proc.returncode == 0, said
    assert f'{3 - len(before)} ran, {len(before)} skipped' in said
    assert all(p.stat().st_mtime_ns == before[p.name] for p in results(out) if p.name in before)
    assert tables(grid, out) == quiet


def test_two_runners_on_one_folder(grid, quiet, tmp_path):
    "They share the work: every run is done by one of them, both end well."
    out = tmp_path/'out'
    procs = [start(grid, out) for _ in range(2)]
    said = [wait(p) for p in procs]
    assert [p.returncode for p in procs] == [0, 0], said
    ran = [len(re.findall(r'^ran ', s, re.M)) for s in said]
    assert sum(ran) == 3, said
    exactly_once(grid, out)
    assert not leftovers(out)
    assert tables(grid, out) == quiet


# ---- dask

def test_dask_loses_a_worker(grid, quiet, tmp_path):
    "Two workers, one of them killed with -9 half way."
    distributed = pytest.importorskip('distributed', reason="needs the extra: pip install 'bicl[dask]'")
    out = tmp_path/'out'
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True,
                                  dashboard_address=None) as cluster:
        proc = start(grid, out, '--engine', 'dask', '--scheduler', cluster.scheduler_address)
        until(lambda: results(out) or proc.poll() is not None)
        assert proc.poll() is None, wait(proc)
        victim = next(iter(cluster.workers.values())).pid
        os.kill(victim, signal.SIGKILL)
        said = wait(proc)
    assert proc.returncode == 0, said
    exactly_once(grid, out)
    assert tables(grid, out) == quiet


def test_dask_without_a_shared_folder(tmp_path):
    "A worker that does not see the grid's folder sends its files back."
    job = Job('toy', 'Plain', seeds=(100,), device='cpu')
    got, files = remote(asdict(job), str(tmp_path/'not-here'), 'token', ['toys'])
    assert got['status'] == 'ran', got
    assert sorted(Path(f).suffix for f in files) == ['.ipynb', '.parquet']
    (tmp_path/'sent.parquet').write_bytes(files[f'{job.name}.parquet'])
    assert read_result(tmp_path/'sent.parquet').stamp[0] == job.stamp
    assert not (tmp_path/'not-here').exists()


def test_dask_needs_an_address(grid, tmp_path, capsys):
    assert bicl_run(grid=str(grid), out=str(tmp_path), engine='dask') == 2
    assert '--scheduler' in capsys.readouterr().err
    assert bicl_run(grid=str(grid), out=str(tmp_path), engine='dask', scheduler='tcp://127.0.0.1:9') == 2
    assert 'no dask scheduler answers' in capsys.readouterr().err
