"""The documentation as a reader meets it: built without warnings, then opened in a browser.

The browser is Debian's chromium (or $CHROMIUM). Where there is none these tests are skipped, but
not in CI, where a missing browser is a failure.
"""
import functools, http.server, os, re, shutil, subprocess, sys, threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import build, pytest
from conftest import shared_folder
from filelock import FileLock

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

class Page(HTMLParser):
    "Links and anchors of a page."
    def __init__(self, path):
        super().__init__()
        self.links, self.ids = [], {''}
        self.feed(path.read_text(encoding='utf-8'))
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a.get('id'), a.get('name')} - {None}
        self.links += [v for k, v in a.items() if k in ('href', 'src') and v and tag != 'base']

def test_links_resolve(site):
    "Every link to a page, picture, file or heading of the site leads somewhere."
    pages = {p.relative_to(site).as_posix(): Page(p) for p in site.rglob('*.html')
             if '_static' not in p.parts}
    assert len(pages) > 10
    broken = []
    for name, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme: continue
            target, anchor = urldefrag(unquote(urljoin(name, link)))
            target = target.split('?')[0]
            if not (site/target).exists(): broken.append((name, link))
            elif target in pages and anchor not in pages[target].ids: broken.append((name, link))
    assert not broken

def test_results_and_tutorials_come_first(site):
    "Then the five parts of the book, the experiments and the reference; every notebook is somewhere."
    text = (site/'index.html').read_text(encoding='utf-8')
    captions = re.findall(r'class="caption-text">([^<]+)<', text[text.index('sidebar-tree'):])
    assert captions == ['Results', 'Tutorials', *build.PARTS, 'Experiments', 'Reference']
    for folder in ('', 'pages', 'tutorials', 'experiments'):
        names = [p.stem for p in (ROOT/'nbs'/folder).glob('[!_.]*.ipynb') if p.stem != 'index']
        missing = [n for n in names if f'nbs/{folder}/{n}.html'.replace('//', '/') not in text]
        assert names and not missing

def test_nothing_is_fetched_from_elsewhere(site):
    "Scripts, styles and pictures are all part of the site: it works without a network."
    class Remote(Page):
        def handle_starttag(self, tag, attrs):
            a = dict(attrs)
            if tag in ('script', 'img', 'link', 'iframe', 'source'):
                self.links += [u for k in ('src', 'href') if urlsplit(u := a.get(k) or '').netloc]
    found = [(p.name, Remote(p).links) for p in site.rglob('*.html') if Remote(p).links]
    assert not found

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
        def log_message(self, *args): pass
    handler = functools.partial(Quiet, directory=site)
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()

@pytest.fixture
def tab(browser, address):
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
    yield tab
    tab.close()

LOOK = """async () => {
    if (window.MathJax?.startup) await MathJax.startup.promise;
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
    }}"""

def test_every_page_of_the_navigation(tab, address):
    "Loads without errors, shows its mathematics and figures, and no directive."
    tab.goto(address)
    links = tab.eval_on_selector_all('.sidebar-tree a.internal', 'all => all.map(a => a.href)')
    urls = list(dict.fromkeys(urldefrag(u)[0] for u in [address + 'index.html', *links]))
    expected = len(list((ROOT/'nbs').glob('[0-9]*.ipynb')))
    assert len(urls) > expected, urls
    seen = {}
    for url in urls:
        tab.goto(url)
        seen[url.removeprefix(address)] = look = tab.evaluate(LOOK)
        assert len(look['text']) > 100, f'{url} is empty'
        assert look['formulas'] <= look['typeset'], f'{url}: mathematics is not typeset'
        assert not look['wrong'], f'{url}: wrong mathematics {look["wrong"]}'
        assert not look['empty'], f'{url}: figures without size {look["empty"]}'
        assert not re.search(r'^\s*#\|', look['text'], re.M), f'{url} shows a directive'
        assert not tab.problems, f'{url}: {tab.problems}'
    assert sum(s['typeset'] for s in seen.values()) > 10
    assert sum(s['figures'] for s in seen.values()) > 5

def test_pages_fit_a_phone(browser, address, site):
    "Nothing but wide code, tables and formulas scrolls sideways, and those inside their own box."
    tab = browser.new_page(viewport=dict(width=390, height=800))
    wide = {}
    for p in sorted(site.rglob('*.html')):
        if {'_static', '_modules'} & set(p.parts): continue
        tab.goto(address + p.relative_to(site).as_posix())
        n = tab.evaluate('document.documentElement.scrollWidth - window.innerWidth')
        if n > 0: wide[p.name] = n
    tab.close()
    assert not wide

def test_search(tab, address):
    tab.goto(address)
    tab.fill('.sidebar-search', 'reservoir')
    tab.press('.sidebar-search', 'Enter')
    tab.wait_for_selector('#search-results a[href*="03_memory"]')
    assert not tab.problems

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
