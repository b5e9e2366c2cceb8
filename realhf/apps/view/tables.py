"""Tables of text, for a terminal of any width and for a page: columns are aligned, lists in the last one wrap."""

import re
from dataclasses import dataclass
from textwrap import wrap

HARD_SPACE = "\xa0"
LEAST = 24
"""Characters that the last column has at the least, however narrow the terminal."""


@dataclass(frozen=True)
class Listing:
    """A titled table. ``align`` has ``l`` or ``r`` for every column; ``head`` is empty where none is needed."""

    title: str
    align: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self, width: int) -> str:
        """Return the lines without the title; the last column breaks behind commas and semicolons alone."""
        lines = [self.head, *self.rows] if self.head else [*self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        room = max(LEAST, width - sum(widths[:-1]) - 2 * (len(widths) - 1))
        return "\n".join(line for cells in lines for line in self._lines(cells, widths, room))

    def _lines(self, cells: tuple[str, ...], widths: list[int], room: int) -> list[str]:
        kept = re.sub(r"(?<![,;]) ", HARD_SPACE, cells[-1])
        parts = wrap(kept, room, break_long_words=False, break_on_hyphens=False) or [""]
        parts = [part.replace(HARD_SPACE, " ") for part in parts]
        columns = zip(cells[:-1], self.align, widths, strict=False)
        start = "".join((c.rjust(n) if align == "r" else c.ljust(n)) + "  " for c, align, n in columns)
        if self.align[-1] == "r":
            parts[0] = parts[0].rjust(widths[-1])
        return [(start + parts[0]).rstrip(), *(" " * len(start) + part for part in parts[1:])]
