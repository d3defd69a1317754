"""Configuration of the site: `make site` builds it from the Markdown in this folder, offline.

It is called from the root of the source tree, which has the package `experiments`."""

from __future__ import annotations

from glassformer.version import __version__

project = "Glassformer"
author = "the Glassformer authors"
version = release = __version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "numpydoc",
    "sphinx_copybutton",
    "experiments.docs.site",
]
root_doc = "index"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "claims/index.html", "zh"]
suppress_warnings = ["myst.header"]  # pages of readings start their parts at the third level

default_role = "code"  # docstrings mark code with single backticks
smartquotes_action = "qe"  # two hyphens are options, not a dash
autosummary_generate = False  # numpydoc loads it
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": False}
numpydoc_show_class_members = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"Glassformer {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = True
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"
