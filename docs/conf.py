"""Sphinx's settings: it reads the repository as it is, and writes nothing of it but `docs/reference/`."""

from importlib import import_module
from pathlib import Path

from branchgrpo.site import build

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
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource", "no-value": True}
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


def setup(app):
    app.connect("source-read", build.page_source)
    app.connect("autodoc-process-docstring", build.describe)
    app.connect("autodoc-skip-member", build.skip_field)
    app.connect("html-page-context", build.own_branch, priority=400)
    app.connect("html-page-context", build.fold_navigation, priority=900)
    app.connect("build-finished", build.finish)
