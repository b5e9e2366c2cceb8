"""Grouped horizontal bars with standard errors, as SVG."""

from collections.abc import Mapping
from html import escape

from realhf.apps.view.timeline_svg import COLOURS

LEFT, WIDTH, ROW, GAP, TOP = 170, 480, 18, 26, 54
Bars = Mapping[str, tuple[float, float]]  # mean and standard error by label


def bars_svg(title: str, axis: str, groups: Mapping[str, Bars]) -> str:
    """Return bars of fractions on an axis from 0 to 100 %; whiskers are one standard error on each side."""
    n_rows = sum(len(bars) for bars in groups.values())
    height = TOP + n_rows * ROW + len(groups) * GAP + 44
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 120}" height="{height}" '
             'font-family="sans-serif" font-size="11">',
             f'<text x="16" y="20" font-size="13" font-weight="bold">{escape(title)}</text>',
             '<text x="16" y="36">Bars: mean over seeds. Whiskers: one standard error.</text>']  # fmt: skip
    bottom = height - 36
    for percent in range(0, 101, 20):
        x = LEFT + WIDTH * percent / 100
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{percent}</text>')
    parts.append(f'<text x="{LEFT + WIDTH / 2:.1f}" y="{bottom + 28}" text-anchor="middle">{escape(axis)}</text>')
    y = float(TOP)
    for name, bars in groups.items():
        parts.append(f'<text x="16" y="{y + 14:.1f}" font-weight="bold">{escape(name)}</text>')
        y += GAP - 6
        for number, (label, (value, error)) in enumerate(bars.items()):
            end, colour, middle = LEFT + WIDTH * value, COLOURS[number % len(COLOURS)], y + ROW / 2 - 2
            low, high = (LEFT + WIDTH * min(1.0, max(0.0, value + sign * error)) for sign in (-1, 1))
            parts.append(f'<text x="{LEFT - 6}" y="{y + 11:.1f}" text-anchor="end">{escape(label)}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{end - LEFT:.1f}" height="{ROW - 4}" fill="{colour}"/>')
            parts.append(f'<line x1="{low:.1f}" y1="{middle:.1f}" x2="{high:.1f}" y2="{middle:.1f}" stroke="black"/>')
            parts += [f'<line x1="{x:.1f}" y1="{middle - 4:.1f}" x2="{x:.1f}" y2="{middle + 4:.1f}" stroke="black"/>'
                      for x in (low, high)]  # fmt: skip
            text = f"{100 * value:.1f} +- {100 * error:.1f}"
            parts.append(f'<text x="{max(end, high) + 5:.1f}" y="{y + 11:.1f}">{text}</text>')
            y += ROW
        y += 6
    return "\n".join([*parts, "</svg>"])
