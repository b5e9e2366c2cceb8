"""Renders the page: one HTML file without references, whose scripts and styles are allowed by their digests."""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from realhf.apps.view.report.page_data import PageContent
from realhf.apps.view.report.text import clean

if TYPE_CHECKING:
    from jinja2 import Template

SCRIPTS = ("charts.js", "responses.js", "page.js")
STYLE = "page.css"
POLL_MS = 2000


def render(content: PageContent, follow: bool = False) -> str:
    """Return the page; with ``follow`` it loads itself again and shows what has changed."""
    script, style = assets()
    data = script_json({**content.data, "follow": POLL_MS if follow else 0})
    rules = policy(script, style, follow)
    return _template().render(vars(content), data=data, script=script, style=style, policy=rules)


def script_json(data: Mapping[str, Any]) -> str:
    """Return JSON for a script element: ASCII without characters that could end the element or start a comment."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def policy(script: str, style: str, follow: bool) -> str:
    """Return the content security policy: the page's own script and style, and no network but the server's page."""
    connect = "'self'" if follow else "'none'"
    return (f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; connect-src {connect}; "
            "img-src data:; base-uri 'none'; form-action 'none'")  # fmt: skip


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def assets() -> tuple[str, str]:
    """Return the script and the style of the page."""
    folder = files(__package__)
    parts = [(folder / name).read_text("utf-8") for name in SCRIPTS]
    return "(() => {\n'use strict';\n" + "\n".join(parts) + "})();\n", (folder / STYLE).read_text("utf-8")


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("realhf.apps.view", "report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_finalize)
    return environment.get_template("page.html.j2")


def _finalize(value: Any) -> Any:
    return clean(value) if type(value) is str else value
