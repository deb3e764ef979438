"""Results of version 0.1.0 in the form of version 0.2.0, recorded in reports/migration.md.

    python nbs/experiments/migrate_010.py           say what would be done (some minutes)
    python nbs/experiments/migrate_010.py --do      do it

In 0.1.0 a run's stamp contained a fingerprint of the code, in 0.2.0 it contains the method's version and a
fingerprint of the data. A result is *carried over*, with a new stamp, if all of this holds:

1. its method is one whose golden runs (tests/golden.json: double precision, to 1e-5) give what 0.1.0 gave, and
   whose numbers did not depend on whether a cache of compiled code was warm (audit, row B1);
2. every setting that it was made with is what the job resolves to now;
3. the streams of both versions show the same samples, bit for bit;
4. the experiment's code measures the same: small runs of both versions give the same rows, to 1e-5.

All others *wait* for a new run. They are kept, as results of version 0, so that tables can show them as older.
Old results are taken from the repository's history, and what an earlier migration wrote (it is known by its
missing `cpu_seconds`) is removed first. So this can be repeated at any time; results of new runs stay.
"""
import argparse, hashlib, json, os, shutil, subprocess, sys, tempfile
from collections import Counter
from pathlib import Path

import numpy as np, pandas as pd, pyarrow.parquet as pq

COMMIT = '7506e9a' # the last of 0.1.0
WAITING = dict.fromkeys(('Online', 'Independent', 'EWC', 'GEM', 'MER'),
                        'compiled: its numbers depended on the state of a cache')
NOTEBOOKS = dict(ablations='alignment') # renamed since
ROOT = Path(__file__).resolve().parent.parent.parent

# ---- what both versions are asked, each in a process of its own

SAMPLES = '''
import hashlib, json, sys, torch
from bicl.streams import make_stream
def put(h, a): h.update(f'{a.dtype}{tuple(a.shape)}'.encode() + a.contiguous().numpy().tobytes())
for name, seeds in json.loads(sys.argv[1]):
    s, h = make_stream(name, seeds), hashlib.sha256()
    for t in range(s.T):
        for a in s.train(t): put(h, a)
        for i, xy in enumerate(s.test(t, 500)):
            if i < 2: [put(h, a) for a in xy]
    pool = [(s.test_x, s.test_y)] if s.held is None else [(s.test_x[i], s.test_y[i]) for i in s.held]
    for a in (a for xy in pool for a in xy): put(h, a)
    print(h.hexdigest()[:16], flush=True)
'''
SMALL = '''
import json, os, re, sys
path, ask = sys.argv[1], json.loads(sys.argv[2])
os.environ['MPLBACKEND'] = 'agg'
space = {'__name__': 'run', 'display': print}
for c in json.load(open(path))['cells']:
    if c['cell_type'] != 'code': continue
    exec(''.join(c['source']), space)
    if 'parameters' in c['metadata'].get('tags', []): space.update(ask)
keys = ['metric', 'seed', 'task_trained', 'task_tested']
space['rows'].sort_values(keys)[keys + ['value']].to_parquet(sys.argv[3])
'''
TINY = {'stream.tasks': 2, 'stream.per_task': 60, 'stream.block': 30}
CASES = { # experiment in 0.1.0 → small questions
    'discriminative': [dict(method='BiCL', memory=40), dict(method='ER', memory=40),
                       dict(method='Joint', settings=TINY | dict(epochs=2))],
    'ablations': [dict(method='BiCL', memory=40), dict(method='ER', memory=40)],
    'generative': [dict(method=m, benchmark='mnist-classes', memory=40 if m.count('ER') + m.count('BiCL') else None,
                        settings=TINY | {'stream.test': 'seen'} | dict(epochs=2, hidden=20, samples=5))
                   for m in ('VAE-BiCL', 'VAE-BiCL-reversed', 'VAE-ER', 'VAE-EWC', 'VAE-naive', 'VAE-Joint')]}

def old_package(folder):
    "Version 0.1.0 as it was committed, beside the data."
    git = subprocess.run(['git', 'archive', COMMIT, 'bicl', 'nbs/experiments', 'reports', 'settings.ini'], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(['tar', '-x', '-C', folder], input=git.stdout, check=True)
    (Path(folder)/'data').symlink_to(ROOT/'data')
    return Path(folder)

def asked(package, code, *args):
    "What a version answers."
    data = {} if os.environ.get('BICL_DATA') else dict(BICL_DATA=str(ROOT.parent/'shared'/'data'))
    if not Path(data.get('BICL_DATA', ROOT)).is_dir(): data = {}
    env = os.environ | data | dict(PYTHONPATH=str(package), OMP_NUM_THREADS='1')
    got = subprocess.run([sys.executable, '-c', code, *args], env=env, cwd=package, capture_output=True, text=True)
    if got.returncode: sys.exit(f'{package}: {got.stderr[-2000:]}')
    return got.stdout.split()

def same_streams(old, streams):
    "For each (benchmark, seeds): digests of what 0.1.0 and we show."
    a, b = (asked(p, SAMPLES, json.dumps([[n, s] for n, s in streams])) for p in (old, ROOT))
    return dict(zip(streams, zip(a, b)))

def same_measures(old):
    "For each experiment and small question: the largest difference between rows of 0.1.0 and ours."
    found = {}
    for name, cases in CASES.items():
        for case in cases:
            ask = dict(seeds=[100, 101], settings=TINY | {'stream.test': 'new'}, memory=None) | case
            frames = []
            for package, notebook in ((old, name), (ROOT, NOTEBOOKS.get(name, name))):
                with tempfile.NamedTemporaryFile(suffix='.parquet') as f:
                    asked(package, SMALL, str(package/'nbs'/'experiments'/f'{notebook}.ipynb'), json.dumps(ask), f.name)
                    frames.append(pd.read_parquet(f.name).reset_index(drop=True))
            x, y = frames
            alike = x.drop(columns='value').equals(y.drop(columns='value'))
            far = ((x.value - y.value).abs() / x.value.abs().clip(lower=1)).max() if alike else np.inf
            found[NOTEBOOKS.get(name, name), case['method']] = len(x), far
    return found

# ---- results

def read_old(path):
    "Rows of 0.1.0, checked against their checksum."
    table = pq.read_table(path, partitioning=None)
    rows = table.to_pandas()
    found = hashlib.sha256(rows.to_csv(index=False).encode()).hexdigest().encode()
    if found != table.schema.metadata[b'bicl']: sys.exit(f'{path} is damaged')
    return rows

def sweep():
    "Remove results of 0.1.0, and what was made of them before."
    for path in sorted((ROOT/'reports').glob('*/runs/*.parquet')):
        rows = pq.read_table(path, partitioning=None).to_pandas()
        if 'cpu_seconds' not in rows or rows.cpu_seconds.isna().all():
            for suffix in ('.parquet', '.ipynb', '.npz'): path.with_suffix(suffix).unlink(missing_ok=True)

def new_rows(rows, job, carried):
    "The same numbers in the new form."
    from bicl.jobs import COLUMNS, kind_of
    text = lambda d: json.dumps(d, sort_keys=True)
    rows = rows.assign(tuning=False, cpu_seconds=np.nan, asked=text(job.ask()), device=rows.device.map(kind_of), version='0')
    if carried: rows = rows.assign(stamp=job.stamp, version=job.version, settings=text(job.full_settings()))
    return rows.astype(dict(memory='Int64'))[COLUMNS]

def put(path, rows, job, carried):
    "Write rows, with the notebook and the pictures that belong to them; a new run's result is better."
    from bicl.jobs import current, finished, read_result, write_result
    out = ROOT/'reports'/path.parent.parent.name
    if finished(job, out): return
    new = out/'runs'/f'{job.head}{rows.stamp[0]}.parquet'
    for suffix in ('.ipynb', '.npz'):
        if path.with_suffix(suffix).exists(): shutil.copyfile(path.with_suffix(suffix), new.with_suffix(suffix))
    write_result(rows, new)
    assert read_result(new).equals(rows) and current(job, new) == carried == finished(job, out)

def plan(old):
    "All results of 0.1.0: path, rows, job, and why it waits, if it does."
    from bicl.jobs import Job
    for path in sorted((old/'reports').glob('*/runs/*.parquet')):
        rows = read_old(path)
        ask = json.loads(rows.asked[0])
        job = Job(**ask | dict(notebook=NOTEBOOKS.get(ask.get('notebook'), ask.get('notebook', Job.notebook))))
        job.check()
        why = WAITING.get(job.method, '')
        if not why and json.loads(rows.settings[0]) != job.full_settings(): why = 'its settings have changed'
        yield path, rows, job, why

def main(do):
    with tempfile.TemporaryDirectory() as d:
        old = old_package(d)
        todo = list(plan(old))
        streams = same_streams(old, sorted({(j.benchmark, j.seeds) for _, _, j, _ in todo}))
        measures = same_measures(old)
        if do: sweep()
        done, off = Counter(), {k for k, (_, far) in measures.items() if not far <= 1e-5}
        for path, rows, job, why in todo:
            a, b = streams[job.benchmark, job.seeds]
            if a != b: why = 'its stream shows other samples now'
            if (job.notebook, job.method) in off: why = 'the experiment measures something else now'
            if do: put(path, new_rows(rows, job, not why), job, not why)
            done[path.parent.parent.name, job.method, why or 'carried over'] += 1
    text = record(done, streams, measures)
    print(text)
    if do: (ROOT/'reports'/'migration.md').write_text(text, encoding='utf-8')

def record(done, streams, measures):
    "What was done, for people."
    line = lambda *cells: '| ' + ' | '.join(map(str, cells)) + ' |'
    head = lambda *cells: [line(*cells), line(*['---']*len(cells))]
    out = ['# Results of 0.1.0 in 0.2.0', '', f'Written by `nbs/experiments/migrate_010.py`, which says what is carried over and why (commit {COMMIT} is 0.1.0).',
           'What waits is kept as a result of version 0 until it has been run again.', '', '## Results', '',
           *head('grid', 'method', 'runs', 'what became of them'), *(line(g, m, n, w) for (g, m, w), n in sorted(done.items())), '',
           f'In all {sum(n for (_, _, w), n in done.items() if w == "carried over")} of {sum(done.values())} are carried over.', '',
           '## Streams', '', 'All training samples and labels in order of arrival, the test sets, and the first thousand test samples as each',
           'task shows them, as a digest: 0.1.0 and 0.2.0.', '', *head('benchmark', 'seeds', '0.1.0', '0.2.0', 'same'),
           *(line(b, f'{s[0]}–{s[-1]}', x, y, 'yes' if x == y else 'NO') for (b, s), (x, y) in sorted(streams.items())), '',
           '## Experiments', '', 'Small runs of each experiment by both versions: rows, and the largest difference between two of their values (relative, for', 'values above one).', '',
           *head('experiment', 'method', 'rows', 'difference'), *(line(e, m, n, f'{v:.1e}') for (e, m), (n, v) in sorted(measures.items()))]
    return '\n'.join(out) + '\n'

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--do', action='store_true', help='change the files')
    main(p.parse_args().do)
