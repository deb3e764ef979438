"""README.md and the documentation site, both from the notebooks.

    python nbs/_site/build.py readme    execute nbs/index.ipynb, write README.md
    python nbs/_site/build.py docs      build _docs/ (warnings are errors)
"""
import posixpath, re, shutil, subprocess, sys
from pathlib import Path

import nbformat

SITE = Path(__file__).resolve().parent
ROOT = SITE.parent.parent
NBS = ROOT/'nbs'
SOURCE = ROOT/'build'/'docs' # what Sphinx reads: notebooks and reports as they are shown

def put(path, text, mode='w'):
    with open(path, mode, encoding='utf-8') as f: f.write(text)

# ---------------------------------------------------------------------------------- notebooks

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

def title(path):
    "The first heading of a notebook."
    text = '\n'.join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == 'markdown')
    found = re.search(r'^# +(.+)$', text, re.M)
    return re.sub(r'[*`$]', '', found[1]).strip() if found else path.stem

def module_of(path):
    "The module that a notebook exports, if it does."
    for c in nbformat.read(path, 4).cells:
        if m := re.search(r'^#\| *default_exp +(\S+)', c.source, re.M): return m[1]

# ------------------------------------------------------------------------------------- README

def to_root(text):
    "Links that work from nbs/ turned into links that work from the project's root."
    def fix(m):
        url = m[2]
        if re.match(r'[a-z]+:|#|/', url): return m[0]
        path, sep, anchor = url.partition('#')
        return m[1] + posixpath.normpath(posixpath.join('nbs', path)) + sep + anchor + m[3]
    return re.sub(r'(\]\(|src="|href=")([^)"\s]+)([)"])', fix, text)

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

def executed(path=NBS/'index.ipynb'):
    "The notebook with fresh outputs; cells marked `eval: false` are not run."
    from nbclient import NotebookClient
    nb = nbformat.read(path, 4)
    kept = {c.id: c.source for c in nb.cells if 'eval: false' in directives(c)}
    for c in nb.cells:
        if c.id in kept: c.source = ''
    NotebookClient(nb, timeout=300, resources={'metadata': {'path': str(path.parent)}}).execute()
    for c in nb.cells: c.source = kept.get(c.id, c.source)
    return nb

def readme():
    "Execute nbs/index.ipynb in place and write README.md from it."
    path = NBS/'index.ipynb'
    nbformat.write(executed(path), path)
    subprocess.run(['nbdev_clean', '--fname', str(path)], cwd=ROOT, check=True)
    put(ROOT/'README.md', render(nbformat.read(path, 4)))

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

def add_notebook(path, names):
    "Copy a notebook as the site shows it."
    nb = nbformat.read(path, 4)
    nb.cells = list(shown(nb))
    for c in nb.cells:
        if c.cell_type == 'markdown': c.source = link_names(c.source, names)
    out = SOURCE/path.relative_to(ROOT)
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, out)
    return path.relative_to(ROOT).with_suffix('').as_posix()

def add_api(chapters):
    "One page per exported module."
    (SOURCE/'api').mkdir()
    for path, mod in chapters:
        doc, head = path.relative_to(ROOT).with_suffix('').as_posix(), f'bicl.{mod}'
        put(SOURCE/'api'/f'{mod}.rst', f'{head}\n{"=" * len(head)}\n\n'
            f'Explained and tested in chapter {path.stem.split("_")[0]}, '
            f':doc:`{title(path)} </{doc}>`.\n\n'
            f'.. automodule:: {head}\n   :members:\n')
    return [f'bicl.{m} <api/{m}>' for _, m in chapters]

def add_reports():
    "The Markdown pages below reports/: each folder's index.md, with its other pages below it."
    src, out = ROOT/'reports', SOURCE/'reports'
    out.mkdir()
    if src.exists():
        shutil.copytree(src, out, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns('.*', '*.tmp', 'runs', 'checkpoints'))
    if not (out/'index.md').exists():
        put(out/'index.md', '# Results\n\nThe experiments have not been run yet: `make reproduce` '
            'runs a small version in five minutes, `make paper` runs them all.\n')
    add_rest(out)
    folders = sorted({p.parent for p in out.rglob('index.md')}, key=lambda p: (len(p.parts), p))
    loose = sorted(p.with_suffix('') for p in out.rglob('*.md') if p.parent not in folders)
    for d in folders:
        pages = sorted(p.stem for p in d.glob('*.md') if p.name != 'index.md')
        if pages: put(d/'index.md', '\n' + toctree('', pages), 'a')
    return [p.relative_to(SOURCE).as_posix() for p in [*(d/'index' for d in folders), *loose]]

def add_rest(out):
    "A page for the tables and figures that no other page names."
    text = '\n'.join(p.read_text(encoding='utf-8') for p in out.rglob('*.md'))
    show = {'.svg': '![{0}]({1})', '.csv': '```{{csv-table}}\n:file: {1}\n:header-rows: 1\n```'}
    rest = [p.relative_to(out) for p in sorted(out.rglob('*.*'))
            if p.suffix in show and p.name not in text]
    if not rest: return
    body = [f'## {p.stem.replace("-", " ").replace("_", " ").capitalize()}\n\n' +
            show[p.suffix].format(p.stem, p.as_posix()) for p in rest]
    put(out/'more.md', '\n\n'.join(['# More tables and figures', *body]) + '\n')

def toctree(caption, entries):
    head = f':caption: {caption}\n' if caption else ''
    return f'```{{toctree}}\n:hidden:\n{head}\n' + '\n'.join(entries) + '\n```\n'

def add_all():
    "Lay out everything that Sphinx reads."
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    names = public_names()
    chapters = sorted(p for p in NBS.glob('[0-9]*.ipynb'))
    book = [f'{p.stem.split("_")[0]} · {title(p)} <{add_notebook(p, names)}>' for p in chapters]
    more = {d: [add_notebook(p, names) for p in sorted((NBS/d).glob('[!_.]*.ipynb'))]
            for d in ('tutorials', 'experiments')}
    order = ['nbs/tutorials/quickstart'] # the rest by name
    more['tutorials'].sort(key=lambda p: (p not in order, p))
    api = add_api([(p, m) for p in chapters if (m := module_of(p))])
    trees = [('The book', book), ('Tutorials', more['tutorials']),
             ('Experiments', more['experiments']), ('Results', add_reports()), ('Reference', api)]
    # the landing page has a title of its own
    body = re.sub(r'\A# .*\n+> .*\n', '', render(nbformat.read(NBS/'index.ipynb', 4)))
    put(SOURCE/'index.md', '\n'.join([(SITE/'landing.md').read_text(encoding='utf-8'), body,
        *(toctree(c, e) for c, e in trees if e)]))

def docs():
    "Build the site; any warning is an error, and then _docs/ stays as it was."
    add_all()
    new = ROOT/'build'/'site'
    shutil.rmtree(new, ignore_errors=True)
    done = subprocess.run([sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', '-j', 'auto',
                           '-c', SITE, '-d', ROOT/'build'/'doctrees', SOURCE, new], cwd=ROOT)
    if done.returncode: sys.exit('The site was not built: the warnings above are errors.')
    shutil.rmtree(ROOT/'_docs', ignore_errors=True)
    new.rename(ROOT/'_docs')

if __name__ == '__main__':
    todo = {'readme': readme, 'docs': docs}
    if len(sys.argv) != 2 or sys.argv[1] not in todo: sys.exit(__doc__)
    todo[sys.argv[1]]()
