"""How Sphinx builds these pages: `make docs`. Pages fetch nothing: no fonts, no scripts, no analytics."""

import re

import forebay

project = "forebay"
author = "the forebay contributors"
copyright = author  # noqa: A001
version = release = forebay.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"forebay {release}"
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
exclude_patterns = ["guide.md"]
# Torch's pages are elsewhere, and links to them would be the only ones that leave the site.
nitpick_ignore_regex = [("py:.*", r"torch\..*|abc\..*|collections\..*")]


def leave_out_links_to_sources(app, page, source):
    """Show links to files beside `docs/` as text: the site has only the pages."""
    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./(?!integrations)[^)]+\)", r"\1", source[0])


def setup(app):
    """Register what is above."""
    app.connect("source-read", leave_out_links_to_sources)
