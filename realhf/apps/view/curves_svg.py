"""Curves over steps as pictures: a line for each name, over one axis of steps."""

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from statistics import fmean

from realhf.apps.view.timeline_svg import CHAR_WIDTH, COLOURS, LINE, ticks

WIDTH, HEIGHT, LEFT, TOP, FOOT = 460, 150, 60, 44, 24
MAX_POINTS = 300
"""Of a curve that has more, neighbours are averaged."""
Curve = Sequence[tuple[float, float]]
"""Steps, in their order, each with a value."""


def downsample(curve: Curve, most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most so many points: means of runs of equally many neighbours."""
    finite = [(step, value) for step, value in curve if isfinite(value)]
    each = -(-len(finite) // most) if finite else 1
    runs = [finite[i : i + each] for i in range(0, len(finite), each)]
    return [(fmean(step for step, _ in run), fmean(value for _, value in run)) for run in runs]


def curves_svg(title: str, curves: Mapping[str, Curve]) -> str:
    """Return a picture of curves that share their axes; empty where none of them has a point."""
    drawn = {name: points for name, curve in curves.items() if (points := downsample(curve))}
    if not drawn:
        return ""
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = _bounds(min(values), max(values))

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * WIDTH
        return x, TOP + (high - value) / (high - low) * HEIGHT

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{TOP + HEIGHT + FOOT}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{escape(title)}</text>',
        *_grid(low, high, at(first, low)[0]),
        *(f'<text x="{at(step, low)[0]:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="{anchor}">{step:g}</text>'
          for step, anchor in ((first, "start"), (last, "end"))),
    ]  # fmt: skip
    x = float(LEFT)
    for number, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(points) == 1:
            x_at, y_at = at(*points[0])
            parts.append(f'<circle cx="{x_at:.1f}" cy="{y_at:.1f}" r="2.5" fill="{colour}"/>')
        words = f"{name} {points[-1][1]:.4g}"
        parts.append(f'<text x="{x:.0f}" y="{16 + LINE}" fill="{colour}">{escape(words)}</text>')
        x += CHAR_WIDTH * len(words) + 14
    return "\n".join([*parts, "</svg>"])


def _bounds(low: float, high: float) -> tuple[float, float]:
    """Return an axis that holds values with a little room."""
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _grid(low: float, high: float, x: float) -> list[str]:
    """Draw lines at round values."""
    step = ticks((high - low) * 2)[1]
    parts, value = [], -(-low // step) * step
    while value <= high:
        y = TOP + (high - value) / (high - low) * HEIGHT
        parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{x + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        value += step
    return parts
