"""Line charts of metrics over steps, as SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from statistics import fmean

from realhf.apps.view.timeline_svg import CHAR_WIDTH, COLOURS, LINE, ticks

WIDTH, HEIGHT, LEFT, TOP, FOOT = 460, 150, 60, 44, 24
MAX_POINTS = 300  # per curve
Curve = Sequence[tuple[float, float]]  # (step, value) in order of steps


def downsample(curve: Curve, n_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most ``n_points`` points, the means of equally long runs; infinite values and NaN are dropped."""
    finite = [(step, value) for step, value in curve if isfinite(value)]
    size = -(-len(finite) // n_points) if finite else 1
    runs = [finite[i : i + size] for i in range(0, len(finite), size)]
    return [(fmean(step for step, _ in run), fmean(value for _, value in run)) for run in runs]


def curves_svg(title: str, curves: Mapping[str, Curve]) -> str:
    """Return a chart of curves with common axes; empty if no curve has a point."""
    lines = {name: points for name, curve in curves.items() if (points := downsample(curve))}
    if not lines:
        return ""
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin

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
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(points) == 1:
            x_at, y_at = at(*points[0])
            parts.append(f'<circle cx="{x_at:.1f}" cy="{y_at:.1f}" r="2.5" fill="{colour}"/>')
        label = f"{name} {points[-1][1]:.4g}"
        parts.append(f'<text x="{x:.0f}" y="{16 + LINE}" fill="{colour}">{escape(label)}</text>')
        x += CHAR_WIDTH * len(label) + 14
    return "\n".join([*parts, "</svg>"])


def _grid(low: float, high: float, x: float) -> list[str]:
    step = ticks((high - low) * 2)[1]
    parts, value = [], -(-low // step) * step + 0.0
    while value <= high:
        y = TOP + (high - value) / (high - low) * HEIGHT
        parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{x + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{round(value / step) * step:.4g}</text>')
        value += step
    return parts
