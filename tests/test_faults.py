"""What a user gets when something goes wrong: a line that says what, why and what to do, and nothing half done."""
import errno
import io
import json
import multiprocessing
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import chaos
import nbformat
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import toys
from torch.utils.flop_counter import FlopCounterMode

import bicl.core
import bicl.figures
import bicl.runner
from bicl.checkpoint import load_checkpoint
from bicl.commands import Board, bicl_report, bicl_run
from bicl.core import Rng, atomic, claim, in_words, parse_yaml, sweep
from bicl.jobs import Job, ResultError, load_grid, read_result, result_path, scratch, write_result
from bicl.learner import METHODS, register_method
from bicl.memory import KCenter
from bicl.runner import Dask, Kernels, Outcome, execute, run_jobs, tell, what_happened
from bicl.streams import BENCHMARKS, Block
from bicl.tables import collect, write_tables

JOB = Job('toy', 'Plain', seeds=(100,), device='cpu')
GONE = 999_999_999 # no process has this number


@pytest.fixture(autouse=True)
def see_toys(monkeypatch):
    for k, v in chaos.environment().items(): monkeypatch.setenv(k, v)


# ---- files

def test_what_was_written_survives_a_power_cut(tmp_path, monkeypatch):
    "The file is flushed before it gets its name, and the folder after that."
    seen, fsync, move = [], os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: seen.append(os.path.isdir(f'/proc/self/fd/{fd}')) or fsync(fd))
    monkeypatch.setattr(os, 'replace', lambda *a: seen.append('named') or move(*a))
    with atomic(tmp_path/'a') as f: f.write('x')
    assert seen == [False, 'named', True]


@pytest.fixture
def small_files():
    "No file may be longer than a kilobyte: for a process that is what a full disk is."
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    def limit(size=1024): resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_names_the_file(tmp_path, small_files):
    small_files()
    with pytest.raises(OSError) as e, atomic(tmp_path/'table.csv') as f: f.write('x' * 5000)
    assert str(tmp_path/'table.csv') in str(e.value) and 'the disk is full: make room' in in_words(e.value)
    assert not list(tmp_path.iterdir())


def test_tables_on_a_full_disk_are_all_old(tmp_path, small_files):
    grid, out = toys.study(tmp_path)
    study, there = collect(load_grid(grid), out), {f'table.{s}': f'old {s}' for s in ('csv', 'tex', 'md')}
    for n, text in there.items(): (out/n).write_text(text)
    write_tables(study, tmp_path/'there', 'table')
    small_files(max(p.stat().st_size for p in (tmp_path/'there').iterdir()) - 1) # too small for one of them
    with pytest.raises(OSError, match='table.'): write_tables(study, out, 'table')
    assert {n: (out/n).read_text() for n in there} == there
    assert not list(out.glob('.*'))


def test_names_are_text_in_every_table(tmp_path, monkeypatch):
    "A title, a method and a benchmark that would like to be a script, a column, a link or a command."
    evil = r'<script>x</script> | [a](b) \input{c} my_d $e$ `f` %'
    for table, name in ((METHODS, 'Toy'), (BENCHMARKS, 'toy')): monkeypatch.setitem(table, name, replace(table[name], label=evil))
    (grid := tmp_path/'g.yaml').write_text(f"title: '{evil}'\nplugins: [toys]\nseeds: [1, 2]\nbenchmark: toy\nruns: [{{method: [Toy, Plain]}}]")
    for job in load_grid(grid).jobs: toys.fake(job, tmp_path/'out')
    write_tables(collect(load_grid(grid), tmp_path/'out'), tmp_path/'there', 'table')
    md, tex = ((tmp_path/'there'/f'table.{s}').read_text() for s in ('md', 'tex'))
    assert md.count('&lt;script&gt;') >= 3 and '<script' not in md and '](b)' not in md.replace('\\]', '')
    lines = [len(re.findall(r'(?<!\\)\|', line)) for line in md.splitlines() if line.startswith('|')]
    assert len(set(lines)) == 1 # no bar of theirs has made a column
    assert tex.count('textbackslash{}input') >= 2 and '\\input' not in tex and 'my\\_d' in tex and 'my_d' not in tex


def test_a_report_is_all_or_nothing(tmp_path, monkeypatch, capsys):
    "The page fails half way: tables and figures stay as they were; the next one clears up after one that was killed."
    grid, out = toys.study(tmp_path)
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell('# A page')])
    def half(path, out, **given):
        (Path(out)/'table.csv').write_text('new')
        if full: raise OSError(errno.ENOSPC, 'No space left on device', f'{out}/table.tex')
        nb.cells[0].source = f'[a table](../../x/{Path(out).name}/table.csv)'
        return nb
    monkeypatch.setattr(bicl.figures, 'execute_page', half)
    (out/'table.csv').write_text('old')
    (litter := out/f'.together-{socket.gethostname()}-{GONE}-x.tmp').mkdir()
    full = True
    assert bicl_report(grid=str(grid), out=str(out)) == 2
    said = capsys.readouterr().err
    assert 'table.tex' in said and 'make room' in said and said.count('\n') == 1
    assert (out/'table.csv').read_text() == 'old' and not litter.exists() and not list(out.glob('.*'))
    full = False
    assert bicl_report(grid=str(grid), out=str(out)) == 0
    assert (out/'table.csv').read_text() == 'new' and '.together' not in (out/'grid.md').read_text()


class Bomb:
    def __init__(self, path): self.path = path
    def __reduce__(self): return open, (self.path, 'w')


def test_files_from_outside_are_data(tmp_path):
    "A checkpoint, a result and a grid that would like to be code are refused, and do nothing."
    (bad := tmp_path/'bad').write_bytes(pickle.dumps(Bomb(str(tmp_path/'boom'))))
    with pytest.raises(ValueError, match='bad'): load_checkpoint(bad)
    with pytest.raises(ResultError, match='bad'): read_result(bad)
    with pytest.raises(ValueError, match='not valid YAML'): parse_yaml(f'!!python/object/apply:os.mkdir [{tmp_path}/boom]', 'x')
    assert not (tmp_path/'boom').exists()
    code = '\n'.join(p.read_text() for p in (chaos.ROOT/'bicl').glob('*.py'))
    assert not re.findall(r'pickle|torch\.load\(|unsafe|full_load|extractall|shell=True', code)


def test_a_lock_that_cannot_be_had(tmp_path, monkeypatch, capsys):
    import fcntl
    def none(*a): raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(fcntl, 'flock', none)
    with pytest.raises(OSError, match='no lock can be had on .*a.lock.*No locks available.*a disk that knows locks'):
        with claim(tmp_path/'a.lock'): pass
    got = execute(JOB, tmp_path/'out')
    assert got.status == 'failed' and 'no lock can be had' in got.note


def test_litter_of_killed_processes_is_swept(tmp_path, monkeypatch):
    "Of processes that are gone, not of those that are there; in the grid's folder, and among temporary files."
    out, host = tmp_path/'out', socket.gethostname()
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    chaos.write_quiet(JOB, out)
    (out/'checkpoints').mkdir()
    def litter(pid):
        return [tmp_path/f'bicl-{pid}-abc'/'k.json', out/'runs'/f'of-{host}-{pid}-x'/'y',
                *(out/'checkpoints'/f'of-{host}-{pid}.{s}' for s in ('log', 'seen'))]
    old = [*litter(GONE), out/'checkpoints'/'another_run.lock', out/'checkpoints'/'.another_run.safetensors.x.tmp']
    for p in old + litter(os.getpid()):
        p.parent.mkdir(exist_ok=True)
        p.touch()
    os.utime(old[-1], (time.time() - 2*86_400,)*2)
    assert run_jobs([JOB], out).status[0] == 'skipped'
    assert [p.name for p in old if p.exists()] == []
    assert not (tmp_path/f'bicl-{GONE}-abc').exists() and all(p.exists() for p in litter(os.getpid()))


def test_litter_of_a_number_that_is_somebody_elses_by_now(tmp_path):
    "Or of one that is dead and not yet counted as such."
    with subprocess.Popen([sys.executable, '-c', '']) as dead:
        chaos.until(lambda: not chaos.alive(psutil.Process(dead.pid)), 20)
        mine, before, zombie = (tmp_path/f'of-{pid}-{i}' for i, pid in enumerate([os.getpid(), os.getpid(), dead.pid]))
        for p in (mine, before, zombie): p.touch()
        began = psutil.Process().create_time()
        os.utime(before, (began - 600,)*2) # when we were not there yet
        sweep(tmp_path, 'of-')
        assert [p.name for p in tmp_path.iterdir()] == [mine.name]


# ---- runs

def test_data_that_is_not_there(tmp_path, capsys):
    (tmp_path/'g.yaml').write_text('{plugins: [toys], seeds: [1], runs: [{benchmark: toy-nowhere, method: Plain}]}')
    ask = dict(grid=str(tmp_path/'g.yaml'), out=str(tmp_path/'out'))
    assert bicl_run(**ask) == 1
    assert 'not on this machine' in capsys.readouterr().out
    assert bicl_run(**ask, skip_missing=True) == 0
    job, = load_grid(tmp_path/'g.yaml').jobs
    assert what_happened(job, tmp_path/'out')['state'] == 'unavailable'


class Refuses(toys.Toy):
    def __init__(self, info, settings): raise TypeError('of no use')


BAD = [(Job('toy', 'GEM', 2, (1,)), 'memory'), (Job('toy', 'Plain', seeds=(1,), protocol='strict', settings={'stream.block': 100}), 'strict'),
       (Job('toy', 'Plain', seeds=(1,), device='cuda'), 'cuda'), (Job('toy', 'Refuses', seeds=(1,)), 'of no use'),
       (Job('mnist-split', 'Online', seeds=(1,), settings={'stream.tasks': 99}), 'tasks=99'),
       (Job('toy', 'BiCL', 1, (1,), settings=dict(separate=True)), 'at least 2')]


def test_every_learner_is_built_before_any_run(tmp_path, monkeypatch):
    "What is wrong with one costs its own rows only, and not a single kernel."
    monkeypatch.setitem(METHODS, 'Refuses', None)
    register_method('Refuses', Refuses, toys.Plain)
    monkeypatch.setattr(bicl.runner, 'Local', None)
    if bicl.core.torch.cuda.is_available(): BAD.pop(2)
    got = run_jobs([j for j, _ in BAD], tmp_path/'out')
    assert set(got.status) == {'failed'}
    for note, (_, word) in zip(got.note, BAD): assert word in note and '\n' not in note, note


@pytest.mark.parametrize('method, settings', [
    ('Online', dict(hidden='wide')), ('Online', dict(hidden=[-3, 4])), ('Online', dict(hidden=[10.7])), ('Online', dict(lr=np.inf)),
    ('BiCL', dict(beta_lam=-7)), ('BiCL', dict(outer_lr=0)), ('BiCL', dict(hypergradient='guess')), ('ER', dict(memory=3))])
def test_settings_out_of_range_are_refused_at_once(method, settings):
    with pytest.raises(ValueError, match=next(iter(settings))): replace(JOB, method=method, settings=settings).check()


def test_missing_and_infinite_numbers_of_any_metric_are_refused(tmp_path):
    "Whoever reads rows, or writes them, hears whose number it is."
    chaos.write_quiet(JOB, tmp_path)
    rows = read_result(path := result_path(JOB, tmp_path))
    more = rows[rows.task_trained == 2].assign(metric='mood')
    for bad, word in [(pd.concat([rows, more.assign(value=np.inf)]), 'mood of seed 100 after task 2 on task 1 is inf'),
                      (rows[:-1], 'numbers of accuracy'), (rows[:0], '0 rows'),
                      (pd.concat([rows, more.assign(seed=7)]), 'mood of seed .* not asked for')]:
        write_result(bad, path)
        with pytest.raises(ResultError, match=word): read_result(path)


def test_the_cost_of_k_center_grows_like_its_capacity():
    "Per block: only distances of the samples that arrive are computed. Four times the memory is four times the work."
    def work(capacity, d=50):
        m, block = KCenter(capacity, Rng([1]), d), lambda n: Block(Rng([2], str(n)).normal(n, d), torch.zeros(1, n, dtype=torch.int64), 0)
        m.add(block(capacity))
        with FlopCounterMode(display=False) as count: m.add(block(10))
        assert len(m) == capacity
        return count.get_total_flops()
    assert 0 < work(200) < 4.2*work(50)


@pytest.fixture(scope='module')
def kernels(tmp_path_factory):
    "A process that forks kernels, started where files are called like libraries."
    trap, before = tmp_path_factory.mktemp('trap'), os.getcwd()
    for name in ('quadprog', 'matplotlib', 'nbformat'): (trap/f'{name}.py').write_text('raise RuntimeError("a trap")')
    os.chdir(trap)
    k = Kernels(dict(PYTHONPATH=os.pathsep.join([str(chaos.HERE), str(chaos.ROOT)])), trap/'log', ['toys'])
    yield k
    k.close()
    os.chdir(before)


def test_nothing_is_imported_from_the_current_folder(kernels):
    "Neither by the process that forks, nor by a kernel, whether forked or not."
    from test_runner import talk
    look = 'import quadprog, matplotlib, sys; print(sys.path.count(""), quadprog.__name__)'
    assert talk(kernels, look) == ['0 quadprog\n'] and kernels.proc.poll() is None
    proc, kernels.proc = kernels.proc, None
    assert talk(kernels, look) == ['0 quadprog\n']
    kernels.proc = proc


def test_nobody_is_served_who_is_gone(monkeypatch):
    "The runner was killed while its process imported: the kernel that it has asked for would be nobody's, and leave a log."
    forks, line = [], json.dumps(dict(argv=[], env={}, cwd='', log='')) + '\n'
    monkeypatch.setattr(os, 'fork', lambda: forks.append(1) or 77)
    monkeypatch.setattr(signal, 'signal', lambda *a: None)
    monkeypatch.setattr(bicl.runner, 'WARM', [])
    monkeypatch.setattr(psutil.Process, 'children', lambda *a, **kw: [])
    for runner, n in [(os.getppid(), 2), (GONE, 0)]:
        monkeypatch.setattr(sys, 'stdin', io.StringIO(2*line))
        forks.clear()
        bicl.runner.serve(runner)
        assert len(forks) == n


def forks(end, parent):
    "A process that forks a kernel, of a kind, and tells its number."
    parent = parent or os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN) # as `serve` does: the dead vanish
    if not (pid := os.fork()):
        os.setsid = lambda: time.sleep(99) # what it does next
        bicl.runner._become_kernel(parent, [], {}, '', '')
    end.send(pid)
    time.sleep(99)


@pytest.mark.parametrize('parent', [0, GONE], ids=['late', 'early'])
def test_a_kernel_ends_with_the_process_that_has_forked_it(parent):
    "At once, however late or early that comes."
    how = multiprocessing.get_context('fork')
    here, there = how.Pipe()
    server = how.Process(target=forks, args=(there, parent))
    server.start()
    kernel = psutil.Process(here.recv())
    if not parent:
        time.sleep(.5)
        assert chaos.alive(kernel)
        server.kill()
        server.join()
    assert not chaos.gone([kernel], 20)
    server.kill()
    server.join()


def test_time_limit(kernels, tmp_path):
    "A run that hangs is ended, and goes on from its checkpoint when it gets more time."
    job = replace(JOB, settings=dict(sleep=90.))
    got = execute(job, tmp_path, None, partial(kernels.manager, {}), 8)
    assert got.status == 'failed' and 'time limit of 8 s' in got.note and got.seconds < 60, got
    assert tell(job, tmp_path, got) == (job, got)
    said = what_happened(job, tmp_path)
    assert said['state'] == 'failed' and 'time limit' in said['reason'] and said['command']


def test_the_last_words_of_a_kernel_are_kept(kernels, tmp_path):
    job = replace(JOB, settings=dict(die=str(tmp_path/'marks')))
    got = execute(job, tmp_path, None, partial(kernels.manager, {}))
    assert (got.status, got.note) == ('died', 'the kernel died: fatal: the toy dies on purpose')
    tell(job, tmp_path, got)
    text = scratch(job, tmp_path, '.txt').read_text()
    assert 'reason: the kernel died' in text and text.endswith('fatal: the toy dies on purpose\n')
    assert execute(job, tmp_path, None, partial(kernels.manager, {})).status == 'ran' # it dies once
    assert what_happened(job, tmp_path)['state'] == 'finished' and not list((tmp_path/'checkpoints').iterdir())


def test_a_kernel_that_the_system_has_killed(tmp_path, monkeypatch):
    "Its log is empty; that memory ran out is known from the system's own count."
    count = iter([3, 4])
    monkeypatch.setattr(bicl.runner, 'oom_kills', lambda: next(count))
    class DeadKernelError(RuntimeError): pass
    def dies(*a): raise DeadKernelError('Kernel died')
    monkeypatch.setattr(bicl.runner, '_papermill', dies)
    got = execute(JOB, tmp_path)
    assert got.status == 'died' and 'memory ran out' in got.note and '--jobs 1' in got.note


def test_where_a_run_stands(tmp_path):
    assert what_happened(JOB, tmp_path)['state'] == 'waiting'
    with claim(scratch(JOB, tmp_path, '.lock')):
        scratch(JOB, tmp_path, '.json').write_text('{"done": 3, "total": 12}')
        said = what_happened(JOB, tmp_path)
        assert (said['state'], said['done']) == ('running', .25)
    assert what_happened(JOB, tmp_path)['state'] == 'interrupted'
    tell(JOB, tmp_path, Outcome('failed', 1., 'ValueError: a: b'))
    assert what_happened(JOB, tmp_path)['reason'] == 'ValueError: a: b'
    chaos.write_quiet(JOB, tmp_path)
    assert what_happened(JOB, tmp_path)['state'] == 'finished'


def test_a_line_when_nothing_moves(tmp_path, monkeypatch, capsys):
    "Here, and while another runner has what is left."
    monkeypatch.setattr(Board, 'patience', .05)
    other = replace(JOB, seeds=(101,))
    board = Board('toys', {j.name: j for j in (JOB, other)}, tmp_path, 1)
    board({}, [JOB], [other])
    assert 'moved' not in capsys.readouterr().err
    time.sleep(.1)
    board({}, [JOB], [other])
    said = capsys.readouterr().err
    assert 'nothing has moved' in said and 'another runner: Plain toy' in said and '--timeout' in said
    scratch(JOB, tmp_path, '.json').parent.mkdir()
    scratch(JOB, tmp_path, '.json').write_text('{"done": 3, "total": 12}')
    time.sleep(.1)
    board({}, [JOB], [other])
    assert 'moved' not in capsys.readouterr().err


def test_dask_loses_its_scheduler(tmp_path):
    pytest.importorskip('distributed', reason="needs the extra: pip install 'bicl[dask]'")
    r = chaos.Round('dask', tmp_path/'g.yaml', None, None, tmp_path)
    scheduler = chaos.cluster(r, address := f'tcp://127.0.0.1:{chaos.port()}', 'scheduler')
    (tmp_path/'out'/'checkpoints').mkdir(parents=True)
    def connect():
        nonlocal engine
        try: engine = Dask(tmp_path/'out', address)
        except ValueError: return False # not yet
        return True
    engine = None
    chaos.until(connect, 60)
    try:
        engine.submit(JOB)
        assert not engine.poll(.2)
        scheduler.kill()
        scheduler.wait()
        while not (got := engine.poll(60)): pass
        (job, outcome), = got
        assert job is JOB and outcome.status == 'failed'
        assert f'the scheduler at {address} is gone' in outcome.note and 'same command' in outcome.note
    finally: engine.close()
    assert what_happened(JOB, tmp_path/'out')['state'] == 'failed'


def test_connection_files_stay_in_their_folder():
    "Where a path is too long for a socket, too: what a killed runner leaves must be found and swept."
    for folder in ('/tmp/a', f'/tmp/{"a"*90}'):
        where = bicl.core.sockets(folder)['config'].KernelManager
        assert where.connection_file == f'{folder}/k.json' and ('transport' in where) == (len(folder) < 80)
