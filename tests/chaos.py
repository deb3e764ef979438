"""Kills, full disks, stopped processes: does a grid lose, double or leave anything?

    python tests/chaos.py --kills 200 --minutes 25       # `make chaos`; a part of it is in test_chaos.py

Eight methods on a tiny stream are run in rounds. In each round something is done to them again and again: to the
runner, to the process that forks kernels, to a kernel, to workers and scheduler of dask, to all at once; at random
moments, or at those that hurt most. Then they may end in peace, and everything is compared with a run that nobody
has disturbed. What was found is in reports/chaos.csv, and on the page `faults`.

A grid that names this module under `plugins` arms its processes: with CHAOS_AIM in the environment the first one
that comes to the moment of that name kills itself.
"""
import argparse
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import pandas as pd
import psutil

import bicl.runner
from bicl.core import atomic
from bicl.jobs import ResultError, finish, finished, load_grid, read_result, result_path, result_rows
from bicl.learner import fit
from bicl.tables import collect, write_tables

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GRID = '''
title: Chaos
plugins: [toys, chaos]
seeds: [100, 101]
benchmark: toy
device: cpu
runs:
- {method: [Online, Independent, Joint, EWC]}
- {method: [ER, MER, GEM, BiCL], memory: 12}
'''
RUN = 'import sys\nfrom bicl.commands import bicl_run\nsys.exit(bicl_run())\n'
REPORT = 'import sys\nfrom bicl.commands import bicl_report\nsys.exit(bicl_report())\n'


# ---- aimed at the moments that hurt

def shoot(mark):
    "Kill this process, if nobody has left the mark yet."
    try: os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError: return
    os.kill(os.getpid(), signal.SIGKILL)


def arm(aim, mark):
    "Kill this process when it comes to the moment: rows, or the ending of a file that is half written."
    if aim == 'rows': # they are written, the notebook is not
        keep = bicl.runner._keep
        bicl.runner._keep = lambda *a: (shoot(mark), keep(*a))
        return
    replace = os.replace
    def aimed(a, b, **kw):
        if str(b).endswith(aim): shoot(mark)
        return replace(a, b, **kw)
    os.replace = aimed


if 'CHAOS_AIM' in os.environ: arm(os.environ['CHAOS_AIM'], os.environ['CHAOS_MARK'])


# ---- processes: whatever we have started, and whatever that has started, carries our sign; nobody else is touched

SIGN = f'{os.getpid()}-{time.time_ns()}'


def environment(**more):
    path = os.pathsep.join([str(HERE), os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
    own = dict(PYTHONPATH=path, BICL_PLUGINS='toys', OMP_NUM_THREADS='1', MPLBACKEND='agg', CHAOS_SIGN=SIGN)
    return os.environ | own | more


def start(grid, out, *more, code=RUN, name='bicl_run', before=None, **env):
    "The command, in a process of its own (written out, so that it need not be installed)."
    script = Path(grid).with_name(f'{name}.py')
    if not script.exists(): script.write_text(code)
    def first():
        signal.signal(signal.SIGINT, signal.SIG_DFL) # a shell's background jobs ignore it
        if before: before()
    return subprocess.Popen([sys.executable, str(script), str(grid), '--out', str(out), *more], preexec_fn=first,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**env))


def wait(proc, seconds=900):
    "What a process has said when it has ended."
    try: return proc.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        proc.kill()
        raise AssertionError('the runner does not end:\n' + proc.communicate()[0]) from None


def until(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(.05)


def ours(p, sign=SIGN):
    "Does this process carry our sign? The system remembers with which environment it was started."
    with suppress(psutil.Error): return p.environ().get('CHAOS_SIGN', '').startswith(sign)
    return False


def family(proc):
    "All processes that a runner has started, and theirs."
    if proc.poll() is not None: return [] # its number may be somebody else's by now
    with suppress(psutil.NoSuchProcess): return psutil.Process(proc.pid).children(recursive=True)
    return []


def alive(p):
    with suppress(psutil.NoSuchProcess): return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    return False


def gone(processes, seconds=90):
    "Those that are still there after a while."
    psutil.wait_procs(processes, timeout=seconds)
    return [p for p in processes if alive(p)]


def roles(proc):
    "The processes of a runner by what they do."
    if proc.poll() is not None: return {}
    servers, kernels, own = [], [], psutil.Process(proc.pid)
    with suppress(psutil.NoSuchProcess): servers = own.children()
    for s in servers:
        with suppress(psutil.NoSuchProcess): kernels += s.children()
    return dict(runner=[own], server=servers, kernel=kernels, everybody=[*kernels, *servers, own])


def signal_all(processes, how=signal.SIGKILL):
    "Only to those that are ours; and psutil sees to it that a number still means the same process."
    for p in processes:
        with suppress(psutil.NoSuchProcess): ours(p) and p.send_signal(how)


# ---- what must be there

def timeless(rows): return rows[[c for c in rows if 'seconds' not in c]]


def quiet(job):
    "The rows that an undisturbed run gives, without runner and notebook."
    learner, stream = job.make()
    return timeless(result_rows(job, fit(learner, stream, **job.loop(), progress=False)))


def write_quiet(job, out):
    "Rows and notebook of a run, as if the runner had done it."
    learner, stream = job.make()
    finish(job, fit(learner, stream, **job.loop(), progress=False), str(out))
    result_path(job, out).with_suffix('.ipynb').write_text('{"cells": []}')


def results(out): return sorted((Path(out)/'runs').glob('*.parquet'))


def done(out):
    "What is finished, with the time at which that was: rows that can be read, and their notebook."
    there = {}
    for p in results(out):
        with suppress(ResultError, OSError):
            read_result(p)
            if p.with_suffix('.ipynb').exists(): there[p.name] = p.stat().st_mtime_ns
    return there


def tables(grid, out):
    "The bytes of all tables that are made of the rows in a folder."
    with tempfile.TemporaryDirectory() as d:
        write_tables(collect(load_grid(grid), out), d, 'table')
        return {p.name: p.read_bytes() for p in Path(d).iterdir()}


@dataclass
class Tally:
    "What was done, and what it has cost."
    fault: str
    kills: int = 0
    runs: int = 0
    rows_lost: int = 0
    rows_doubled: int = 0
    notebooks_lost: int = 0
    orphans: int = 0
    litter: int = 0
    tables_differ: int = 0
    seconds: float = 0.

    def __add__(self, other):
        more = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[1:]}
        return Tally(self.fault, **more)

    bad = property(lambda self: sum(getattr(self, f.name) for f in fields(self)[3:-1]))


class Round:
    "A grid in a folder of its own, what is done to it, and the books that are kept."
    def __init__(self, fault, grid, dice, expected, here=None):
        self.tally, self.grid, self.dice, self.expected = Tally(fault), grid, dice, expected
        self.here = Path(here or tempfile.mkdtemp(prefix='c', dir=grid.parent))
        self.out, self.tmp = self.here/'out', self.here/'t'
        self.tmp.mkdir(exist_ok=True)
        self.sign = f'{SIGN}-{time.time_ns()}-' # of this round
        self.env = dict(TMPDIR=str(self.tmp), CHAOS_SIGN=self.sign)
        self.procs, self.finished, self.said, self.left = [], {}, [], []

    def start(self, n=1, *more, **how):
        "Start runners, and wait until they have something to be done to, or have ended."
        new = [start(self.grid, self.out, '--jobs', '2', *more, **self.env, **how) for _ in range(n)]
        self.procs += new
        return new

    def look(self):
        "Notice rows that were there and are not, or were made again."
        now = done(self.out)
        for name, when in self.finished.items():
            if name not in now: self.tally.rows_lost += 1
            elif now[name] != when: self.tally.rows_doubled += 1
        self.finished = now

    def hit(self, victims, how=signal.SIGKILL):
        "Do something to processes, and count it."
        self.look()
        if not (victims := [p for p in victims if alive(p)]): return False
        signal_all(victims, how)
        self.tally.kills += 1
        if how == signal.SIGSTOP:
            time.sleep(self.dice.uniform(.5, 3))
            signal_all(victims, signal.SIGCONT)
        self.look()
        return True

    def pick(self, role):
        "Processes that have this role just now, in one of the runners."
        there = [roles(p).get(role, []) for p in self.procs if p.poll() is None]
        there = [v for v in there if v]
        if not there: return []
        some = self.dice.choice(there)
        return some if role == 'everybody' else [self.dice.choice(some)]

    def bury(self, staying=()):
        "All runners have ended: whoever else is ours, but for these and theirs, follows soon, or is an orphan."
        stay = {p.pid for q in staying for p in (q, *family(q))}
        left = gone([p for p in psutil.process_iter() if ours(p, self.sign) and p.pid not in stay])
        self.tally.orphans += len(left)
        self.said.append(f'orphans: {left}' * bool(left))
        signal_all(left)

    @property
    def complete(self): return len(self.finished) == len(self.expected['jobs'])

    def end(self, *more, staying=(), **how):
        "What is still running may end, or is ended; then an undisturbed runner does the rest. The books are closed."
        for p in self.procs: self.said.append(wait(p))
        self.look()
        self.bury(staying)
        last, = self.start(1, *more, **how)
        self.said.append(wait(last))
        self.look()
        assert last.returncode == 0, self.said[-1]
        self.bury(staying)
        self.close_books()
        return self.tally

    def close_books(self):
        t, jobs = self.tally, self.expected['jobs']
        t.runs += len(jobs)
        rows = []
        for j in jobs:
            path = result_path(j, self.out)
            if not path.with_suffix('.ipynb').exists() or not finished(j, self.out): t.notebooks_lost += 1
            try: rows.append(read_result(path))
            except ResultError: t.rows_lost += 1
        key = ['benchmark', 'method', 'memory', 'seed', 'task_trained', 'task_tested', 'metric']
        every = pd.concat([read_result(p) for p in results(self.out)])
        t.rows_doubled += int(every.duplicated(key).sum()) + len(results(self.out)) - len(jobs)
        left = [*(self.out/'checkpoints').iterdir(), *self.out.rglob('.*.tmp'), *self.tmp.iterdir()]
        t.litter += len(left)
        self.left = [p.name for p in left]
        t.tables_differ += tables(self.grid, self.out) != self.expected['tables']
        t.tables_differ += any(not timeless(r).equals(e) for r, e in zip(rows, self.expected['rows']))


def expect(grid, folder):
    "What an undisturbed run of the grid gives; without runner and kernels."
    jobs, out = load_grid(grid).jobs, Path(folder)/'quiet'
    for j in jobs: write_quiet(j, out)
    rows = [timeless(read_result(result_path(j, out))) for j in jobs]
    return dict(jobs=jobs, rows=rows, tables=tables(grid, out))


# ---- what is done to them

ROLES = (*['kernel']*5, 'server', 'server', 'runner', 'everybody') # a kernel is there again at once, a runner is not


def storm(r, hits, runners=1, what=ROLES, how=(signal.SIGKILL,)):
    "Random moments: one process after the other, and the next runner when all have ended."
    count = 0
    while count < hits and not r.complete:
        if all(p.poll() is not None for p in r.procs): r.start(runners)
        role = r.dice.choice(what)
        time.sleep(r.dice.uniform(0, 8 if role in ('runner', 'everybody') else 1.2))
        with suppress(AssertionError):
            until(lambda role=role: r.pick(role) or all(p.poll() is not None for p in r.procs), 30)
        count += r.hit(r.pick(role), r.dice.choice(how))
        r.look()
    return r.end()


def aimed(r, **aims):
    "The worst moments, each once, in whoever comes to them; a method for each, so that there is something to do."
    for method, aim in aims.items():
        mark = r.here/f'mark-{method}'
        proc, = r.start(1, '--only', method, CHAOS_AIM=aim, CHAOS_MARK=str(mark))
        until(lambda proc=proc: r.look() or proc.poll() is not None, 900)
        assert mark.exists(), wait(proc)
        r.tally.kills += 1
    return r.end()


@contextmanager
def small_disk(folder, size):
    "A file system of this size, where we may make one."
    folder.mkdir(parents=True, exist_ok=True)
    made = not subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'chaos', str(folder)],
                              capture_output=True).returncode if shutil.which('mount') else False
    try: yield made
    finally:
        if made: subprocess.run(['umount', '-l', str(folder)], check=True)


def limited(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def full_disk(r, stages=(0, 4, 40, 120, 400)): # kilobytes that are left
    "No room at different stages: for the folder, the checkpoint, the rows, the notebook."
    with small_disk(r.out, '8m') as real:
        assert not real or os.path.ismount(r.out)
        ballast = r.out/'ballast'
        for kb in stages:
            if real: # fill it, but for so much
                with suppress(OSError), open(ballast, 'wb', buffering=0) as f:
                    while True: f.write(bytes(4096))
                with suppress(OSError): os.truncate(ballast, max(0, ballast.stat().st_size - 1024*kb))
            proc, = r.start(1, **{} if real else dict(before=partial(limited, 1024*kb)))
            said = wait(proc)
            r.said.append(said)
            r.tally.kills += 1
            r.look()
            told = 'disk is full' in said or 'No space left' in said or 'File too large' in said
            assert proc.returncode == 0 or told, said # whoever fails says why
            ballast.unlink(missing_ok=True)
        return r.end()


def port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def cluster(r, address, what):
    "A scheduler, or a worker, of dask."
    name = dict(scheduler=['dask_scheduler', '--host', address[6:].split(':')[0], '--port', address.split(':')[-1],
                           '--no-dashboard', '--no-show'],
                worker=['dask_worker', address, '--nthreads', '1', '--no-nanny', '--no-dashboard', '--death-timeout', '20'])[what]
    return subprocess.Popen([sys.executable, '-m', f'distributed.cli.{name[0]}', *name[1:]], text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=environment(**r.env, DASK_TEMPORARY_DIRECTORY=str(r.here/'dask'))) # what a killed one leaves there is dask's


def dask(r, hits, what=('worker', 'worker', 'scheduler')):
    "A worker or the scheduler of dask is killed, and started again; so is the runner, if it has given up."
    address = f'tcp://127.0.0.1:{port()}'
    own = dict(scheduler=cluster(r, address, 'scheduler'))
    workers = [cluster(r, address, 'worker') for _ in range(2)]
    how = '--engine', 'dask', '--scheduler', address
    try:
        for _ in range(hits):
            if all(p.poll() is not None for p in r.procs): r.start(1, *how)
            role = r.dice.choice(what)
            time.sleep(r.dice.uniform(4, 12))
            victim = own['scheduler'] if role == 'scheduler' else r.dice.choice(workers)
            r.tally.kills += victim.poll() is None
            victim.kill()
            victim.wait()
            r.look()
            if role == 'scheduler':
                for p in r.procs: r.said.append(wait(p)) # it says that the scheduler is gone
                for w in workers: # they end by themselves, unless a run keeps them
                    with suppress(subprocess.TimeoutExpired): w.wait(30)
                    w.kill()
                    w.wait()
                own['scheduler'] = cluster(r, address, 'scheduler')
            workers = [cluster(r, address, 'worker') if w.poll() is not None else w for w in workers]
        for p in r.procs: r.said.append(wait(p))
        r.procs.clear()
        r.end(*how, staying=[*workers, own['scheduler']])
    finally:
        for p in [*workers, own['scheduler']]:
            p.kill()
            p.wait()
    r.bury()
    return r.tally


def report(r, hits):
    "The report is killed while it is made: its files are all old, or all new."
    names, more = ('table.csv', 'table.tex', 'table.md', 'index.md'), dict(code=REPORT, name='bicl_report')
    for j in r.expected['jobs']: write_quiet(j, r.out)
    (r.out/'checkpoints').mkdir(exist_ok=True)
    old = {n: f'old {n}'.encode() for n in names}
    for n, b in old.items(): (r.out/n).write_bytes(b)
    for i in range(hits):
        aim = dict(CHAOS_AIM=r.dice.choice(['.tex', '.md', '.svg']), CHAOS_MARK=str(r.here/f'mark{i}')) if i % 2 else {}
        proc = start(r.grid, r.out, **r.env, **more, **aim)
        r.procs.append(proc)
        time.sleep(0 if aim else r.dice.uniform(2, 15))
        if aim: until(lambda proc=proc: r.look() or proc.poll() is not None, 900)
        r.look()
        r.tally.kills += proc.poll() is None or bool(aim)
        signal_all([*family(proc), *roles(proc).get('runner', [])])
        wait(proc)
        there = {n: (r.out/n).read_bytes() for n in names}
        new = [n for n in names if there[n] != old[n]]
        r.tally.tables_differ += len(new) not in (0, len(names))
        if new: old = there
    last = start(r.grid, r.out, **r.env, **more)
    said = wait(last)
    assert last.returncode == 0, said
    made = {n: (r.out/n).read_bytes() for n in r.expected['tables']}
    r.tally.tables_differ += made != r.expected['tables']
    r.bury()
    r.close_books()
    return r.tally


STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
PLAN = { # what is done in a round: (how many hits, function of a round)
    'random moments, one runner': lambda r: storm(r, 20),
    'aimed: rows without a notebook, half a file': lambda r: aimed(r, Online='rows', ER='.parquet', MER='.safetensors', BiCL='.ipynb', GEM='.safetensors'),
    'random moments, two runners': lambda r: storm(r, 20, 2),
    'SIGINT, SIGTERM, SIGHUP': lambda r: storm(r, 5, 1, ('runner',), STOPS),
    'stopped for some seconds': lambda r: storm(r, 8, 1, ('kernel', 'server', 'runner'), (signal.SIGSTOP,)),
    'random moments, three runners': lambda r: storm(r, 20, 3),
    'full disk': full_disk,
    'dask: worker, scheduler': lambda r: dask(r, 5),
    'report': lambda r: report(r, 4)}


def save(tallies, path):
    with atomic(path) as f:
        pd.DataFrame([asdict(t) for t in tallies]).to_csv(f, index=False, float_format='%.0f', lineterminator='\n')


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--kills', type=int, default=200, help='stop after so many')
    p.add_argument('--minutes', type=float, default=25, help='begin no round after so many')
    p.add_argument('--seed', type=int, default=time.time_ns() % 10**6, help='of the dice')
    p.add_argument('--only', default='', help='only what contains this word')
    p.add_argument('--table', default=str(ROOT/'reports'/'chaos.csv'), help='where to write')
    p.add_argument('--more', action='store_true', help='add to what is in the table')
    a = p.parse_args()
    dice, began = random.Random(a.seed), time.monotonic()
    before = pd.read_csv(a.table).set_index('fault', drop=False).to_dict('index') if a.more and Path(a.table).exists() else {}
    tallies = {name: Tally(**before.get(name, dict(fault=name))) for name in PLAN}
    print(f'seed {a.seed}', flush=True)
    with tempfile.TemporaryDirectory(prefix='chaos') as d:
        (grid := Path(d)/'chaos_grid.yaml').write_text(GRID)
        sys.path.insert(0, str(HERE))
        expected = expect(grid, d)
        while True:
            for name in (n for n in tallies if a.only in n):
                t, r = time.monotonic(), Round(name, grid, dice, expected)
                tally = PLAN[name](r)
                tally.seconds = time.monotonic() - t
                tallies[name] += tally
                print(f'{time.monotonic() - began:6.0f} s  {name}: {tally}', *r.left, flush=True)
                save(tallies.values(), a.table)
                if tally.bad: print(*r.said, sep='\n---\n')
                elif not tally.bad: shutil.rmtree(r.here, ignore_errors=True)
                total = sum(tallies.values(), Tally('in all'))
                if total.kills >= a.kills or time.monotonic() - began > 60*a.minutes: break
            else: continue
            break
    print(pd.DataFrame([asdict(t) for t in [*tallies.values(), total]]).to_string(index=False, float_format='%.0f'))
    return int(total.bad > 0)


if __name__ == '__main__': sys.exit(main())
