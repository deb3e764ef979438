"Sphinx's settings. The pages are laid out by build.py; this file says how they look."
import inspect, re, shutil
from html import escape
from importlib import import_module
from pathlib import Path

from docutils import nodes
from fastcore.docments import docments
from fastcore.script import Param
from sphinx import addnodes

from bicl import __version__

project, author, version = 'bicl', 'the bicl authors', __version__
copyright = '2026, the bicl authors'
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.viewcode', 'sphinx.ext.mathjax',
              'sphinx_copybutton', 'sphinx_design']

# Pages: outputs are stored in the notebooks, nothing is executed here
nb_execution_mode = 'off'
nb_merge_streams = True
myst_enable_extensions = ['amsmath', 'attrs_inline', 'colon_fence', 'deflist', 'dollarmath',
                          'html_image']
myst_heading_anchors = 4
myst_dmath_double_inline = True
suppress_warnings = ['myst.header'] # a figure page or a chapter may skip a heading level

# Reference
autodoc_member_order = 'bysource'
autodoc_inherit_docstrings = False # torch's own docstrings are not ours to show
autodoc_typehints = 'none'         # types stand in the parameter tables
autodoc_class_signature = 'mixed'
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries = False         # `list_objects` does it: these would be carried through every page's navigation
viewcode_follow_imported_members = False # a name is shown where it is documented

# Look
html_theme = 'furo'
html_title = f'bicl {__version__}'
html_static_path = ['custom.css', 'site.js', 'explorer.js']
html_js_files = ['site.js']
html_show_search_summary = False # each result is told in a line of its own: see site.js
html_logo = html_favicon = 'logo.svg'
html_css_files = ['custom.css']
html_show_sourcelink = html_copy_source = False
LINKS = {'The paper': 'https://arxiv.org/abs/2011.01168', 'The repository': 'https://github.com/bicl/bicl'}
html_theme_options = dict(
    footer_icons=[{'name': name, 'url': url, 'html': name, 'class': 'footer-link'} for name, url in LINKS.items()],
    light_css_variables={'color-brand-primary': '#0173b2', 'color-brand-content': '#0173b2'},
    dark_css_variables={'color-brand-primary': '#56b4e9', 'color-brand-content': '#56b4e9'})
pygments_style, pygments_dark_style = 'a11y-high-contrast-light', 'github-dark' # comments that can be read
copybutton_selector = 'div.cell_input pre, div.highlight-python pre, div.highlight-bash pre'
copybutton_exclude = '.linenos, .gp'

# Mathematics: MathJax comes with a Python package, so the site works without a network
mathjax_path = 'mathjax/tex-chtml.js'
MATHJAX = ('tex-chtml.js', 'input/tex/extensions', 'output/chtml/fonts', 'a11y', 'sre', 'ui')

def copy_mathjax(app, error):
    "Copy the part of MathJax that pages may load."
    if error or app.builder.format != 'html': return
    src = Path(import_module('sphinx-mathjax-offline').__file__).parent/'static'/'mathjax'
    dst = Path(app.outdir)/'_static'/'mathjax'
    for part in MATHJAX:
        (dst/part).parent.mkdir(parents=True, exist_ok=True)
        if (src/part).is_dir(): shutil.copytree(src/part, dst/part, dirs_exist_ok=True)
        else: shutil.copy(src/part, dst/part)

# Docstrings are Markdown one-liners; parameters are explained by docments
def rst(text):
    "Inline Markdown (only `code` and $mathematics$ are used) as reStructuredText."
    parts = re.split(r'(`[^`]+`|\$[^$\n]+\$)', text)
    fix = {'`': lambda s: f'``{s[1:-1].strip()}``', '$': lambda s: f':math:`{s[1:-1]}`'}
    escape = lambda s: re.sub(r'([*_|\\`])', r'\\\1', s)
    done = [fix[p[0]](p) if i % 2 else escape(p) for i, p in enumerate(parts)]
    return '\\ '.join(p for p in done if p).replace('\\  ', ' ').strip()

def code(text): return f'``{text}``' if text else ''

def type_name(x):
    "A type as a reader would write it."
    if x in (inspect.Parameter.empty, None, type(None)): return ''
    return re.sub(r'\b(?:typing|torch|collections|pathlib|builtins|bicl)\.(?:[a-z_]+\.)*', '',
                  x if isinstance(x, str) else inspect.formatannotation(x))

def default_of(x):
    "A default value as code, or nothing."
    if x is inspect.Parameter.empty: return ''
    text = x.__name__ if hasattr(x, '__name__') else repr(x)
    return code(text) if len(text) < 60 and ' at 0x' not in text else '…'

def table(obj):
    "A parameter table from docments, as lines of reStructuredText."
    try: found = docments(obj, full=True, args_kwargs=True)
    except (OSError, TypeError, SyntaxError): return []
    for v in found.values(): # fastcore's command-line parameters carry type and meaning themselves
        if isinstance(v.anno, Param): v.docment, v.anno = v.anno.help, v.anno.type
    skip = ('self', 'cls', 'return') if inspect.isclass(obj) else ('self', 'cls')
    rows = [('*returns*' if k == 'return' else code(k), code(type_name(v.anno)),
             default_of(v.default), rst(' '.join((v.docment or '').split())))
            for k, v in found.items() if k not in skip]
    rows = [r for r in rows if r[0] != '*returns*' or any(r[1:])]
    if not any(r[3] for r in rows): return []
    keep = [i for i in range(4) if any(r[i] for r in rows)]
    rows.insert(0, ('Parameter', 'Type', 'Default', 'Meaning'))
    return ['', '.. list-table::', '   :class: docments', '   :header-rows: 1', '   :widths: auto',
            '', *(f'   {"* -" if i == 0 else "  -"} {r[i]}' for r in rows for i in keep), '']

def document(app, what, name, obj, options, lines):
    "Markdown docstring and docments → what Sphinx reads."
    lines[:] = [rst(line) for line in lines]
    if what in ('function', 'method', 'class', 'exception'): lines += table(obj)

def index_prose(app, doctree, docname):
    "The search knows prose, names and headings; code, outputs, formulas and bare numbers only swell it."
    left_out = nodes.literal_block, nodes.math, nodes.math_block
    for node in doctree.findall(nodes.Element):
        output = 'cell_output' in node.get('classes', [])
        bare = isinstance(node, nodes.entry) and not re.search('[A-Za-z]{3}', node.astext())
        if isinstance(node, left_out) or output or bare: node['classes'].append('no-search')

def search_page(app, pagename, templatename, context, doctree):
    if pagename == 'search': app.add_js_file('summaries.js', priority=100)

def list_objects(app, pagename, templatename, context, doctree):
    "What a page of the reference has, in the column beside it."
    if not pagename.startswith('api/'): return
    names, tree = [s for s in doctree.findall(addnodes.desc_signature) if s['ids']], {}
    for s in names: # methods below their class
        owner, _, name = s['fullname'].rpartition('.')
        tree.setdefault(owner or name, []).append(f'<li><a class="reference internal" href="#{s["ids"][0]}">'
                                                  f'<code class="docutils literal notranslate">{escape(name)}</code></a>')
    item = lambda first, *below: first + (f'<ul>{"</li>".join(below)}</li></ul>' if below else '') + '</li>'
    context['toc'] = f'<ul><li><a class="reference internal" href="#">{context["title"]}</a><ul>' \
        f'{"".join(item(*x) for x in tree.values())}</ul></li></ul>'

def setup(app):
    app.connect('html-page-context', list_objects, priority=400) # before the theme looks
    app.connect('doctree-resolved', index_prose)
    app.connect('html-page-context', search_page)
    app.connect('autodoc-process-docstring', document)
    app.connect('build-finished', copy_mathjax)
