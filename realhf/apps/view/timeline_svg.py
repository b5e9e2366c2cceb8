"""Timelines as SVG: workers by time, one colour per MFC. Thin bars are communication, grey is idle time."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

from realhf.api.program import Compute
from realhf.plan.search.timeline import Activity, Timeline

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6", "#79706e")
WIDTH, LANE, LEFT, RIGHT, TOP, LINE = 960, 22, 100, 40, 26, 16
MIN_BAR_WIDTH = 0.3  # pixels
CHAR_WIDTH = 6.5  # average, in pixels


def lanes_of(timeline: Timeline, shortest: float = 0.0) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return lanes of (ranks, activity numbers): workers with equal activities in the settled steps share a lane.

    Activities of at most ``shortest`` seconds are omitted.
    """
    start, end = timeline.steady_state
    by_rank: dict[int, list[int]] = {rank: [] for rank in range(timeline.n_workers)}
    for number, activity in enumerate(timeline.activities):
        if activity.end > start and activity.start < end and activity.end - activity.start > shortest:
            for rank in activity.ranks:
                by_rank[rank].append(number)
    lanes: dict[tuple[int, ...], list[int]] = {}
    for rank, numbers in by_rank.items():
        lanes.setdefault(tuple(numbers), []).append(rank)
    return [(tuple(ranks), list(numbers)) for numbers, ranks in lanes.items()]


def timeline_svg(timeline: Timeline, names: Sequence[str], title: str, until: float | None = None) -> str:
    """Return a chart of the settled steps. ``until`` is the length of the time axis in seconds, for comparisons."""
    start, end = timeline.steady_state
    until = until or end - start or 1.0
    scale = WIDTH / until
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    lanes, critical = lanes_of(timeline, MIN_BAR_WIDTH / scale), set(timeline.critical_path)
    legend, top = _legend(colour)
    height = top + LANE * len(lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height + 30}" '
        f'font-family="sans-serif" font-size="11">',
        _rect(0, 0, LEFT + WIDTH + RIGHT, height + 30, "#fff"),
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{escape(title)}</text>',
        *legend,
    ]
    for lane, (ranks, numbers) in enumerate(lanes):
        y = top + LANE * lane
        parts.append(f'<text x="{LEFT - 6}" y="{y + 15}" text-anchor="end">{escape(ranks_text(ranks))}</text>')
        parts.append(_rect(LEFT, y + 1, (end - start) * scale, LANE - 2, "#eee"))
        for number in numbers:
            activity = timeline.activities[number]
            parts.append(_bar(activity, (start, end), scale, y, colour[activity.mfc], number in critical))
    return "\n".join([*parts, *_axis(until, scale, top, height), "</svg>"])


def _legend(colour: dict[str, str]) -> tuple[list[str], int]:
    entries = [(name, LANE / 2, fill, "") for name, fill in colour.items()]
    entries += [("communication", 4, "#888", ""), ("critical path", LANE / 2, "none", ' stroke="#222"')]
    parts, x, y = [], float(LEFT), TOP
    for label, height, fill, attributes in entries:
        width = 16 + CHAR_WIDTH * len(label)
        if x > LEFT and x + width > LEFT + WIDTH:
            x, y = float(LEFT), y + LINE
        parts.append(_rect(x, y + (LANE / 2 - height) / 2, 11, height, fill, attributes))
        parts.append(f'<text x="{x + 16:g}" y="{y + 10}">{escape(label)}</text>')
        x += width + 14
    return parts, y + LINE + 6


def _bar(activity: Activity, span: tuple[float, float], scale: float, y: float, fill: str, critical: bool) -> str:
    began, ended = max(activity.start, span[0]), min(activity.end, span[1])
    thin = 0 if isinstance(activity.instruction, Compute) else LANE // 4
    title = f"{activity.mfc} {type(activity.instruction).__name__}, step {activity.step + 1}: "
    title += f"{activity.end - activity.start:.3g} s{', on the critical path' if critical else ''}"
    x, width = LEFT + (began - span[0]) * scale, (ended - began) * scale
    edge = ' stroke="#222" stroke-width="0.7"' if critical else ""
    return _rect(x, y + 1 + thin, width, LANE - 2 - 2 * thin, fill, edge, title)


def _rect(x: float, y: float, width: float, height: float, fill: str, attributes: str = "", title: str = "") -> str:
    rect = f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}"{attributes}'
    return f"{rect}><title>{escape(title)}</title></rect>" if title else f"{rect}/>"


def _axis(until: float, scale: float, top: float, bottom: float) -> list[str]:
    parts = []
    for seconds in ticks(until):
        x = LEFT + seconds * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#bbb" '
                     'stroke-dasharray="2 3"/>')  # fmt: skip
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{seconds:.4g} s</text>')
    return parts


def ticks(until: float) -> list[float]:
    """Return at most eleven round numbers from 0 to ``until``."""
    size = 10.0 ** floor(log10(until))
    step = next(size * part for part in (0.1, 0.2, 0.5, 1) if until / (size * part) <= 10)
    return [step * i for i in range(int(until / step * (1 + 1e-9)) + 1)]


def stack_svgs(pictures: list[str]) -> str:
    if len(pictures) == 1:
        return pictures[0]
    heights = [int(p.split('height="', 1)[1].split('"', 1)[0]) for p in pictures]
    width = LEFT + WIDTH + RIGHT
    parts, y = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{sum(heights)}">'], 0
    for picture, height in zip(pictures, heights, strict=True):
        parts.append(picture.replace("<svg ", f'<svg y="{y}" ', 1))
        y += height
    return "\n".join([*parts, "</svg>"])


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as ranges, such as 0-3,8; at most 14 characters."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return text if len(text) <= 14 else f"{text[:11]}..."
