"""Every claim on the front page and on the pages, recomputed from the rows by other code: NumPy, pandas and SciPy, nothing of the package's statistics."""
import csv
import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from test_pages import execute # noqa: F401, a fixture

from bicl.streams import BENCHMARKS
from bicl.tables import invented

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT/'reports'
KEY = ['benchmark', 'method', 'memory']
NAMES = {b.label: n for n, b in BENCHMARKS.items()}


def holm(p):
    "By its definition: the largest of the corrected values up to each."
    p = list(p)
    order = sorted(range(len(p)), key=lambda i: p[i])
    return [min(1, max((len(p) - k) * p[j] for k, j in enumerate(order[:order.index(i) + 1]))) for i in range(len(p))]


@pytest.fixture(scope='module')
def seeds():
    "RA and LA of every seed of table 1 and what stands beside it, from the accuracies in the parquet."
    rows = pd.read_parquet(REPORTS/'results.parquet')
    rows = rows[rows.grid.isin(['table1', 'outputs']) & (rows.metric == 'accuracy')].astype(dict(task_tested=int))
    rows['memory'] = rows.memory.fillna(0).astype(int)
    n = rows.groupby('stamp').seed.nunique()
    first = rows.drop_duplicates('stamp').assign(n=lambda f: f.stamp.map(n)).sort_values(['n', 'grid'], ascending=[False, False], kind='stable')
    rows = rows[rows.stamp.isin(first.drop_duplicates([*KEY, 'protocol']).stamp)].drop_duplicates([*KEY, 'protocol', 'seed', 'task_trained', 'task_tested'])
    T = rows.groupby('stamp').task_tested.transform('max')
    RA = rows[rows.task_trained == T].groupby([*KEY, 'protocol', 'seed']).value.mean()
    LA = rows[rows.task_trained == rows.task_tested].groupby([*KEY, 'protocol', 'seed']).value.mean()
    return pd.DataFrame(dict(RA=RA, LA=LA)).reset_index()


@pytest.fixture(scope='module')
def table():
    return pd.read_csv(REPORTS/'table1.csv').assign(memory=lambda t: t.memory.fillna(0).astype(int)).set_index([*KEY, 'metric'])


def by(seeds, method, benchmark, memory, metric='RA'):
    s = seeds[(seeds.method == method) & (seeds.benchmark == benchmark) & (seeds.memory == memory)]
    return s.set_index('seed')[metric]


def test_means_and_intervals_of_table1(seeds, table):
    "All cells: mean, standard deviation and Student's interval."
    cells = 0
    for (b, m, size), part in seeds.groupby(KEY):
        for metric in ('RA', 'LA'):
            r, x = table.loc[b, m, size, metric], part[metric].to_numpy()
            half = stats.t.ppf(.975, len(x) - 1) * x.std(ddof=1) / len(x)**.5
            assert np.allclose([r['mean'], r['std'], r.ci_low, r.ci_high], [x.mean(), x.std(ddof=1), x.mean() - half, x.mean() + half], atol=1e-4)
            assert r.n_seeds == len(x)
            cells += 1
    assert cells == table.index.get_level_values('metric').isin(['RA', 'LA']).sum() > 0


def verdict_on(i, folder=REPORTS):
    "What the page of claims says on one point: for the front page, and beyond."
    return ''.join(json.loads((folder/'verdict.json').read_text())[i])


def verdict(r):
    "The rule against the paper, once more: Welch's interval, a margin of one point, a cap of 2.5."
    a, b, d = r['std']**2 / r.n_seeds, r.paper_std**2 / 5, r['mean'] - r.paper_mean
    half = stats.t.ppf(.975, (a + b)**2 / (a**2 / (r.n_seeds - 1) + b**2 / 4)) * (a + b)**.5
    if abs(d) > half and abs(d) > 1: return 'better' if d > 0 else 'worse'
    return 'reproduced' if abs(d) + half <= 2.5 else 'undecided'


def test_verdicts_and_their_counts(table):
    t = table[table.paper_mean.notna() & table.index.isin(['RA', 'LA'], 'metric')]
    again = t.apply(verdict, axis=1)
    assert (again == t.verdict).all()
    said, n = verdict_on(0), again.value_counts()
    own = again[again.index.isin(['BiCL'], 'method') & again.index.isin(['RA'], 'metric')].value_counts()
    of = lambda c: [int(c.get(k, 0)) for k in ('reproduced', 'better', 'worse', 'undecided')]
    told = lambda c: ', '.join(f'{c[k]} {k}' for k in ('reproduced', 'better', 'worse', 'undecided') if k in c)
    assert f'In {sum(of(n)[:2])} of {len(t)} values of retained and learning accuracy (RA, LA).** All values: {told(n)}. BiCL\'s own {own.sum()} values of RA: {told(own)} (' in said
    assert said.split('([')[0] in (ROOT/'README.md').read_text()
    counted = re.findall(r'Of the (\d+) values of RA and LA that the paper prints: (.*?)\.', (REPORTS/'index.md').read_text())
    assert counted == [(str(len(t)), told(n))]


def marks(columns):
    "Marks of a column, from values by method: the best mean, and what paired tests and TOST say of the others."
    best = max(columns, key=lambda m: columns[m].mean())
    rest, p, same = [m for m in columns if m != best], [], []
    for m in rest:
        d = (columns[best] - columns[m]).dropna()
        se, k = d.std(ddof=1) / len(d)**.5, len(d) - 1
        p.append(2 * stats.t.sf(abs(d.mean()) / se, k))
        same.append(max(stats.t.sf((d.mean() + 1) / se, k), stats.t.cdf((d.mean() - 1) / se, k)))
    say = lambda p, same: '' if p < .05 else '‡' if same < .05 else '†'
    return {best: '**'} | dict(zip(rest, map(say, holm(p), holm(same))))


def shown(text):
    "The first Markdown table of a page: (method, memory) → entries by benchmark, without their links."
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', text)
    lines = [line.strip('| ').split(' | ') for line in text[text.index('| Method |'):].split('\n\n')[0].splitlines()]
    head = [NAMES.get(h.strip(), h.strip()) for h in lines[0]]
    return {(c[0].strip(), int(c[1].replace(',', '') or 0)): dict(zip(head, map(str.strip, c))) for c in lines[2:]}


@pytest.mark.parametrize('page', ['reports/index.md', 'README.md'])
def test_bold_and_marked(page, seeds, table):
    "In the table of a page the right cells are bold or marked, and the means are those of the rows."
    got, looked = shown((ROOT/page).read_text().replace('|  |', '| |').replace('| |', '| 0 |')), 0
    for (b, size), part in seeds[seeds.memory > 0].groupby(['benchmark', 'memory']):
        want = marks({m: by(seeds, m, b, size) for m in part.method.unique()})
        for m, mark in want.items():
            if (m, size) not in got: continue
            text, mean = got[m, size][b], table.loc[b, m, size, 'RA']['mean']
            digits = 2 if 'index' in page else 1
            said = re.match(r'(\*\*)?([\d.]+)(\*\*)?([†‡]?)( |$)', text)
            assert said and (said[1] or '') + said[4] == mark, (m, size, b, text, mark)
            assert len(said[2].split('.')[1]) == digits and abs(float(said[2]) - mean) <= .5*10**-digits + 1e-9, (m, size, b, text, mean)
            looked += 1
    assert looked >= 12


def duel(seeds, a, b):
    "Columns where `a` has more or less after Holm's correction, and in how many pairs of runs it is ahead."
    cols = [(k, by(seeds, a, *k) - by(seeds, b, *k)) for k in sorted(set(map(tuple, seeds[seeds.memory > 0][['benchmark', 'memory']].to_numpy())))]
    cols = [d.dropna() for _, d in cols if len(d.dropna()) > 1]
    p = holm([stats.ttest_1samp(d, 0).pvalue for d in cols])
    more, less = (sum(q < .05 and f(d.mean()) for q, d in zip(p, cols)) for f in (lambda m: m > 0, lambda m: m < 0))
    ahead, behind = (int(sum(f(d).sum() for d in cols)) for f in (lambda d: d > 0, lambda d: d < 0))
    mean = pd.concat(cols, axis=1).dropna().mean(axis=1)
    half = stats.t.ppf(.975, len(mean) - 1) * mean.std(ddof=1) / len(mean)**.5
    return more, less, len(cols), ahead, behind, mean.mean(), mean.mean() - half, mean.mean() + half


@pytest.mark.parametrize('i, a, b', [(1, 'BiCL', 'ER'), (4, 'BiCL++', 'DER++')])
def test_duels(i, a, b, seeds):
    said = verdict_on(i)
    more, less, n, ahead, behind, *mean = duel(seeds, a, b)
    assert f'Does {a} beat {b}, ' in said and f'It retains more in {more} of {n} columns and less in {less}; over' in said
    assert f'ahead in {ahead} of {ahead + behind} pairs' in said
    low = [f'{x:+.2f}'.replace('-', '−') for x in mean]
    assert f'over {n} cells {low[0]} points [{low[1]}, {low[2]}]' in said
    sure, clear = stats.binomtest(ahead, ahead + behind).pvalue < .05, mean[1] > 0 or mean[2] < 0
    up, down = ('Yes, over all', 'No, it is behind.') if sure else ('On average, but not in most pairs', 'No, on average it is behind.')
    assert ((up if mean[0] > 0 else down) if clear else 'Not shown.') in said


def elsewhere(a, b, *grids):
    "A duel in grids of their own, from the rows of every run, without the streams whose task is told; and what is said of all columns."
    rows = pd.concat([pd.read_parquet(p) for g in grids for p in sorted((REPORTS/g/'runs').glob('*.parquet'))])
    rows = rows[(rows.metric == 'accuracy') & ~rows.benchmark.str.endswith('-task')].assign(memory=lambda f: f.memory.fillna(0).astype(int))
    last = rows[rows.task_trained == rows.groupby('stamp').task_trained.transform('max')]
    more, less, n, ahead, behind, *mean = duel(last.groupby([*KEY, 'seed']).value.mean().rename('RA').reset_index(), a, b)
    low = [f'{x:+.2f}'.replace('-', '−') for x in mean]
    return more, less, n, f'over {n} cells {low[0]} points [{low[1]}, {low[2]}] on average, ahead in {ahead} of {ahead + behind} pairs'


@pytest.mark.parametrize('a, b, page, grids', [('BiCL++', 'DER++', 'classes.md', ('split', 'cifar10')), ('BiCL', 'ER', 'classes.md', ('split', 'cifar10')),
                                               ('BiCL++', 'DER++', 'outputs.md', ('one',)), ('BiCL++', 'ER', 'outputs.md', ('one',))])
def test_duels_elsewhere(a, b, page, grids):
    "Where classes are new, and with one setting for all columns: on the page, and of BiCL++ and DER++ on the front page."
    more, less, n, pooled = elsewhere(a, b, *grids)
    text = (REPORTS/page).read_text()
    assert f'**{a} against {b}**: more in {more} of {n} columns, less in {less}; ' in text and pooled in text
    if b != 'DER++': return
    assert f'more in {more} of {n} columns and less in {less}; {pooled}' in verdict_on(4)
    assert re.search(r'cells (\S+ points \[.*?\])', pooled)[1] in (ROOT/'README.md').read_text()


def test_cells_whose_settings_the_search_found():
    "How many cells of table 1 have the settings with the largest RA in the search, and which methods have other ones."
    own = lambda text: {k: v for k, v in json.loads(text).items() if not k.startswith('stream.') and k != 'memory'}
    tried = pd.read_parquet(REPORTS/'search'/'results.parquet')
    assert tried.tuning.all() and tried.seed.min() >= 100
    tried = tried[tried.metric == 'RA'].assign(memory=tried.memory.fillna(0)).groupby([*KEY, 'settings']).value.mean().reset_index()
    best = {tuple(r[k] for k in KEY): own(r.settings) for _, r in tried.loc[tried.groupby(KEY).value.idxmax()].iterrows()}
    rows = pd.read_parquet(REPORTS/'results.parquet')
    cells = rows[rows.grid.isin(['table1', 'outputs'])].assign(memory=rows.memory.fillna(0)).drop_duplicates('stamp')
    found = [best.get(tuple(r[k] for k in KEY)) == own(r.settings) for _, r in cells.iterrows()]
    said = re.search(r'The settings of (\d+) of (\d+) cells are the best of 8 that .*?; (?:not so: (.*)|no cell is left out)\.$', (REPORTS/'index.md').read_text(), re.M)
    assert (int(said[1]), int(said[2])) == (sum(found), len(cells)) and sum(found) > 80
    assert set(re.findall(r'[\w+-]+(?: [\d,]+)?', said[3] or '')) == {f'{r.method} {r.memory:,.0f}' for ok, (_, r) in zip(found, cells.iterrows()) if not ok}


def test_ablations_follow_from_their_pairs():
    "Differences, p-values, Holm's correction and verdicts of reports/ablations.csv, from the differences by seed."
    t = pd.read_csv(REPORTS/'ablations.csv')
    d = [np.array(list(json.loads(p).values())) for p in t.pairs]
    assert np.allclose(t['diff'], [x.mean() for x in d], atol=2e-3, rtol=1e-3)
    for (_, metric), part in t.groupby(['factor', 'metric'], sort=False):
        p = [stats.ttest_1samp(d[i], 0).pvalue if np.ptp(d[i]) > 1e-6 else 1. for i in part.index]
        if metric in ('RA', 'LA'): # rounded to 4 digits: too coarse for cosines
            assert np.allclose(holm(p), part.p_holm, rtol=.02, atol=1e-3)
    named = np.where(t.p_holm >= .05, 'no difference seen', np.where(t['diff'] > 0, 'helps', 'hurts'))
    assert (named == t.verdict).all()


def test_collapsed_seeds_of_the_bilevel_term_are_named():
    said, fell = verdict_on(2), 0
    with open(REPORTS/'ablations.csv', newline='', encoding='utf-8') as f:
        for r in csv.DictReader(f):
            if r['factor'] != 'bilevel term' or r['metric'] != 'RA' or not r['collapsed']: continue
            assert re.search(re.escape(f'{BENCHMARKS[r["benchmark"]].label} {r["memory"]}: {r["collapsed"]}') + r'(;|\.$)', said), r
            fell += 1
    assert ('collapsed' in said) == (fell > 0)


def test_generative_claims(monkeypatch):
    "Differences and Holm's correction of the generative claims, from the likelihoods of every run."
    rows = pd.concat([pd.read_parquet(p) for p in sorted((REPORTS/'generative'/'runs').glob('*.parquet'))])
    rows = rows[rows.metric == 'test-LL']
    T = rows.task_trained.max()
    RA = rows[rows.task_trained == T].groupby(['benchmark', 'method', 'seed']).value.mean()
    LA = rows[rows.task_trained == rows.task_tested].groupby(['benchmark', 'method', 'seed']).value.mean()
    t = pd.read_csv(REPORTS/'generative_claims.csv')
    t = t[t.p_holm.notna()]
    who = {'than Online': ('VAE-BiCL', 'VAE-naive', RA), 'more than EWC': ('VAE-BiCL', 'VAE-EWC', RA), 'EWC is better': ('VAE-EWC', 'VAE-BiCL', LA),
           'than plain replay': ('VAE-BiCL', 'VAE-ER', RA), 'replay is better': ('VAE-ER', 'VAE-BiCL', LA), 'reversed': ('VAE-BiCL', 'VAE-BiCL-reversed', RA)}
    p = []
    for r in t.itertuples():
        a, b, x = next(v for k, v in who.items() if k in r.claim)
        d = (x[r.benchmark, a] - x[r.benchmark, b]).dropna()
        assert np.isclose(d.mean(), r.diff, rtol=1e-3, atol=1e-2)
        p.append(stats.ttest_1samp(d, 0).pvalue)
    assert np.allclose(holm(p), t.p_holm, rtol=1e-3)
    assert list(t.holds) == ['undecided' if q >= .05 else 'yes' if r.diff > 0 else 'no' for q, r in zip(holm(p), t.itertuples())]


def test_page_on_table1_tells_of_the_copies():
    "64 of 1,870, 3.4 %, 25 and 1.4 % are what the data say."
    from bicl.data import available
    from bicl.streams import make_stream
    if not available('notmnist'): pytest.skip('notMNIST is not on this machine')
    s, own = make_stream('notmnist-permutations', range(5)), {}
    for i, x in enumerate(s.x.numpy()): own.setdefault(x.tobytes(), set()).add(i)
    copies = [c for x in s.test_x.numpy() if (c := own.get(x.tobytes()))]
    met = np.mean([sum(bool(c & set(r)) for c in copies) for d in s.draws for r in d.tolist()])
    n = len(s.test_x)
    assert f'{len(copies)} of its {n:,} test pictures ({100 * len(copies) / n:.1f} %)' in (REPORTS/'index.md').read_text()
    assert re.search(rf'For {met:.0f} of\s+them \({100 * met / n:.1f} %\)', (REPORTS/'index.md').read_text())


# ---- the sentences change with the rows

def toy(folder, lost, seeds=range(5), grid='table1', **about):
    "A study that never took place, as the page of claims reads it."
    rows = invented(lost, ('mnist-rotations', 'mnist-permutations'), tuple(seeds)).assign(grid=grid, **about)
    last, wide = rows.task_trained == 10, ['benchmark', 'method', 'memory', 'protocol', 'stamp', 'settings', 'tuning', 'grid', 'seed']
    RA = rows[last].groupby(wide, dropna=False).value.mean().reset_index().assign(metric='RA', task_trained=10)
    LA = rows[rows.task_trained == rows.task_tested].groupby(wide, dropna=False).value.mean().reset_index().assign(metric='LA', task_trained=10)
    folder.mkdir(exist_ok=True)
    pd.concat([rows, RA, LA], ignore_index=True).astype(dict(memory='Int64', task_tested='Int64')).to_parquet(folder/'results.parquet')
    return folder


def said(execute, folder):
    execute('claims', rows=str(folder), out=str(folder))
    return [verdict_on(i, folder) for i in range(7)]


@pytest.fixture
def plain(monkeypatch):
    import IPython.display

    import bicl.figures
    monkeypatch.setattr(bicl.figures, 'difference_figure', lambda *a, **kw: None)
    monkeypatch.setattr(bicl.figures, 'save_figure', lambda *a, **kw: IPython.display.Markdown('a figure'))


def test_sentences_change_with_the_rows(execute, plain, tmp_path): # noqa: F811
    sizes = (200, 500)
    for better, says in ((1., 'Yes, over all columns together.'), (-1., 'No, it is behind.'), (0., 'Not shown.')):
        lost = {('ER', s): 6. for s in sizes} | {('BiCL', s): 6. - better for s in sizes}
        s = said(execute, toy(tmp_path/f'by{better}', lost))
        assert says in s[1] and 'searched alike in 0 of 4 columns' in s[1], s[1]
        n = 4 if better else 0
        assert f'It retains more in {n if better > 0 else 0} of 4 columns and less in {n if better < 0 else 0}; over' in s[1]
        assert 'has not been run yet' in s[3] and 'has not been measured yet' in s[2] and 'have not been run yet' in s[6]


def test_seeds_that_both_have(execute, plain, tmp_path): # noqa: F811
    "Ten seeds against five: only five pairs in each column count."
    folder = toy(tmp_path/'ten', {('BiCL', 200): 5.}, range(10))
    rows = pd.concat([pd.read_parquet(folder/'results.parquet'), pd.read_parquet(toy(tmp_path/'five', {('ER', 200): 6.}, range(5))/'results.parquet')])
    rows.to_parquet(folder/'results.parquet')
    assert 'ahead in 10 of 10 pairs' in said(execute, folder)[1]


def test_searched_alike_only_if_both_were(execute, plain, tmp_path): # noqa: F811
    folder = toy(tmp_path/'alike', {('ER', 200): 6., ('BiCL', 200): 5.})
    (folder/'search').mkdir()
    for eights, won, alike in product((8, 6), (.1, .2), (False,)):
        pd.DataFrame([dict(method=m, benchmark=b, memory=200, tuning=True, asked=8 if m == 'ER' else eights, tried=8, best=80.,
                           won=json.dumps(dict(lr=won))) for m in ('ER', 'BiCL') for b in ('mnist-rotations', 'mnist-permutations')]
                     ).to_csv(folder/'search'/'columns.csv', index=False)
        alike = (eights, won) == (8, .1) # the invented runs have lr 0.1
        text = said(execute, folder)[1]
        assert ('Both were searched alike: 8 settings' in text) == alike and ('provisional' in text) != alike


def test_a_collapsed_seed_is_named(execute, plain, tmp_path): # noqa: F811
    folder = toy(tmp_path/'fell', {('ER', 200): 6., ('BiCL', 200): 5.})
    rows = pd.read_parquet(folder/'results.parquet')
    rows.loc[(rows.method == 'BiCL') & (rows.seed == 3) & (rows.benchmark == 'mnist-rotations'), 'value'] = 20.
    rows.to_parquet(folder/'results.parquet')
    assert 'collapsed seeds: BiCL on MNIST rotations 200: 3' in said(execute, folder)[1]
