"""README.md and the documentation site, both from the notebooks.

    python nbs/_site/build.py readme    execute nbs/index.ipynb, write README.md
    python nbs/_site/build.py docs      build _docs/ (warnings are errors)
    python nbs/_site/build.py execute NOTEBOOK …    store fresh outputs in these notebooks
"""
import gc, itertools, json, os, posixpath, re, shutil, subprocess, sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

sys.modules.setdefault('rfc3987_syntax', None) # more than a second for a grammar of addresses that notebooks do not have
import nbformat # noqa: E402

SITE = Path(__file__).resolve().parent
ROOT = SITE.parent.parent
NBS = ROOT/'nbs'
SOURCE = ROOT/'build'/'docs' # what Sphinx reads: notebooks and reports as they are shown

PARTS = { # the book: part → numbers of its chapters
    'I The world': range(0, 4), 'II The method': range(4, 11), 'III The rivals': range(11, 18),
    'IV The other half': range(18, 20), 'V The study': range(20, 26), 'VI Yours': range(26, 28)}
FIRST = { # what comes first in its folder; the rest by name
    'pages': ('table1', 'outputs', 'classes', 'ablations', 'generative', 'search', 'speed', 'gpu', 'faults'),
    'tutorials': ('quickstart', 'your_own_data', 'your_own_model', 'your_own_method', 'how_to')}
ANY = NBS/'pages'/'grid.ipynb' # a page for any grid: no result of its own

def chapters(part):
    "The chapters of a part of the book."
    return [p for p in sorted(NBS.glob('[0-9]*.ipynb')) if int(p.stem[:2]) in PARTS[part]]

def notebooks(folder):
    "The notebooks of a folder, in the order in which a reader should meet them."
    first = {name: i for i, name in enumerate(FIRST.get(folder, ()))}
    return sorted((NBS/folder).glob('[!_.]*.ipynb'), key=lambda p: (first.get(p.stem, 99), p.stem))

def put(path, text, mode='w'):
    with open(path, mode, encoding='utf-8') as f: f.write(text)

# ---------------------------------------------------------------------------------- notebooks

def read(path): return nbformat.v4.reads(Path(path).read_text(encoding='utf-8')) # tests say that they are valid

def directives(cell):
    "nbdev's `#|` lines at the top of a cell, such as `export` or `echo: false`."
    lines = re.match(r'(?:#\|.*(?:\n|$))*', cell.source).group().splitlines()
    return {re.sub(r'\s*:\s*', ': ', line[2:].strip()) for line in lines}

def is_exported(d): return any(x.split()[0] in ('export', 'exports', 'exporti') for x in d if x)

def shown(nb):
    "The cells that a reader sees, without directives; tags say what the site does with them."
    for cell in nb.cells:
        d = directives(cell)
        if cell.cell_type == 'raw' or not cell.source.strip(): continue
        if {'hide', 'default_exp', 'include:'} & {x.split()[0] for x in d if x}: continue
        if 'notebook' in cell.metadata.get('tags', []): continue # for who opens the notebook
        cell.source = re.sub(r'\A(?:#\|.*(?:\n|$))*', '', cell.source).strip('\n')
        tags = set(cell.metadata.get('tags', []))
        if cell.cell_type == 'code':
            if is_exported(d): tags.add('exported')
            if 'echo: false' in d or 'hide_input' in d: tags.add('remove-input')
            if 'output: false' in d or 'hide_output' in d: tags.add('remove-output')
            cell.outputs = [o for o in cell.outputs if not is_progress(o)]
            if not cell.source and not cell.outputs: continue
        cell.metadata['tags'] = sorted(tags)
        yield cell

def is_progress(out):
    "Progress bars are for whoever runs a cell; on a page they are noise."
    return (out.get('name') == 'stderr' or
            any('widget' in k for k in out.get('data', {})))

@cache
def title(path):
    "The first heading of a notebook."
    text = '\n'.join(c.source for c in read(path).cells if c.cell_type == 'markdown')
    found = re.search(r'^# +(.+)$', text, re.M)
    return re.sub(r'[*`$]', '', found[1]).strip() if found else path.stem

@cache
def said(path):
    "What a notebook is about, in a line: the quotation below its title; mathematics as plain text."
    text = '\n'.join(c.source for c in read(path).cells[:3] if c.cell_type == 'markdown')
    found = re.search(r'^> +(.+(?:\n> +.+)*)$', text, re.M)
    return re.sub(r'\n> +', ' ', found[1]) if found else ''

def module_of(path):
    "The module that a notebook exports, if it does."
    for c in read(path).cells:
        if m := re.search(r'^#\| *default_exp +(\S+)', c.source, re.M): return m[1]

# ------------------------------------------------------------------------------------- README

def to_root(text):
    "Links that work from nbs/ turned into links that work from the project's root."
    from bicl.core import relink
    return relink(text, 'nbs', '.')

def render(nb):
    "A notebook as the text of README.md: prose, visible code and outputs."
    parts = []
    for c in shown(nb):
        if c.cell_type == 'markdown':
            parts.append(c.source)
            continue
        if 'remove-input' not in c.metadata.tags: parts.append(f'```python\n{c.source}\n```')
        if 'remove-output' in c.metadata.tags: continue
        for o in c.outputs:
            data = o.get('data', {})
            text = data.get('text/markdown') or data.get('text/plain') or o.get('text', '')
            parts.append(text if 'text/markdown' in data else f'```\n{text.rstrip()}\n```')
    return to_root('\n\n'.join(p.strip() for p in parts if p.strip())) + '\n'

def executed(path=NBS/'index.ipynb', timeout=300):
    "The notebook with fresh outputs; cells marked `eval: false` or `cuda` are not run."
    from nbclient import NotebookClient

    from bicl.core import sockets
    nb = nbformat.read(path, 4)
    kept = {c.id: c.source for c in nb.cells if {'eval: false', 'cuda'} & directives(c)}
    for c in nb.cells:
        if c.id in kept: c.source = ''
    os.environ['MPLBACKEND'] = 'module://matplotlib_inline.backend_inline' # or no figure is kept
    with TemporaryDirectory(prefix='bicl-') as d:
        NotebookClient(nb, timeout=timeout, resources={'metadata': {'path': str(path.parent)}}, **sockets(d)).execute()
    for c in nb.cells: c.source = kept.get(c.id, c.source)
    return nb

def readme():
    "Execute nbs/index.ipynb in place and write README.md from it."
    path = NBS/'index.ipynb'
    nbformat.write(executed(path), path)
    subprocess.run(['nbdev_clean', '--fname', str(path)], cwd=ROOT, check=True)
    put(ROOT/'README.md', render(nbformat.read(path, 4)))

def execute(*paths):
    "Store fresh outputs in notebooks, cleaned."
    for path in map(Path, paths):
        nbformat.write(executed(path, 1800), path)
        subprocess.run(['nbdev_clean', '--fname', str(path)], cwd=ROOT, check=True)

# --------------------------------------------------------------------------------------- site

def public_names():
    "Exported name → its full name, for links from prose to the API pages; doubtful ones left out."
    sys.path.insert(0, str(ROOT))
    from bicl._modidx import d
    found = {}
    for full in (n for syms in d['syms'].values() for n in syms):
        name = '.'.join(full.split('.')[2:]) # without bicl.module
        private = any(p.startswith('_') for p in name.split('.'))
        if not private: found.setdefault(name, []).append(full)
    return {k: v[0] for k, v in found.items() if len(v) == 1}

def link_names(text, names):
    "Inline code that names something exported becomes a link to its reference."
    def fix(m): return f'{{py:obj}}`{m[1]} <{names[m[1]]}>`' if m[1] in names else m[0]
    # not in fences, headings, formulas and links
    other = r'(^```.*?^```|^#.*$|\$\$.*?\$\$|\[[^\]]*\]\([^)]*\))'
    pattern = re.compile(r'(?<![`\w}])`([A-Za-z][\w.]*)(?:\(\))?`(?!`)')
    parts = re.split(other, text, flags=re.M | re.S)
    return ''.join(p if i % 2 else pattern.sub(fix, p) for i, p in enumerate(parts))

def described(path):
    "What the panels, axes and lines of a figure are: `save_figure` notes it in the file."
    text = path.read_text(encoding='utf-8') if path.suffix == '.svg' and path.exists() else ''
    found = re.search(r'<dc:description>(.*?)</dc:description>', text, re.S)
    return f'. {" ".join(found[1].split())}' if found else ''

def with_captions(text, folder):
    "Pictures that stand alone become figures: their text as the caption, and described for who cannot see them."
    def fix(m):
        alt = re.sub(r'\\(.)', r'\1', m[1]) + described(ROOT/folder/m[2])
        return f'```{{figure}} {m[2]}\n:alt: {alt}\n\n{m[1]}\n```'
    return re.sub(r'^!\[([^\n]+)\]\(([^)\s]+)\)$', fix, text, flags=re.M)

def aligned(text):
    "Columns of words start at the left; only numbers end at the right."
    cut, lines = (lambda line: re.split(r'(?<!\\)\|', line)[1:-1]), text.split('\n')
    plain = lambda cell: re.sub(r'<[^>]*>|[*_`[(†‡]', '', cell).strip()
    for i, line in enumerate(lines):
        if not re.fullmatch(r'\|(?: *:?-+:? *\|)+', line): continue
        below = [cut(x) for x in itertools.takewhile(lambda x: x.startswith('|'), lines[i + 1:])]
        words = lambda k, below=below: [plain(row[k])[0].isalpha() for row in below if k < len(row) and plain(row[k])]
        lines[i] = '|' + '|'.join(' :-- ' if sum(w := words(k)) > len(w)/2 else mark for k, mark in enumerate(cut(line))) + '|'
    return '\n'.join(lines)

def with_runs(text):
    "Links to executed notebooks of runs become links to their pages, which Sphinx does not know."
    return re.sub(r'\[([^][]+)\]\(((?:[^)\s]*/)?runs/[^)\s]+)\.ipynb\)', r'<a class="run" href="\2.html">\1</a>', text)

def plain(text, most=220):
    "The beginning of a text without markup, for who cannot see the picture below it."
    text = re.sub(r'\$+|\]\([^)]*\)|[*`>#\[]|\\[a-zA-Z]+|[\\{}]', ' ', text.strip().split('\n\n')[-1])
    text = ' '.join(text.split()).rstrip(':.')
    return text if len(text) <= most else text[:most].rsplit(' ', 1)[0] + ' …'

def split(cell):
    "A cell as the site shows it: what it displays as Markdown becomes Markdown."
    if cell.cell_type == 'markdown': return [cell]
    texts = [o.data['text/markdown'] for o in cell.outputs if 'text/markdown' in o.get('data', {})]
    cell.outputs = [o for o in cell.outputs if 'text/markdown' not in o.get('data', {})]
    empty = 'remove-input' in cell.metadata.tags and not cell.outputs
    return [cell][empty:] + [nbformat.v4.new_markdown_cell(t) for t in texts]

def add_notebook(path, names):
    "Copy a notebook as the site shows it."
    nb, before = read(path), title(path)
    nb.cells = [part for c in shown(nb) for part in split(c)]
    for c in nb.cells:
        if c.cell_type == 'markdown':
            before = plain(c.source) or before
            c.source = with_runs(with_captions(link_names(aligned(c.source), names), path.parent.relative_to(ROOT)))
        elif any('image/png' in o.get('data', {}) for o in c.outputs):
            c.metadata['mystnb'] = dict(image=dict(alt=f'Figure: {before}'))
    out = SOURCE/path.relative_to(ROOT)
    out.parent.mkdir(parents=True, exist_ok=True)
    put(out, nbformat.v4.writes(nb))
    return path.relative_to(ROOT).with_suffix('').as_posix()

def add_part(name, head, text, entries):
    "A page that leads to others, which the sidebar folds below it; entries are (title, page, summary)."
    lines = [f'- {{doc}}`{t} </{page}>`' + f': {s}'*bool(s) for t, page, s in entries]
    tree = toctree('', [f'{t} </{page}>' for t, page, _ in entries])
    put(SOURCE/f'{name}.md', '\n'.join([f'# {head}\n', f'{text}\n', *lines, '', tree]))
    return name

def full_name(mod): return 'bicl' if mod == '__init__' else f'bicl.{mod}'

def add_api(chapters):
    "One page per exported module: (title, page, summary) of each."
    (SOURCE/'api').mkdir()
    for path, mod in chapters:
        doc, head = path.relative_to(ROOT).with_suffix('').as_posix(), full_name(mod)
        put(SOURCE/'api'/f'{mod}.rst', f'{head}\n{"=" * len(head)}\n\n'
            f'Explained and tested in chapter {path.stem.split("_")[0]}, '
            f':doc:`{title(path)} </{doc}>`.\n\n'
            f'.. automodule:: {head}\n   :members:\n')
    return [(full_name(m), f'api/{m}', said(p)) for p, m in chapters]

def add_files():
    "Files beside the notebooks that they link to: grids, presets and the paper's table."
    for p in [*NBS.rglob('*.yaml'), *NBS.rglob('*.csv')]:
        (SOURCE/p.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(p, SOURCE/p.relative_to(ROOT))

def versions():
    "The Markdown version of a page, below reports/ → the page, which the site shows instead."
    from bicl.figures import asked
    found = {}
    for path in notebooks('pages'):
        given = asked(read(path))
        folder = f'{given["grid"]}/' if path.stem == 'grid' else ''
        name = given.get('page', f'{path.stem}.md')
        found[f'reports/{folder}{name}'] = path.relative_to(ROOT).as_posix()
    return found

def add_reports():
    "What the pages link to: tables, figures, and the pages of single grids."
    src, out, instead = ROOT/'reports', SOURCE/'reports', versions()
    out.mkdir()
    if src.exists(): shutil.copytree(src, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
        '.*', '*.tmp', 'runs', 'checkpoints'))
    for name in instead: (SOURCE/name).unlink(missing_ok=True)
    for path in [*out.rglob('*.md'), *(SOURCE/'nbs').rglob('*.ipynb')]:
        here = path.relative_to(SOURCE).parent.as_posix()
        text = path.read_text(encoding='utf-8')
        for name, page in instead.items():
            old, new = (f']({posixpath.relpath(x, here)})' for x in (name, page))
            text = text.replace(old, new)
        # pages link to these; in the sidebar they would be a second list of results
        if path.suffix == '.md': text = f'---\norphan: true\n---\n\n{with_runs(with_captions(aligned(text), here))}'
        put(path, text)

def toctree(caption, entries):
    head = f':caption: {caption}\n' if caption else ''
    return f'```{{toctree}}\n:hidden:\n{head}\n' + '\n'.join(entries) + '\n```\n'

def add_all():
    "Lay out everything that Sphinx reads; what each page is about."
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    names, about = public_names(), {}
    def added(path, number=''):
        page = add_notebook(path, names)
        about[page] = said(path)
        return number + title(path), page, said(path)
    results, tutorials, experiments = ([added(p) for p in notebooks(d) if p != ANY] for d in ('pages', 'tutorials', 'experiments'))
    book = [add_part(f'part-{i}', part, 'The chapters of this part, in the order in which they build on each other:',
                     [added(p, f'{p.stem[:2]} · ') for p in chapters(part)]) for i, part in enumerate(PARTS, 1)]
    add_files()
    add_reports()
    api = add_api([(p, m) for p in sorted(NBS.glob('[0-9]*.ipynb')) if (m := module_of(p))])
    about |= {page: text for _, page, text in api}
    more = [add_part('experiments', 'Experiments', 'Notebooks that {doc}`the runner </nbs/22_runner>` executes with other '
                     'parameters, one for each kind of run, and a page for the results of any grid:',
                     [*experiments, added(ANY)]),
            add_part('reference', 'Reference', 'Every module, with all its functions and their parameters:', api)]
    shutil.copy(SITE/'explorer.md', SOURCE)
    pages = lambda entries: [page for _, page, _ in entries]
    trees = [('Results', [*pages(results[:1]), 'explorer', *pages(results[1:])]), ('Tutorials', pages(tutorials)),
             ('The book', book), ('More', more)]
    # the landing page has a title of its own
    body = re.sub(r'\A# .*\n+> .*\n', '', render(nbformat.read(NBS/'index.ipynb', 4)))
    body = with_runs(with_captions(aligned(body), '.'))
    put(SOURCE/'index.md', '\n'.join([(SITE/'landing.md').read_text(encoding='utf-8'), body,
        *(toctree(c, e) for c, e in trees if e)]))
    return about

def datatables():
    "The library of the explorer's table as a script that works without a server, too: no module."
    text = (Path(find_spec('itables').origin).parent/'html'/'dt_bundle.js').read_text(encoding='utf-8')
    names = dict(reversed(n.split(' as ')) for n in re.search(r'export\{([^}]*)\};?', text)[1].split(','))
    return '(() => {' + re.sub(r'export\{[^}]*\};?', f'window.DataTable={names["default"]};', text) + '\n})();\n'

def add_runs(site):
    "The pages of all runs, and what the explorer loads."
    import runs
    found = runs.all_runs()
    runs.write_pages(found, site)
    runs.write_data(found, site/'_static'/'results.js')
    put(site/'_static'/'datatables.js', datatables())

def docs():
    "Build the site; any warning is an error, and then _docs/ stays as it was."
    gc.disable() # pages are trees that stay until the end: to look for garbage in them is a sixth of the time
    about, new = add_all(), ROOT/'build'/'site'
    shutil.rmtree(new, ignore_errors=True)
    from sphinx.cmd.build import build_main # here: another process would import the package once more
    options = ['-W', '--keep-going', '-q', '-E', '-c', SITE, '-d', ROOT/'build'/'doctrees', SOURCE, new]
    if build_main([str(o) for o in options]): sys.exit('The site was not built: the warnings above are errors.')
    put(new/'_static'/'summaries.js', f'const SUMMARIES = {json.dumps(about, ensure_ascii=False)};\n')
    add_runs(new)
    shutil.rmtree(ROOT/'_docs', ignore_errors=True)
    new.rename(ROOT/'_docs')

if __name__ == '__main__':
    todo = {'readme': readme, 'docs': docs, 'execute': execute}
    if len(sys.argv) < 2 or sys.argv[1] not in todo: sys.exit(__doc__)
    todo[sys.argv[1]](*sys.argv[2:])
