"""Timelines as pictures: devices by time, one colour for each MFC; moving weights and rows hatched, idle time blank."""

from collections.abc import Mapping, Sequence
from html import escape

from realhf.api.program import Compute
from realhf.plan.timeline import Activity, Timeline

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6", "#79706e")
WIDTH, LANE, LEFT, TOP = 960, 22, 90, 52


def lanes_of(timeline: Timeline) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return (ranks, numbers of their activities): workers that do the same all the time share a lane."""
    doing: dict[int, list[int]] = {rank: [] for rank in range(timeline.n_workers)}
    for number, activity in enumerate(timeline.activities):
        for rank in activity.ranks:
            doing[rank].append(number)
    lanes: dict[tuple[int, ...], list[int]] = {}
    for rank, numbers in doing.items():
        lanes.setdefault(tuple(numbers), []).append(rank)
    return [(tuple(ranks), list(numbers)) for numbers, ranks in lanes.items()]


def timeline_svg(timeline: Timeline, names: Sequence[str], title: str, until: float | None = None) -> str:
    """Return a picture of the settled steps. ``until`` is the length of the axis in seconds, to compare pictures."""
    start, end = timeline.settled
    scale = WIDTH / (until or end - start or 1.0)
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    lanes = lanes_of(timeline)
    height = TOP + LANE * len(lanes) + 34
    critical = set(timeline.critical)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        '<defs><pattern id="move" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line x1="0" y1="0" x2="0" y2="5" stroke="#fff" stroke-width="3"/></pattern></defs>',
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for i, name in enumerate(names):
        x = LEFT + 120 * i
        parts.append(f'<rect x="{x}" y="26" width="10" height="10" fill="{colour[name]}"/>')
        parts.append(f'<text x="{x + 14}" y="35">{escape(name)}</text>')
    for lane, (ranks, numbers) in enumerate(lanes):
        y = TOP + LANE * lane
        parts.append(f'<text x="{LEFT - 6}" y="{y + 14}" text-anchor="end">{escape(ranks_text(ranks))}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y + 1}" width="{(end - start) * scale:.2f}" height="{LANE - 2}" fill="#eee"/>'
        )
        for number in numbers:
            activity = timeline.activities[number]
            if activity.end > start and activity.end > activity.start:
                parts += _bar(activity, start, scale, y, colour[activity.mfc], number in critical)
    parts += _axis(end - start, until or end - start, scale, TOP + LANE * len(lanes))
    return "\n".join([*parts, "</svg>"])


def _bar(activity: Activity, start: float, scale: float, y: int, colour: str, critical: bool) -> list[str]:
    began = max(activity.start, start)
    x, width = LEFT + (began - start) * scale, max(0.3, (activity.end - began) * scale)
    box = f'x="{x:.2f}" y="{y + 1}" width="{width:.2f}" height="{LANE - 2}"'
    words = f"{activity.mfc} {type(activity.instruction).__name__}, step {activity.step + 1}: "
    words += f"{activity.end - activity.start:.3g} s{', on the critical path' if critical else ''}"
    edge = ' stroke="#222"' if critical else ""
    bars = [f'<rect {box} fill="{colour}"{edge}><title>{escape(words)}</title></rect>']
    if not isinstance(activity.instruction, Compute):
        bars.append(f'<rect {box} fill="url(#move)" opacity="0.6" pointer-events="none"/>')
    return bars


def _axis(length: float, until: float, scale: float, y: int) -> list[str]:
    parts = []
    for tick in range(6):
        seconds = until * tick / 5
        x = LEFT + seconds * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{y + 4}" stroke="#bbb" stroke-dasharray="2 3"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{seconds:.3g} s</text>')
    return parts


def stacked(pictures: list[str]) -> str:
    """Return several pictures one below the other."""
    if len(pictures) == 1:
        return pictures[0]
    heights = [int(p.split('height="', 1)[1].split('"', 1)[0]) for p in pictures]
    width = pictures[0].split('width="', 1)[1].split('"', 1)[0]
    parts, y = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{sum(heights)}">'], 0
    for picture, height in zip(pictures, heights, strict=True):
        parts.append(picture.replace("<svg ", f'<svg y="{y}" ', 1))
        y += height
    return "\n".join([*parts, "</svg>"])


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as spans: 0-3,8."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return text if len(text) <= 14 else f"{text[:11]}..."


def page(title: str, pictures: Mapping[str, str], tables: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Return one self-contained HTML page of pictures and tables (whose first rows are their heads)."""
    parts = [
        f"<!doctype html><html><head><meta charset='utf-8'><title>{escape(title)}</title><style>"
        "body{font-family:sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:1em 0;font-size:13px}"
        "td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:left}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    for name, picture in pictures.items():
        parts += [f"<h2>{escape(name)}</h2>", picture]
    for name, rows in tables.items():
        parts.append(f"<h2>{escape(name)}</h2><table>")
        for i, row in enumerate(rows):
            cell = "th" if i == 0 else "td"
            parts.append("<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + "</tr>")
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>"])
