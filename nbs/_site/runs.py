"""Where numbers come from: a page for every run, and all runs as the explorer's data.

A run's page is made from its executed notebook and its rows with a plain template. The search knows
nothing of these pages, and Sphinx neither: there are more than a thousand, so each is light and made once.
"""
import base64, gzip, json, re, subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from pathlib import Path
from shlex import quote

import numpy as np, pandas as pd
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from pyarrow.parquet import ParquetFile
from scipy.special import stdtrit

from bicl.core import relink
from bicl.jobs import grids, load_grid
from bicl.learner import METHODS
from bicl.metrics import HIGHER, METRICS, likelihoods, metrics, paper_table, summary
from bicl.tables import in_order, label, number, variants

SITE = Path(__file__).resolve().parent
ROOT = SITE.parent.parent
REPOSITORY = 'https://github.com/bicl/bicl'

# --------------------------------------------------------------------------------------- runs

OWN = 'seed', 'task_trained', 'task_tested', 'value', 'metric' # what the rows of a run differ in
WORDS = 'benchmark', 'method', 'protocol', 'stamp', 'version', 'settings', 'device', 'asked' # what they repeat

@dataclass
class Run:
    "A finished run: where it is, and its rows."
    grid:str
    path:Path # of its executed notebook
    about:dict # what all its rows say
    columns:dict # what they differ in, as arrays: a run has hundreds of rows, and pandas takes its time
    varied:str='' # what tells it from other runs of its cell

    @property
    def page(self)->str: return self.path.relative_to(ROOT).with_suffix('.html').as_posix()
    @cached_property
    def metrics(self)->set: return set(self.columns['metric'])
    @cached_property
    def of(self)->str: return next((m for m in ('accuracy', 'test-LL') if m in self.metrics), '')
    @cached_property
    def matrices(self)->tuple: # seeds [R], and what was measured after each task on each task [R, T+1, T]
        here = self.columns['metric'] == self.of
        seed, after, on, value = (self.columns[k][here] for k in OWN if k != 'metric')
        seeds, T = np.unique(seed), int(on.max())
        a = np.full((len(seeds), T + 1, T), np.nan)
        a[np.searchsorted(seeds, seed), after.astype(int), on.astype(int) - 1] = value
        return seeds, a
    @cached_property
    def numbers(self)->pd.DataFrame:
        frames = list(measured(self))
        return (pd.concat(frames, axis=1) if len(frames) > 1 else frames[0]).dropna(axis=1, how='all')
    @cached_property
    def stats(self)->dict:
        n, seeds = np.ascontiguousarray(self.numbers.to_numpy(float).T), len(self.numbers)
        if seeds < 2 or np.isnan(n).any(): return {m: summary(self.numbers[m].dropna()) for m in self.numbers}
        every = zip(self.numbers, n.mean(-1), n.std(-1, ddof=1), *intervals(n).T)
        return {m: dict(mean=x, std=s, ci_low=low, ci_high=high, n_seeds=seeds) for m, x, s, low, high in every}

def read_run(grid, path):
    "A run from its files. One row has the words; there are hundreds of runs with hundreds of rows."
    names = 'metric', *WORDS
    with ParquetFile(path.with_suffix('.parquet'), read_dictionary=names) as file: table = file.read(use_threads=False)
    about = {k: table[k][0].as_py() for k in table.column_names if k not in OWN}
    return Run(grid, path, about, {k: np.asarray(table[k]) for k in OWN})

LOST = dict(BTI='lost (LA − RA)', early='change of tasks 1, 2', first='change of tasks 1, 2 (the worse)',
            worst='change of the worst task') # what the page of the generative study shows beside means

def measured(run):
    "Frames with a line per seed, a column per metric: those of accuracies, and means of whatever else was measured."
    if run.of == 'accuracy': yield pd.DataFrame(metrics(run.matrices[1]), run.matrices[0])
    if run.metrics == {'accuracy'}: return
    rows = pd.DataFrame(run.columns)
    for name, part in rows[rows.metric != 'accuracy'].groupby('metric'):
        last, own = part.task_trained.max(), part.task_trained == part.task_tested
        some = {'': part, ', right after learning': part[own], ', after the last task': part[part.task_trained == last]}
        yield from (p.groupby('seed').value.mean().rename(name + words) for words, p in some.items() if len(p))
    if run.of == 'test-LL':
        yield likelihoods(rows)[list(LOST)].rename(columns={k: f'test-LL, {words}' for k, words in LOST.items()})

def all_runs():
    "Every run whose rows and notebook are there, grid by grid."
    found = []
    for folder in sorted((ROOT/'reports').glob('*/runs')):
        runs = [read_run(folder.parent.name, p) for p in sorted(folder.glob('*.ipynb')) if p.with_suffix('.parquet').exists()]
        words = variants(pd.DataFrame([r.about for r in runs])) if runs else {}
        for r in runs: r.varied = words[r.about['stamp']]
        found += runs
    return found

@cache
def commits():
    "Path below the project → the commit that last changed it; nothing outside of a checkout."
    done = subprocess.run(['git', 'log', '--format=commit %h', '--name-only', '--', 'reports/*.parquet'],
                          cwd=ROOT, capture_output=True, text=True)
    found, commit = {}, ''
    for line in done.stdout.splitlines():
        if line.startswith('commit '): commit = line.split()[1]
        elif line: found.setdefault(line, commit)
    return found

@cache
def grid_of(name): return load_grid(name) if name in grids() else None

def as_text(*words): return json.dumps(words, sort_keys=True)

@cache
def asked(grid):
    "What is asked, as it is worded → how the grid calls it."
    return {as_text(j.ask()): f'{j.label} {j.protocol}' for j in grid_of(grid).jobs}

@cache
def resolved(grid):
    "The same with every setting, however it is worded."
    same = lambda j: (j.benchmark, j.method, j.memory, j.protocol, j.tuning, sorted(j.seeds), j.notebook, j.full_settings())
    return {as_text(*same(j)): f'{j.label} {j.protocol}' for j in grid_of(grid).jobs}

def command(run):
    "What to type to have this run once more, in a folder beside the first; nothing if its grid does not ask for it."
    if not grid_of(run.grid): return ''
    a, words = run.about, json.loads(run.about['asked'])
    same = [a[k] for k in ('benchmark', 'method', 'memory', 'protocol', 'tuning')]
    only = asked(run.grid).get(as_text(words)) or resolved(run.grid).get(
        as_text(*same, sorted(words['seeds']), words['notebook'], json.loads(a['settings'])))
    return f'bicl_run {run.grid} --only {quote(only)} --out again' if only else ''

# -------------------------------------------------------------------------------------- pages

def prose(text): return MarkdownIt('commonmark').enable('table').render(text)

@cache
def chapter(name): return next((p.name for p in (ROOT/'nbs').glob(f'[0-9]*_{name}.ipynb')), '')

def present(text):
    "Links to chapters, some of which had other numbers when a notebook was executed."
    def fix(m): return f'[{m[1]}](../{now})' if (now := chapter(m[2])) else m[1]
    return re.sub(r'\[([^]]+)\]\(\.\./[0-9]+[a-z]?_(\w+)\.ipynb[^)]*\)', fix, text)

@cache
def explained(text, here):
    "A cell of prose as HTML, with links that work from this folder."
    html = prose(relink(present(text), 'nbs/experiments', here))
    return re.sub(r'(href="[^":]+)\.ipynb', r'\1.html', html)

def output(out, alt):
    "An output of a cell as HTML: picture, table or text."
    data = {k: ''.join(v) for k, v in out.get('data', {}).items() if isinstance(v, (str, list))}
    if 'image/png' in data:
        return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data["image/png"].strip()}">'
    if 'text/html' in data:
        table = re.sub(r'<style.*?</style>', '', data['text/html'], flags=re.S)
        return f'<div class="table-wrapper">{table}</div>'
    text = data.get('text/plain') or ''.join(out.get('text', ''))
    return f'<pre>{escape(text)}</pre>' if text.strip() else ''

def cells(run):
    "The cells of the executed notebook: (prose, code, outputs); its own title is left out."
    here, about = Path(run.page).parent, ''
    for c in json.loads(run.path.read_text(encoding='utf-8'))['cells']:
        text = ''.join(c['source'])
        if c['cell_type'] == 'markdown':
            text = re.sub(r'\A# .*\n', '', text)
            about = (re.findall(r'^#+ (.*)$', text, re.M) or [about])[-1]
            yield explained(text, here), '', []
        elif text.strip():
            alt = f'{about}: {title(run)}' if about else title(run)
            yield '', text, [html for o in c['outputs'] if (html := output(o, alt))]

def title(run):
    "Method, memory, benchmark."
    a = run.about
    memory = f', memory {a["memory"]:,}' if pd.notna(a['memory']) else ''
    return f'{label(a["method"])}{memory}, {label(a["benchmark"])}'

def span(seconds): return '—' if pd.isna(seconds) else f'{seconds:,.1f} s'

def facts(run):
    "What there is to say about a run: (what, text)."
    a, parquet = run.about, run.path.with_suffix('.parquet').relative_to(ROOT).as_posix()
    yield 'Protocol', a['protocol'] + (', tuning: tested on training images that were set aside' if a['tuning'] else '')
    if run.varied: yield 'Varied', run.varied
    yield 'Seeds', ', '.join(map(str, np.unique(run.columns['seed'])))
    yield 'Identity', a['stamp']
    yield 'Version of the method', a['version']
    yield 'Device', a['device']
    yield 'Time by the clock', f'{span(a["seconds"])}, of which {span(a["train_seconds"])} training'
    yield 'Processor time', span(a['cpu_seconds'])
    if parquet in commits(): yield 'Recorded in commit', commits()[parquet]

def write_pages(runs, site):
    "One page per run below `site`."
    template = Environment(loader=FileSystemLoader(SITE), autoescape=True).get_template('run.html')
    for run in runs:
        path = site/run.page
        path.parent.mkdir(parents=True, exist_ok=True)
        n = run.numbers
        rows = [(m, run.stats[m], [number(v) for v in n[m]]) for m in n]
        path.write_text(template.render(run=run, title=title(run), seeds=list(n.index), rows=rows, number=number,
            facts=list(facts(run)), settings=sorted(json.loads(run.about['settings']).items()),
            command=command(run), cells=list(cells(run)), repository=REPOSITORY,
            experiment=json.loads(run.about['asked'])['notebook'],
            notebook=run.path.relative_to(ROOT).as_posix(), up='../'*run.page.count('/')), encoding='utf-8')

# ----------------------------------------------------------------------------------- explorer

def short(x):
    "Numbers as JSON can have them: two digits, and nothing where there is none."
    if isinstance(x, (list, tuple, np.ndarray)): return [short(v) for v in x]
    return None if x != x else round(float(x), 2)

def intervals(a):
    "Student's 95 % intervals of the means over the last axis: `interval` for many at once."
    n = a.shape[-1]
    if n < 2: return np.full((*a.shape[:-1], 2), np.nan)
    half = stdtrit(n - 1, .975)*a.std(-1, ddof=1)/np.sqrt(n)
    return np.stack([a.mean(-1) - half, a.mean(-1) + half], -1)

def matrix(run):
    "The mean over seeds after each task (row) on each task (column): what was measured, its bounds and values."
    if not run.of: return None
    a = run.matrices[1]
    bounds = (0, 100) if run.of == 'accuracy' else (float(np.floor(np.nanmin(a))), float(np.ceil(np.nanmax(a))))
    found = dict(of=run.of, low=bounds[0], high=bounds[1], a=short(a.mean(0)))
    if run.of == 'accuracy': # intervals of two curves: mean of the tasks seen, and the first task
        seen = np.stack([a[:, j, :j].mean(1) for j in range(1, a.shape[1])])
        found['band'] = dict(seen=short(intervals(seen)), first=short(intervals(a[:, 1:, 0].T)))
    return found

def entry(run, paper):
    "A run as the explorer knows it."
    a, n = run.about, run.numbers
    memory = None if pd.isna(a['memory']) else int(a['memory'])
    same = not a['tuning'] and 'stream.' not in a['settings'] # the paper's stream, tested as there
    theirs = {m: paper[key] for m in n if same and (key := (a['benchmark'], a['method'], memory, m)) in paper}
    return dict(grid=run.grid, benchmark=a['benchmark'], method=a['method'], memory=memory, protocol=a['protocol'],
        varied=run.varied, stamp=a['stamp'], page=run.page, seeds=[int(s) for s in n.index],
        values={m: short([s['mean'], s['ci_low'], s['ci_high'], *n[m]]) for m, s in run.stats.items()},
        paper=theirs, matrix=matrix(run))

def write_data(runs, path):
    "All runs, compressed, as a script: a page that is opened from the disk may load one, but no data."
    paper = {(r.benchmark, r.method, None if pd.isna(r.memory) else int(r.memory), r.metric): r.mean
             for r in paper_table().itertuples()}
    found = [entry(r, paper) for r in runs]
    names = {k: in_order({e[k] for e in found}) for k in ('method', 'benchmark')}
    first = {label(m): m for m in reversed(names['method'])} # of two with one label the second has its name
    look = lambda m: dict(label=label(m) if first[label(m)] == m else m, color=getattr(METHODS.get(m), 'color', '#777777'))
    metrics = list(dict.fromkeys([*METRICS, *(m for e in found for m in e['values'])]))
    titles = {g: grid_of(g).title for g in dict.fromkeys(e['grid'] for e in found) if grid_of(g)}
    data = dict(methods={m: look(m) for m in names['method']}, benchmarks={b: label(b) for b in names['benchmark']},
                grids=titles, metrics={m: HIGHER.get(m, True) for m in metrics}, runs=found)
    text = gzip.compress(json.dumps(data, separators=(',', ':')).encode(), mtime=0)
    path.write_text(f'const RESULTS = "{base64.b64encode(text).decode()}"; // JSON, gzip, base 64\n', encoding='utf-8')
