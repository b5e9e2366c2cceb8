"""Draws boxes, arrows and text as SVG that is legible on light and on dark pages."""

from collections.abc import Sequence
from html import escape

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px } .bold { font-weight: 600 } .soft { fill: #59636e }
.mono { font: 12px ui-monospace, Menlo, Consolas, monospace; white-space: pre }
.card { fill: #ffffff; stroke: #d1d9e0 }
.box { fill: #f6f8fa; stroke: #818b98 } .empty { fill: none; stroke: #818b98 }
.c0 { fill: #ddf4ff; stroke: #0969da } .c1 { fill: #dafbe1; stroke: #1a7f37 }
.c2 { fill: #fff8c5; stroke: #9a6700 } .c3 { fill: #fbefff; stroke: #8250df }
.arrow { fill: none; stroke: #59636e; stroke-width: 1.3 } .thick { stroke-width: 2.4 } .dashed { stroke-dasharray: 4 3 }
.head { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .soft { fill: #9198a1 }
  .card { fill: #161b22; stroke: #3d444d } .box { fill: #21262d; stroke: #656c76 } .empty { stroke: #656c76 }
  .c0 { fill: #0c2d6b; stroke: #4493f8 } .c1 { fill: #0f3d20; stroke: #3fb950 }
  .c2 { fill: #4b2f00; stroke: #d29922 } .c3 { fill: #3b1e66; stroke: #ab7df8 }
  .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
}
"""
HEAD = ('<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker>')  # fmt: skip
INVERTED = ("<style>@media (prefers-color-scheme: dark) { :root { filter: invert(0.9) hue-rotate(180deg) } }</style>"
            '<rect width="100%" height="100%" fill="#fff"/>')  # fmt: skip
Point = tuple[float, float]


class Drawing:
    """Collects elements on a card of a fixed size."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{HEAD}</defs>",
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, "card", 8)

    def rect(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 5) -> None:
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
                          f'rx="{radius:g}"/>')  # fmt: skip

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, lines: Sequence[str], kind: str = "box") -> None:
        """Draw a box with a bold first line and small further lines, centred."""
        self.rect(x, y, width, 12 + 17 * len(lines), kind)
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + 18 + 17 * i, line, "small" if i else "bold", "middle")

    def arrow(self, start: Point, end: Point, kind: str = "") -> None:
        """Draw a curve that leaves and arrives horizontally."""
        (x0, y0), (x1, y1) = start, end
        bend = (x1 - x0) / 2
        self._path(f"M{x0:g} {y0:g} C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}", kind)

    def line(self, start: Point, end: Point, kind: str = "") -> None:
        self._path(f"M{start[0]:g} {start[1]:g} L{end[0]:g} {end[1]:g}", kind)

    def _path(self, d: str, kind: str) -> None:
        self.parts.append(f'<path class="arrow {kind}" d="{d}" marker-end="url(#head)"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def terminal(lines: Sequence[str], title: str) -> str:
    """Return a picture of the text of a terminal."""
    drawing = Drawing(28 + 7.3 * max(map(len, lines)), 26 + 17 * len(lines), title)
    for i, line in enumerate(lines):
        drawing.text(14, 26 + 17 * i, line, "mono")
    return drawing.svg()


def for_both_schemes(svg: str) -> str:
    """Invert a picture with a white background where the reader prefers dark pages."""
    start = svg.index(">") + 1
    return svg[:start] + INVERTED + svg[start:]
