"""HTML pages of `realhf report` and `realhf plan --out FILE.html`, from the template ``report.html.j2``."""

from collections.abc import Sequence

from realhf.apps.view.tables import Listing


def render_page(title: str, timelines: Sequence[str], tables: Sequence[Listing], **parts: object) -> str:
    """Return one self-contained page. ``timelines`` are SVG images; ``parts`` are the optional parts of the template:

    ``curves`` (SVG images), ``note``, ``samples`` (rows with prompt and response) and ``samples_step``, and ``config``
    (the path of the options).
    """
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("realhf.apps", "view")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html.j2").render(title=title, timelines=timelines, tables=tables, **parts)
