"""Tables as aligned text, of which only the last column wraps, and in HTML pages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

HARD_SPACE = "\xa0"
MIN_LAST_COLUMN = 24  # width in characters


@dataclass(frozen=True)
class Listing:
    """A titled table. ``align`` has ``l`` or ``r`` for every column; ``header`` may be empty."""

    title: str
    align: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self, width: int) -> str:
        """Return the lines without the title; the last column breaks only after commas and semicolons."""
        lines = [self.header, *self.rows] if self.header else [*self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        last_width = max(MIN_LAST_COLUMN, width - sum(widths[:-1]) - 2 * (len(widths) - 1))
        return "\n".join(line for cells in lines for line in self._lines(cells, widths, last_width))

    def _lines(self, cells: tuple[str, ...], widths: list[int], last_width: int) -> list[str]:
        text = re.sub(r"(?<![,;]) ", HARD_SPACE, cells[-1])
        parts = wrap(text, last_width, break_long_words=False, break_on_hyphens=False) or [""]
        parts = [part.replace(HARD_SPACE, " ") for part in parts]
        columns = zip(cells[:-1], self.align, widths, strict=False)
        start = "".join((c.rjust(n) if align == "r" else c.ljust(n)) + "  " for c, align, n in columns)
        if self.align[-1] == "r":
            parts[0] = parts[0].rjust(widths[-1])
        return [(start + parts[0]).rstrip(), *(" " * len(start) + part for part in parts[1:])]


def size_text(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def render_page(title: str, timelines: Sequence[str], tables: Sequence[Listing]) -> str:
    """Return one self-contained page from the template ``plan.html.j2``. ``timelines`` are SVG images."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("realhf.apps", "view")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("plan.html.j2").render(title=title, timelines=timelines, tables=tables)
