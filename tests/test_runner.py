"""The runner under fire: real kernels, real kills, a dask cluster that loses a worker; two runners are in test_chaos.py.

A kernel costs seconds, so there are no more of them than needed, and one process forks most of them. What a run must
give is known without any: the same job trained in this process.
"""
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import psutil
import pytest
import toys
from chaos import quiet, results, timeless, until, write_quiet

import nbformat.v4 as nbf
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

import bicl.runner
from bicl.commands import bicl_run
from bicl.jobs import Job, finished, load_grid, read_result, result_path, scratch
from bicl.runner import Kernels, execute, remote, run_jobs

HERE = Path(__file__).parent
GRID = '''
title: Toys
plugins: [toys]
seeds: [100, 101, 102]
benchmark: toy
protocol: strict
device: cpu
settings: {sleep: 0.15}
runs:
- {method: Toy, memory: 10}
- {method: Plain}
'''
JOB = Job('toy', 'Plain', seeds=(100,), device='cpu')


@pytest.fixture(autouse=True)
def see_toys(monkeypatch):
    "Workers and kernels find the toys too."
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(HERE), os.environ.get('PYTHONPATH', '')]))
    monkeypatch.setenv('BICL_PLUGINS', 'toys')


@pytest.fixture(scope='session')
def grid(tmp_path_factory):
    path = tmp_path_factory.mktemp('grid')/'toys_grid.yaml'
    path.write_text(GRID)
    return path


def exactly_once(grid, out):
    "Every row of the grid is there once, bit for bit that of a quiet run, with its notebook, and nothing else."
    jobs = load_grid(grid).jobs
    assert results(out) == sorted(result_path(j, Path(out).resolve()) for j in jobs)
    for j in jobs:
        assert finished(j, out)
        assert timeless(read_result(result_path(j, out))).equals(quiet(j))
        assert 'injected-parameters' in result_path(j, out).with_suffix('.ipynb').read_text()


def leftovers(out):
    return [p for p in (Path(out)/'checkpoints').iterdir() if not p.name.endswith('.log')]


ONE_GPU = """
import os, torch
first = os.getpid()
def asked(*a):
    with open({!r}, 'a') as f: print(os.getpid(), file=f)
    if os.getpid() == first: raise AssertionError('CUDA was asked before the fork')
    return 1
torch._C._cuda_getDeviceCount = torch._C._cuda_init = torch.cuda._lazy_init = asked
"""


@pytest.fixture(scope='module')
def kernels(tmp_path_factory):
    """Kernels that are forked from one process. A process that has spoken to CUDA cannot be forked, so this one
    dies if anything that it imports asks even whether there is a GPU. To its kernels one GPU is promised, and noted who asked."""
    folder = tmp_path_factory.mktemp('zygote')
    (folder/'sitecustomize.py').write_text(ONE_GPU.format(str(folder/'asked')))
    k = Kernels(dict(OMP_NUM_THREADS='2', PYTHONPATH=f'{folder}{os.pathsep}{HERE}'), folder/'log', ['toys'])
    k.asked = folder/'asked'
    yield k
    k.close()


@pytest.fixture
def warm(kernels, monkeypatch):
    "Runners and workers take kernels from there, too, and do not start a process of their own."
    shared = SimpleNamespace(manager=kernels.manager, close=lambda: None)
    monkeypatch.setattr(bicl.runner, 'Kernels', lambda *a: shared)


# ---- wrong use is answered before anything runs

@pytest.mark.parametrize('text, word', [
    ('runs: [', 'not valid YAML'),
    ('just a word', 'list `runs`'),
    ('{benchmark: toy, runs: [{method: Toy, memroy: 10}]}', "unknown key 'memroy'"),
    ('{benchmark: toy, runs: [{method: Toyy}]}', "method 'Toyy' is unknown"),
    ('{benchmark: tog, runs: [{method: Toy}]}', "benchmark 'tog' is unknown"),
    ('{benchmark: toy, runs: [{method: Toy, settings: {learning: 1}}]}', "setting 'learning' is unknown"),
    ('{benchmark: toy, runs: [{method: Toy, settings: {lr: fast}}]}', 'must be of type float'),
    ('{benchmark: toy, runs: [{method: Toy, settings: {lr: -1}}]}', 'must be more than 0'),
    ('{benchmark: toy, runs: [{method: Toy, settings: {memory: 3}}]}', 'a key of its own'),
    ('{benchmark: toy, runs: [{method: Toy, notebook: ../../../evil}]}', 'plain name'),
    ('{benchmark: toy, report: ../evil, runs: [{method: Toy}]}', 'plain name'),
    ('{benchmark: toy, runs: [{method: Toy, preset: "false"}]}', 'preset'),
    ('{benchmark: toy, runs: [{method: Toy, device: abacus}]}', "device 'abacus'"),
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

def test_failures_do_not_stop_the_grid(tmp_path, capsys, warm):
    "A failing run, a kernel that dies once, one that always dies, and missing data."
    (tmp_path/'mixed.yaml').write_text(f'''
plugins: [toys]
seeds: [100]
device: cpu
runs:
- {{benchmark: toy, method: Plain, settings: {{fail: true}}}}
- {{benchmark: toy, method: Plain, settings: {{die: "{tmp_path}/once"}}}}
- {{benchmark: toy, method: Plain, settings: {{die: "{tmp_path}/always", deaths: 99}}}}
- {{benchmark: toy-nowhere, method: Plain}}
''')
    out = tmp_path/'out'
    assert bicl_run(grid=str(tmp_path/'mixed.yaml'), out=str(out), jobs=2) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:4]] == ['failed', 'ran', 'failed', 'unavailable'], said
    assert 'the toy fails on purpose' in said[0] and 'fail=True' in said[0]
    assert 'the kernel died: fatal: the toy dies on purpose (twice)' in said[2]
    assert 'not on this machine' in said[3]
    assert re.match(r'4 runs: 1 ran, 1 unavailable, 2 failed\.', said[4])
    assert len(os.listdir(tmp_path/'once')) == 1 and len(os.listdir(tmp_path/'always')) == 2
    assert len(results(out)) == 1
    fails = load_grid(tmp_path/'mixed.yaml').jobs[0]
    assert 'on purpose' in scratch(fails, out, '.ipynb').read_text() # kept, to be looked at
    assert 'reason: RuntimeError: the toy fails on purpose' in scratch(fails, out, '.txt').read_text()
    assert not list((out/'checkpoints').glob('*.lock'))


# ---- warm kernels

def talk(kernels, *cells, env=(), **how):
    "What each cell says in a kernel of its own."
    nb = nbf.new_notebook(cells=[nbf.new_code_cell(c) for c in cells])
    NotebookClient(nb, kernel_name='python3', kernel_manager_class=kernels.manager(dict(env)), **how).execute()
    return [''.join(o.get('text', o.get('ename', '')) for o in c.outputs) for c in nb.cells]


def is_gone(pid, seconds=20): until(lambda: not psutil.pid_exists(int(pid)), seconds); return True


SEES = """import os, sys
print(os.getpid(), os.getppid(), 'bicl.jobs' in sys.modules, 'torchvision' in sys.modules, os.getpgid(0) == os.getpid())"""


def test_a_kernel_is_forked_clean_and_has_its_own_environment(kernels):
    "Nothing was computed before the fork: one thread, no GPU asked; each kernel gets the environment of its place."
    slot = dict(CUDA_VISIBLE_DEVICES='3', BICL_PLUGINS='toys', SLOT='a')
    own, about, gpu = talk(kernels, SEES, 'print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SLOT"], os.environ["BICL_PLUGINS"])',
        'import torch; print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), torch.get_num_threads())', env=slot)
    pid, parent, *rest = own.split()
    assert int(parent) == kernels.proc.pid and rest == ['True', 'False', 'True']
    assert psutil.Process(int(parent)).num_threads() == 1
    assert about == '3 a toys\n' and gpu == 'False False 2\n'
    assert is_gone(pid)
    assert talk(kernels, SEES + '; print("SLOT" in os.environ)')[0].endswith('False\n') # not for the next one


def test_a_gpu_is_found_in_the_kernel_and_asked_for_nowhere_else(kernels):
    pid, found = talk(kernels, 'import os; print(os.getpid())', 'from bicl.core import pick_device; print(pick_device("auto"))')
    assert found == 'cuda\n' and kernels.proc.poll() is None
    assert set(kernels.asked.read_text().split()) == {pid.strip()}


def test_interrupt_timeout_and_crash_of_a_kernel(kernels):
    said = talk(kernels, SEES, 'import time; time.sleep(99)', 'print("still here")', timeout=2,
                interrupt_on_timeout=True, allow_errors=True)
    assert said[1:] == ['KeyboardInterrupt', 'still here\n'] and is_gone(said[0].split()[0])
    with pytest.raises(CellTimeoutError): talk(kernels, 'import time; time.sleep(99)', timeout=1)
    with pytest.raises(DeadKernelError): talk(kernels, 'import os; os.kill(os.getpid(), 9)')
    assert not psutil.Process(kernels.proc.pid).children() # none is left, dead or alive


def test_without_forks_there_are_ordinary_kernels(kernels, monkeypatch, tmp_path):
    "On another system, or if the process that forks cannot start."
    monkeypatch.setattr(Kernels, 'start', lambda self: setattr(self, 'proc', subprocess.Popen(
        [sys.executable, '-c', ''], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)))
    broken = Kernels({}, tmp_path/'log')
    monkeypatch.setattr(sys, 'platform', 'somewhere')
    elsewhere = Kernels({}, tmp_path/'log')
    assert elsewhere.proc is None
    for k in (broken, elsewhere):
        pid, parent, *_ = talk(k, SEES + '; print(os.environ["SLOT"])', env=dict(SLOT='b'))[0].split()
        assert int(parent) == os.getpid() and is_gone(pid)
        k.close()


# ---- aimed kills: the moments that hurt

def doomed(job, out, manager):
    "Execute a job, and kill this process with -9 when the rows are written and the notebook is not."
    bicl.runner._keep = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    execute(job, out, None, manager)


def test_killed_between_rows_and_notebook(tmp_path, kernels, warm):
    "The notebook is made again from the checkpoint, without training; so are rows that were damaged."
    path, how = result_path(JOB, tmp_path), (JOB, tmp_path, partial(kernels.manager, {}))
    p = multiprocessing.get_context('fork').Process(target=doomed, args=how)
    p.start()
    p.join()
    assert p.exitcode == -signal.SIGKILL
    rows = read_result(path)
    assert timeless(rows).equals(quiet(JOB))
    assert not path.with_suffix('.ipynb').exists() and not finished(JOB, tmp_path)
    assert scratch(JOB, tmp_path, '.safetensors').exists()
    path.write_bytes(path.read_bytes()[:len(path.read_bytes()) // 2])
    (tmp_path/'checkpoints'/f'.{JOB.name}.safetensors.x1.tmp').touch() # killed while it wrote, the time before
    again = run_jobs([JOB], tmp_path, plugins=['toys']).iloc[0]
    assert again.status == 'ran' and 'damaged' in again.note
    assert read_result(path).train_seconds[0] == rows.train_seconds[0] # it was not trained again
    assert timeless(read_result(path)).equals(timeless(rows)) and finished(JOB, tmp_path)
    notebook = path.with_suffix('.ipynb').read_text()
    assert 'injected-parameters' in notebook and str(tmp_path) not in notebook and len(notebook) < 100_000
    assert not leftovers(tmp_path)


def test_litter_is_swept_at_the_next_start(tmp_path):
    "Killed after the notebook, before the checkpoint is removed; or a run whose notebook was lost: it is not done."
    write_quiet(JOB, tmp_path)
    for suffix in ('.safetensors', '.json', '.ipynb', '.lock'):
        scratch(JOB, tmp_path, suffix).parent.mkdir(exist_ok=True)
        scratch(JOB, tmp_path, suffix).touch()
    half = [tmp_path/'checkpoints'/f'.{JOB.name}.safetensors.x1_y2.tmp', tmp_path/'runs'/f'.{JOB.name}.ipynb.x3.tmp',
            tmp_path/'runs'/f'.{JOB.name}.parquet.x4.tmp'] # written when the kill came
    for p in half: p.touch()
    other = tmp_path/'runs'/'.another_run.parquet.x5.tmp' # perhaps being written
    other.touch()
    assert run_jobs([JOB], tmp_path).status[0] == 'skipped'
    assert not leftovers(tmp_path) and not any(p.exists() for p in half) and other.exists()
    for content in ('{"cells": [', None):
        note = result_path(JOB, tmp_path).with_suffix('.ipynb')
        note.write_text(content) if content else note.unlink()
        assert not finished(JOB, tmp_path)


# ---- dask

def test_dask_loses_a_worker(grid, tmp_path, capsys):
    "Two workers; the one that is busy is killed with -9 half way."
    distributed = pytest.importorskip('distributed', reason="needs the extra: pip install 'bicl[dask]'")
    out, one = tmp_path/'out', grid.with_name('one.yaml')
    one.write_text(GRID.replace('- {method: Toy, memory: 10}\n', ''))
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True,
                                  dashboard_address=None) as cluster:
        def kill():
            until(lambda: list((out/'checkpoints').glob('*.json')) or done)
            pids = [w.pid for w in cluster.workers.values()]
            killed.append(next(p for p in pids if psutil.Process(p).children()))
            os.kill(killed[0], signal.SIGKILL)
        killed, done, killer = [], [], Thread(target=kill)
        killer.start()
        done.append(bicl_run(str(one), str(out), engine='dask', scheduler=cluster.scheduler_address))
        killer.join()
    assert done == [0] and len(killed) == 1, capsys.readouterr()
    exactly_once(one, out)


def test_dask_without_a_shared_folder(tmp_path, warm):
    "A worker that does not see the grid's folder sends its files back; one with other code says so."
    send = asdict(JOB), JOB.identity(), str(tmp_path/'not-here'), 'token', ['toys']
    got, files = remote(*send)
    assert got['status'] == 'ran', got
    assert sorted(files) == [f'{JOB.name}.ipynb', f'{JOB.name}.parquet']
    (tmp_path/'sent.parquet').write_bytes(files[f'{JOB.name}.parquet'])
    assert timeless(read_result(tmp_path/'sent.parquet')).equals(quiet(JOB))
    assert not (tmp_path/'not-here').exists()
    got, files = remote(send[0], send[1] | dict(version='9'), *send[2:])
    assert got['status'] == 'failed' and not files
    assert f'version is 9 there and {JOB.version} here' in got['note']


def test_dask_needs_an_address(grid, tmp_path, capsys):
    assert bicl_run(grid=str(grid), out=str(tmp_path), engine='dask') == 2
    assert '--scheduler' in capsys.readouterr().err
    assert bicl_run(grid=str(grid), out=str(tmp_path), engine='dask', scheduler='tcp://127.0.0.1:9') == 2
    assert 'no dask scheduler answers' in capsys.readouterr().err


# ---- the end of warm kernels: it comes last, so that the others can share them

def test_kernels_do_not_outlive_those_they_belong_to(kernels):
    "The process that forks is killed: its kernel follows, and the next one is forked by a new process."
    with pytest.raises(DeadKernelError): talk(kernels, SEES, 'os.kill(os.getppid(), 9)', 'import time; time.sleep(99)')
    assert is_gone(kernels.all[-1].pid) and kernels.proc.wait() == -9
    assert talk(kernels, 'print(1)') == ['1\n'] and kernels.proc.poll() is None
    with pytest.raises(DeadKernelError): # the runner is gone: the pipe ends, and all with it
        nb = nbf.new_notebook(cells=[nbf.new_code_cell('import time; time.sleep(99)')])
        client = NotebookClient(nb, kernel_name='python3', kernel_manager_class=kernels.manager({}))
        client.on_cell_execute = lambda **_: kernels.proc.stdin.close()
        client.execute()
    assert is_gone(kernels.all[-1].pid)
    kernels.proc.wait()
