"""The documentation as a reader meets it: built without warnings, then opened in a browser.

The browser is Debian's chromium (or $CHROMIUM). Where there is none these tests are skipped, but
not in CI, where a missing browser is a failure.
"""
import functools, http.server, itertools, os, re, shutil, subprocess, sys, threading
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import build, numpy as np, pytest, runs
from conftest import shared_folder
from filelock import FileLock

from bicl import baselines, bilevel, gem, generative, replay # noqa: F401 (they register)
from bicl.learner import METHODS
from bicl.metrics import interval

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT/'_docs'
FLAGS = ('--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
         '--disable-component-update --disable-sync').split()

@pytest.fixture(scope='session')
def site(tmp_path_factory):
    "The site, built as `make docs` does; once, even if several processes share the tests."
    shared = shared_folder(tmp_path_factory)
    with FileLock(shared/'docs.lock'):
        if not (log := shared/'docs.log').exists():
            command = [sys.executable, ROOT/'nbs'/'_site'/'build.py', 'docs']
            done = subprocess.run(command, capture_output=True, text=True)
            log.write_text(done.stdout + done.stderr if done.returncode else '', encoding='utf-8')
    if text := log.read_text(encoding='utf-8'): pytest.fail(text, pytrace=False)
    return SITE

# -------------------------------------------------------------------------------------- links

TAG = re.compile(r"""<(?!span class="\w+">)[a-z]\w*\s(?:[^<>"']|"[^"]*"|'[^']*')*>""") # but for those that colour code
PAIR = re.compile(r"""([\w-]+)=(?:"([^"]*)"|'([^']*)')""")

class Page:
    "Links, anchors, pictures and numbers of a page. There are more than a thousand: expressions, no parser."
    def __init__(self, path):
        self.links, self.ids, self.remote, self.pictures = [], {''}, [], []
        self.runs, self.numbers, self.captions = [], [], []
        text = self.html = path.read_text(encoding='utf-8')
        for found in TAG.finditer(text):
            tag, a = re.match(r'\w+', found[0][1:])[0], {k: unescape(v or w) for k, v, w in PAIR.findall(found[0])}
            self.ids |= {a.get('id'), a.get('name')} - {None}
            urls = [a[k] for k in ('href', 'src') if a.get(k)]
            if tag != 'base': self.links += urls
            if tag in ('script', 'img', 'link', 'iframe', 'source'): self.remote += [u for u in urls if urlsplit(u).netloc]
            if tag == 'img': self.pictures.append(a)
            inside = lambda tag=tag, at=found.end(): unescape(re.sub('<[^>]*>', '', text[at:text.index(f'</{tag}>', at)])).strip()
            if tag == 'a' and a.get('class') == 'run': self.runs.append((a['href'], inside()))
            if 'data-metric' in a: self.numbers.append((a['data-metric'], inside()))
            if tag == 'p' and a.get('class') == 'caption': self.captions.append(inside())

@pytest.fixture(scope='session')
def pages(site):
    "Every page of the site, by its path."
    found = {p.relative_to(site).as_posix(): Page(p) for p in site.rglob('*.html') if '_static' not in p.parts}
    assert len(found) > 10
    return found

def runs_of(pages): return {n: p for n, p in pages.items() if '/runs/' in n}

def test_links_resolve(site, pages):
    "Every link to a page, picture, file or heading of the site leads somewhere."
    broken, known = [], set()
    for name, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme: continue
            target, anchor = urldefrag(unquote(urljoin(name, link)))
            target = target.split('?')[0]
            if target not in known and not (site/target).exists(): broken.append((name, link))
            elif target in pages and target != 'explorer.html' and anchor not in pages[target].ids: broken.append((name, link))
            else: known.add(target)
    assert not broken

def test_results_and_tutorials_come_first(site, pages):
    "Then the book and the rest, whose parts are folded; every notebook is somewhere."
    assert pages['index.html'].captions == ['Results', 'Tutorials', 'The book', 'More']
    text = (site/'index.html').read_text(encoding='utf-8')
    for folder in ('', 'pages', 'tutorials', 'experiments'):
        names = [p.stem for p in (ROOT/'nbs'/folder).glob('[!_.]*.ipynb') if p.stem != 'index']
        missing = [n for n in names if f'nbs/{folder}/{n}.html'.replace('//', '/') not in text]
        assert names and not missing
    folds = lambda name: re.findall(r'<input[^>]*toctree-checkbox[^>]*>', (site/name).read_text(encoding='utf-8'))
    assert len(folds('index.html')) == len(build.PARTS) + 2 and not any('checked' in f for f in folds('index.html'))
    assert sum('checked' in f for f in folds('nbs/10_bicl.html')) == 1

def test_nothing_is_fetched_from_elsewhere(pages):
    "Scripts, styles and pictures are all part of the site: it works without a network."
    assert not {n: p.remote for n, p in pages.items() if p.remote}

def test_paper_and_repository_are_linked(pages):
    for n, p in pages.items():
        if '/runs/' in n or n.startswith('_modules') or n in ('genindex.html', 'search.html'): continue
        assert any('arxiv.org/abs/2011.01168' in u for u in p.links) and any('github.com/bicl' in u for u in p.links), n

def test_every_picture_is_told(pages):
    "Who cannot see a figure is told what it shows, in more than a word."
    mute = [(n, i.get('src', '')[:60]) for n, p in pages.items() for i in p.pictures
            if '_static/' not in i.get('src', '') and len(i.get('alt') or '') < 12] # the theme's own are decoration
    assert not mute and sum(len(p.pictures) for p in pages.values()) > 100

# --------------------------------------------------------------------------------------- runs

def test_every_run_has_a_page(site, pages):
    "With numbers, settings, seeds, identity, seconds and the command that repeats it; and not too heavy."
    there = {p.with_suffix('.html').relative_to(ROOT).as_posix() for p in ROOT.glob('reports/*/runs/*.ipynb')}
    assert set(runs_of(pages)) == there and there
    stale = []
    for name in sorted(there):
        text, (grid, stem) = pages[name].html, re.match(r'reports/(.*)/runs/(.*)\.html', name).groups()
        for word in ('Seeds', 'Identity', stem[-16:], 'Version of the method', 'Time by the clock', 'Processor time',
                     'Every setting', 'seed '): assert word in text, (name, word)
        assert pages[name].numbers and len(text) < 200_000, name
        if f'bicl_run {grid} --only' not in text: stale.append(name)
    assert not stale, 'grids no longer ask for these runs, no table shows them: git rm'
    assert sum(len(pages[name].html) for name in there) < 40_000*len(there) # on average: the site stays small

def test_numbers_lead_to_their_runs(pages):
    "A number in a table is a link to a page of a run that has the same number, rounded as in the table."
    wrong, n = [], {}
    plain = lambda text: float(text.replace('−', '-'))
    for name, page in pages.items():
        for href, text in page.runs:
            target = urldefrag(unquote(urljoin(name, href)))[0]
            if target not in pages: wrong.append((name, href)); continue
            n[name] = n.get(name, 0) + 1
            if not re.fullmatch(r'[−+]?[\d.]+', text): continue # a sign for a further run
            digits = len(text.partition('.')[2])
            close = [v for _, v in pages[target].numbers if abs(plain(v) - plain(text)) <= .5*10.**-digits + .005 + 1e-9]
            if not close and digits: wrong.append((name, href, text))
    assert not wrong
    assert n.get('nbs/pages/table1.html', 0) >= 60, f'links to runs per page: {n}'

def test_intervals_of_many():
    "What the pages of runs compute for many columns at once is what the tables have."
    a = np.random.default_rng(0).normal(70, 9, (3, 5, 10))
    assert np.allclose(runs.intervals(a), [[interval(x) for x in row] for row in a], rtol=1e-12)
    assert np.isnan(runs.intervals(a[..., :1])).all()

# ------------------------------------------------------------------------------------- colours

def seen(color, deficiency):
    "A colour as CIELAB coordinates, as someone with this deficiency of colour vision sees it (Machado et al., 2009)."
    c = np.array([int(color[i:i + 2], 16) for i in (1, 3, 5)])/255
    c = np.clip(deficiency @ np.where(c <= .04045, c/12.92, ((c + .055)/1.055)**2.4), 0, 1)
    xyz = np.array([[.4124, .3576, .1805], [.2126, .7152, .0722], [.0193, .1192, .9505]]) @ c
    f = np.cbrt(xyz/[.9505, 1, 1.089])
    return np.array([116*f[1] - 16, 500*(f[0] - f[1]), 200*(f[1] - f[2])]), 1.05/(xyz[1] + .05)

EYES = {'all colours': np.eye(3),
        'no red': np.array([[.152286, 1.052583, -.204868], [.114503, .786281, .099216], [-.003882, -.048116, 1.051998]]),
        'no green': np.array([[.367322, .860646, -.227968], [.280085, .672501, .047413], [-.01182, .04294, .968881]]),
        'no blue': np.array([[1.255528, -.076749, -.178779], [-.078411, .930809, .147602], [.004733, .691367, .3039]])}

@pytest.mark.parametrize('eyes', EYES)
def test_methods_are_told_apart_at_a_glance(eyes):
    "BiCL, BiCL++, ER and DER++ by colour alone, on white; all methods by colour or marker."
    four = {m: METHODS[m] for m in ('BiCL', 'BiCL++', 'ER', 'DER++')}
    labs = {m: seen(x.color, EYES[eyes]) for m, x in four.items()}
    assert all(contrast >= 3 for _, contrast in labs.values()), 'too pale for a line on white'
    for a, b in itertools.combinations(four, 2):
        assert np.linalg.norm(labs[a][0] - labs[b][0]) > 25, (a, b)
    assert len({x.marker for x in four.values()}) == 4
    table = [m for m, x in METHODS.items() if x.order < 100 and x.cls.__module__.startswith('bicl.')]
    for a, b in itertools.combinations(table, 2):
        far = np.linalg.norm(seen(METHODS[a].color, EYES[eyes])[0] - seen(METHODS[b].color, EYES[eyes])[0])
        assert far > 15 or METHODS[a].marker != METHODS[b].marker, (a, b)

# ------------------------------------------------------------------------------------ browser

@pytest.fixture(scope='session')
def browser():
    "Headless Chromium."
    names = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
    path = os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, names)), None)
    if not path:
        message = 'no browser: install chromium, or set CHROMIUM to one, to test the site in it'
        pytest.fail(message) if os.environ.get('CI') else pytest.skip(message)
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()

@pytest.fixture(scope='session')
def address(site):
    "The site on a port of this machine."
    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = 'HTTP/1.1' # one connection for many files
        def log_message(self, *args): pass
    handler = functools.partial(Quiet, directory=site)
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()

def watched(browser, address):
    "A page that remembers everything that went wrong in it."
    tab = browser.new_page(viewport=dict(width=1280, height=900))
    tab.problems = []
    note, here = tab.problems.append, (address, 'data:')
    tab.on('console', lambda m: m.type in ('error', 'warning') and note(f'console: {m.text}'))
    tab.on('pageerror', lambda e: note(f'script: {e}'))
    tab.on('requestfailed', lambda r: r.failure == 'net::ERR_ABORTED' or # left before the icon came
           note(f'not loaded: {r.url} ({r.failure})'))
    tab.on('response', lambda r: r.status >= 400 and note(f'{r.status}: {r.url}'))
    tab.on('request', lambda r: r.url.startswith(here) or note(f'outside: {r.url}'))
    return tab

@pytest.fixture
def tab(browser, address):
    tab = watched(browser, address)
    yield tab
    tab.close()

READY = 'window.MathJax?.startup?.promise?.then(() => 0)' # waited for
WIDE = 'document.documentElement.scrollWidth - window.innerWidth'
LOOK = """async () => {
    const imgs = [...document.querySelectorAll('article img')];
    await Promise.all(imgs.map(i => i.decode().catch(() => 0)));
    const size = i => Math.min(i.naturalWidth, i.naturalHeight, i.clientWidth, i.clientHeight);
    return {
        text: document.querySelector('article').innerText,
        formulas: document.querySelectorAll('article .math').length,
        typeset: document.querySelectorAll('article .math mjx-container').length,
        wrong: [...document.querySelectorAll('mjx-merror')].map(e => e.innerText),
        empty: imgs.filter(i => size(i) < 8).map(i => i.src),
        figures: imgs.length,
        folds: document.querySelector('#everything-else')?.getBoundingClientRect().top + scrollY,
        listed: [...document.querySelectorAll('.sidebar-tree a.internal')].map(a => a.href),
    }}"""
DESK, PHONE = dict(width=1280, height=900), dict(width=390, height=800)

@pytest.fixture(scope='session')
def looks(browser, address, pages):
    """Every page but those of single runs (one of each grid) and of sources, opened once: on a desk and on a phone. The
    next page begins with what the last one ended with: a page that is left need not be laid out for the next."""
    runs, found = {n.split('/')[1]: n for n in runs_of(pages)}, {}
    tab = watched(browser, address)
    sizes = [(DESK, LOOK), (PHONE, WIDE)]
    for name in [n for n in sorted(pages) if '/runs/' not in n and '_modules' not in n] + sorted(runs.values()):
        tab.goto(address + name)
        tab.evaluate(READY)
        seen = {}
        for i, (size, script) in enumerate(sizes):
            if i: tab.set_viewport_size(size)
            seen[script] = tab.evaluate(script)
        found[name] = seen[LOOK] | dict(wide=seen[WIDE], problems=tab.problems[:])
        tab.problems.clear()
        sizes.reverse()
    tab.close()
    return found

def test_every_page_of_the_navigation(address, looks):
    "Loads without errors, shows its mathematics and figures, and no directive."
    listed = {urldefrag(u)[0].removeprefix(address) for u in looks['index.html']['listed']}
    assert len(listed) > len(list((ROOT/'nbs').glob('[0-9]*.ipynb')))
    for url in sorted({'index.html', *listed} - {''}):
        look = looks[url]
        assert len(look['text']) > 100, f'{url} is empty'
        assert look['formulas'] <= look['typeset'], f'{url}: mathematics is not typeset'
        assert not look['wrong'], f'{url}: wrong mathematics {look["wrong"]}'
        assert not look['empty'], f'{url}: figures without size {look["empty"]}'
        assert not re.search(r'^\s*#\|', look['text'], re.M), f'{url} shows a directive'
    assert not {n: look['problems'] for n, look in looks.items() if look['problems']}
    assert sum(look['typeset'] for look in looks.values()) > 10
    assert sum(look['figures'] for look in looks.values()) > 5

def test_pages_fit_a_phone(browser, address, looks):
    "Nothing but wide code, tables and formulas scrolls sideways, and those inside their own box."
    assert not {n: look['wide'] for n, look in looks.items() if look['wide'] > 0}
    tab = browser.new_page(viewport=dict(width=390, height=800))
    tab.goto(address + 'api/memory.html') # a parameter's meaning can be read without scrolling
    ends = tab.eval_on_selector_all('table.docments td:last-child', 'all => all.map(c => c.getBoundingClientRect().right)')
    assert ends and max(ends) <= 390
    tab.close()

def test_pages_are_short(looks):
    "Before what a reader may open: three screens of Table 1, eight of the ablations."
    for name, screens in dict(table1=3, ablations=8).items():
        assert 300 < looks[f'nbs/pages/{name}.html']['folds'] <= 900*screens, name

def test_words_start_at_the_left():
    "And numbers end at the right, in every column but the first."
    table = '| m | protocol | RA | link |\n| :-- | --: | --: | --: |\n'
    body = '| ER | strict | **8.1** | [8.1](a.md) |\n| GEM |  | −9.2† | [9.2](b.md) |\n| BiCL | buffered | 7 |  |'
    assert build.aligned(f'Text\n\n{table}{body}') == f'Text\n\n{table.replace("--:", ":--", 1)}{body}'

def test_wide_tables(browser, address):
    "Can be scrolled with the keyboard; the first column stays; a shadow says that there is more."
    tab = browser.new_page(viewport=dict(width=390, height=800))
    tab.goto(address + 'nbs/pages/table1.html')
    box = tab.locator('.table-wrapper.wide:visible').first
    cell = box.locator('tbody td:first-child').first
    before = cell.bounding_box()['x']
    box.focus()
    for _ in range(3): tab.keyboard.press('ArrowRight')
    tab.wait_for_function('document.activeElement.scrollLeft > 20')
    assert cell.bounding_box()['x'] == before
    assert 'gradient' in box.evaluate('e => getComputedStyle(e).backgroundImage')
    tab.close()

def test_the_present_page_is_in_view(browser, address):
    "In the sidebar, however long it is."
    tab = browser.new_page(viewport=dict(width=1280, height=500))
    for page in ('nbs/20_metrics.html', 'api/tables.html', 'nbs/pages/table1.html'):
        tab.goto(address + page)
        at, within = (tab.locator(s).first.bounding_box() for s in ('.sidebar-tree .current-page > a', '.sidebar-scroll'))
        assert within['y'] <= at['y'] and at['y'] + at['height'] <= within['y'] + within['height'], page
    tab.close()

def weigh(tab):
    "Count the bytes that a page loads; the list grows while it does."
    sizes = []
    tab.on('requestfinished', lambda r: sizes.append(r.sizes()['responseBodySize']))
    return sizes

def test_search(tab, address):
    "Finds chapters, tells in a line what each is about, without raw mathematics, and loads little."
    tab.goto(address)
    sizes = weigh(tab)
    tab.fill('.sidebar-search', 'reservoir')
    tab.press('.sidebar-search', 'Enter')
    tab.wait_for_selector('#search-results a[href*="03_memory"] ~ p.context')
    assert not re.search(r'\\[([a-z]|\$', tab.inner_text('#search-results'))
    assert sum(sizes) < 800_000
    assert not tab.problems

VIEWS = {'desktop, light': dict(viewport=dict(width=1280, height=900), color_scheme='light'),
         'phone, dark': dict(viewport=dict(width=390, height=800), color_scheme='dark')}

@pytest.fixture(params=VIEWS)
def explorer(request, browser, address):
    "The results explorer, as different readers open it."
    tab = browser.new_page(**VIEWS[request.param])
    tab.problems, tab.sizes = [], weigh(tab)
    tab.on('console', lambda m: m.type in ('error', 'warning') and tab.problems.append(m.text))
    tab.on('pageerror', lambda e: tab.problems.append(str(e)))
    tab.goto(address + 'explorer.html')
    tab.wait_for_selector('#runs tbody a.mean')
    yield tab
    assert not tab.problems
    tab.close()

def means(tab): return [float(t.replace('−', '-')) for t in tab.locator('#runs a.mean').all_inner_texts()]

def test_explorer(explorer, address):
    "Choose, sort, point, select; the address restores the view; two megabytes at most."
    tab = explorer
    assert sum(tab.sizes) < 2_000_000
    tab.select_option('#memory', '200')
    tab.select_option('#benchmark', 'mnist-permutations')
    tab.get_by_label('ER', exact=True).check()
    tab.get_by_label('BiCL', exact=True).check()
    rows = tab.locator('#runs tbody tr')
    assert rows.count() == 2 and means(tab) == sorted(means(tab), reverse=True)
    tab.locator('#runs a.mean').first.hover()
    assert 'seed 0:' in tab.inner_text('#tip') and '[' in tab.inner_text('#tip')
    for box in tab.locator('#runs tbody input').all(): box.check()
    assert tab.locator('#curves path.curve').count() == 4 and tab.locator('table.matrix').count() == 2
    last = tab.locator('table.matrix').first.locator('tbody tr:last-child td').all_inner_texts()
    assert len(last) == 10 and abs(np.mean([float(v) for v in last]) - means(tab)[0]) < .6 # RA: mean of the last row
    tab.select_option('#metric', 'LA')
    tab.locator('#runs th', has_text='Memory').click()
    tab.wait_for_selector('#runs th[aria-sort]:has-text("Memory")') # the table sorts in a moment of its own, after the click
    url, state = tab.evaluate('location.href'), (tab.inner_text('#runs'), tab.inner_text('#chosen'), tab.inner_html('#curves'))
    tab.goto('about:blank')
    tab.goto(url)
    tab.wait_for_selector('table.matrix')
    assert state == (tab.inner_text('#runs'), tab.inner_text('#chosen'), tab.inner_html('#curves'))
    assert tab.get_attribute('#runs th:has-text("Memory")', 'aria-sort') in ('ascending', 'descending')
    mean = means(tab)[0]
    tab.locator('#runs a.mean').first.click()
    assert float(tab.inner_text('[data-metric=LA]').replace('−', '-')) == pytest.approx(mean)
    tab.click('.crumbs a:last-child') # and back, with this run selected
    tab.wait_for_selector('table.matrix')

def test_explorer_with_the_keyboard(explorer):
    "Everything can be reached with Tab, and done with Enter, Space and arrows."
    tab = explorer
    tab.focus('#benchmark')
    tab.keyboard.press('ArrowDown')
    tab.wait_for_function("location.hash.includes('benchmark=')")
    def until(selector):
        for _ in range(80):
            tab.keyboard.press('Tab')
            if tab.evaluate('s => document.activeElement.matches(s)', selector): return
        pytest.fail(f'{selector} is not reached')
    until('#methods input')
    tab.keyboard.press('Space')
    tab.wait_for_function("location.hash.includes('method=')")
    tab.keyboard.press('Space')
    until('.dt-search input')
    tab.keyboard.type('BiCL')
    tab.wait_for_function("location.hash.includes('search=BiCL')")
    until('#runs th [role=button], #runs th[tabindex="0"]')
    tab.keyboard.press('Enter')
    tab.wait_for_function("location.hash.includes('sort=')")
    until('#runs tbody input')
    tab.keyboard.press('Space')
    tab.wait_for_selector('#curves path.curve')
    until('#runs a.mean')
    assert 'seed' in tab.inner_text('#tip')
    tab.keyboard.press('Escape')
    assert tab.locator('#tip').is_hidden()
    until('#chosen button')
    tab.keyboard.press('Enter')
    assert tab.locator('#curves path.curve').count() == 0

def test_explorer_from_the_disk(browser, site):
    "Without a server, too."
    tab = browser.new_page()
    tab.goto((site/'explorer.html').as_uri())
    tab.wait_for_selector('#runs tbody a.mean')
    tab.close()

def test_dark_and_light(browser, address):
    "The page follows the reader's setting, and the button changes it."
    seen = []
    for scheme in ('light', 'dark'):
        tab = browser.new_page(color_scheme=scheme)
        tab.goto(address)
        for click in (False, True):
            if click: tab.locator('.theme-toggle:visible').first.click()
            seen.append(tab.evaluate('getComputedStyle(document.body).backgroundColor'))
        tab.close()
    light, light_clicked, dark, dark_clicked = seen
    assert light != dark and (light_clicked, dark_clicked) == (dark, light)
