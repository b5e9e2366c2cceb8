"""Configuration of the documentation site; `make docs` builds it. Pages are Markdown, which GitHub shows too."""

import re
import sys
from pathlib import Path

from pygments.lexers.data import JsonLexer
from sphinx.application import Sphinx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from realhf.base.version import __version__  # noqa: E402

project = "realhf"
author = "the realhf contributors"
version = release = __version__
extensions = ["myst_parser", "mathml"]
exclude_patterns = ["**/.*"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"realhf {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
highlight_language = "none"

OUTSIDE = re.compile(r"\]\((?=(?:\.\./)+(?:benchmarks|experiments|CONTRIBUTING))([^)#]+)(#[^)]*)?\)")


def link_files_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """Offer Markdown files outside of docs/, which are no pages of the site, as downloads."""
    source[0] = OUTSIDE.sub(r"](path:\1)", source[0])


def setup(app: Sphinx) -> None:
    app.add_lexer("jsonl", JsonLexer)
    app.connect("source-read", link_files_outside)
