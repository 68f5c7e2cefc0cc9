"""The settings of the site that ``make docs`` builds with Sphinx."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "extensions"))

import inventories  # noqa: E402
import names  # noqa: E402

from flowrl import __version__  # noqa: E402
from flowrl.core.graphs.algorithm import Algorithm  # noqa: E402
from flowrl.graphs.variants import EditedAlgorithm  # noqa: E402

project = "flowrl"
author = "the authors of flowrl"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "docstrings",
    "names",
    "pages",
    "flowcharts",
    "languages",
    "code_links",
]
nitpicky = True
default_role = "name"
exclude_patterns = ["errors/*", "pictures/*", "curves/*", "locales/*"]

language = "en"  # `make docs` builds zh_CN, too
locale_dirs = ["locales"]
gettext_compact = False  # one catalog a page
gettext_location = False

myst_heading_anchors = 6  # links to headings, as on GitHub

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "none"  # docstrings.py writes them
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True

intersphinx_mapping = inventories.write(DOCS.parent / "build" / "inventories")

html_theme = "furo"
html_title = "flowrl"
templates_path = ["templates"]
html_sidebars = {
    "**": [
        f"sidebar/{part}.html" for part in ("brand", "search", "scroll-start", "navigation", "language", "scroll-end")
    ]
}
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False

for module in map(importlib.import_module, names.MODULES):
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)  # autodoc does not see a name before its first use
        if isinstance(value, Algorithm | EditedAlgorithm):  # nor an object: it documents the function, as it is called
            called = value.parameters if isinstance(value, Algorithm) else inspect.signature(value)
            value.__wrapped__.__signature__ = called.replace(return_annotation="Graph")
            setattr(module, name, value.__wrapped__)
