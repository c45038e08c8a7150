"""Sphinx's settings: it reads the repository as it is, and writes nothing of it but
`docs/reference/`."""

import json
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path

from branchgrpo.reproduction.answers import FRONT_PAGE
from branchgrpo.site.build import EXPLORER, WHOLE, describe, front_page, shown_notebook
from branchgrpo.site.explorer import explorer_page

project = html_title = "branchgrpo"
author = "The branchgrpo developers"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax"]
root_doc = "nbs/index"
include_patterns = ["nbs/**.ipynb", "reproduce/**.ipynb", "figures/**.md", "docs/**", "*.md"]
exclude_patterns = ["**/.ipynb_checkpoints", ".*", "README.md", "_*", "branchgrpo", "build", "runs"]
exclude_patterns += ["docs/templates", "docs/extra"]
suppress_warnings = ["ref.python"]  # a type that two modules have

nb_execution_mode = "off"  # outputs are those that are stored
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables in outputs too
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = ["docs/reference.md"]
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "member-order": "bysource",
    "no-value": True,
}
autodoc_preserve_defaults = True
default_role = "code"
highlight_language = "bash"  # of a block that names none: commands
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
templates_path = [str(Path(__file__).parent / "templates")]

html_theme = "furo"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#00639c"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#6fc0ee"},
}
html_static_path = ["static", f"{import_module('sphinx-mathjax-offline').__path__[0]}/static"]
mathjax_path = "mathjax/tex-chtml.js"
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "static/scorer.js")  # pages for users first
html_extra_path = ["extra"]  # the first address
html_favicon = "static/icon.svg"
html_copy_source = html_show_sourcelink = html_show_copyright = False


LIST = re.compile(
    r'<p class="caption" role="heading">(.*?)</p>\s*(<ul.*?)(?=<p class="caption"|</div>\s*$|\Z)',
    re.DOTALL,
)


def page_source(app, docname, source):
    "Replace the text of a notebook by what its page shows; put the explorer into its page."
    root, file = (
        Path(app.srcdir),
        Path(app.env.doc2path(docname)).relative_to(app.srcdir).as_posix(),
    )
    if file == EXPLORER:
        source[0] += WHOLE
    if not file.endswith(".ipynb"):
        return
    notebook = json.loads(source[0])
    if file == FRONT_PAGE:
        notebook = front_page(
            notebook, (root / "docs/templates/navigation.md").read_text(encoding="utf-8")
        )
    source[0] = json.dumps(shown_notebook(notebook, is_result=file.startswith("reproduce/")))


def skip_field(app, what, name, item, skip, options):
    """Return True for a field of a class, which has its comment beside the class's arguments; None:
    autodoc decides."""
    return (
        True
        if what == "class" and not (callable(item) or isinstance(item, property | cached_property))
        else None
    )


def own_branch(app, page, template, context, doctree):
    """Let the navigation of a page show its own branch: hundreds of entries on every page are slow
    and large."""
    whole = context["toctree"]
    context["toctree"] = lambda **options: whole(**options | {"collapse": True})


def fold_navigation(app, page, template, context, doctree):
    "Fold each list of the navigation, but for the first and that of the page."
    tree = context.get("furo_navigation_tree", "")

    def folded(part):
        first = part.start() == tree.find('<p class="caption"')
        opened = " open" if first or "current" in part[2] else ""
        return f"<details{opened}><summary>{part[1]}</summary>{part[2]}</details>"

    context["furo_navigation_tree"] = LIST.sub(folded, tree)


def finish(app, error):
    "Write the explorer's page, if the build has succeeded."
    if error is None:
        (Path(app.outdir) / "explore.html").write_text(explorer_page(), encoding="utf-8")


def setup(app):
    app.connect("source-read", page_source)
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-skip-member", skip_field)
    app.connect("html-page-context", own_branch, priority=400)
    app.connect("html-page-context", fold_navigation, priority=900)
    app.connect("build-finished", finish)
