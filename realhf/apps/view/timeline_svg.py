"""Timelines as pictures: devices by time, a colour for each MFC; thin bars move weights and rows, grey is idle."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

from realhf.api.program import Compute
from realhf.plan.search.timeline import Activity, Timeline

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6", "#79706e")
WIDTH, LANE, LEFT, RIGHT, TOP, LINE = 960, 22, 100, 40, 26, 16
SMALLEST = 0.3
"""Pixels of what is drawn."""
LETTER = 6.5
"""Width of a letter of the usual size, about."""


def lanes_of(timeline: Timeline, shortest: float = 0.0) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return (ranks, numbers of their activities): workers that do the same in the settled steps share a lane.

    What takes ``shortest`` seconds or less is left out.
    """
    start, end = timeline.settled
    doing: dict[int, list[int]] = {rank: [] for rank in range(timeline.n_workers)}
    for number, activity in enumerate(timeline.activities):
        if activity.end > start and activity.start < end and activity.end - activity.start > shortest:
            for rank in activity.ranks:
                doing[rank].append(number)
    lanes: dict[tuple[int, ...], list[int]] = {}
    for rank, numbers in doing.items():
        lanes.setdefault(tuple(numbers), []).append(rank)
    return [(tuple(ranks), list(numbers)) for numbers, ranks in lanes.items()]


def timeline_svg(timeline: Timeline, names: Sequence[str], title: str, until: float | None = None) -> str:
    """Return a picture of the settled steps. ``until`` is the length of the axis in seconds, to compare pictures."""
    start, end = timeline.settled
    until = until or end - start or 1.0
    scale = WIDTH / until
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    lanes, critical = lanes_of(timeline, SMALLEST / scale), set(timeline.critical)
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
    """Return what colours and bars mean, and where lanes may begin below it."""
    entries = [(name, LANE / 2, fill, "") for name, fill in colour.items()]
    entries += [("rows or weights move", 4, "#888", ""), ("critical path", LANE / 2, "none", ' stroke="#222"')]
    parts, x, y = [], float(LEFT), TOP
    for words, height, fill, more in entries:
        width = 16 + LETTER * len(words)
        if x > LEFT and x + width > LEFT + WIDTH:
            x, y = float(LEFT), y + LINE
        parts.append(_rect(x, y + (LANE / 2 - height) / 2, 11, height, fill, more))
        parts.append(f'<text x="{x + 16:g}" y="{y + 10}">{escape(words)}</text>')
        x += width + 14
    return parts, y + LINE + 6


def _bar(activity: Activity, span: tuple[float, float], scale: float, y: float, fill: str, critical: bool) -> str:
    """Draw what of an activity lies in a span of time."""
    began, ended = max(activity.start, span[0]), min(activity.end, span[1])
    thin = 0 if isinstance(activity.instruction, Compute) else LANE // 4
    words = f"{activity.mfc} {type(activity.instruction).__name__}, step {activity.step + 1}: "
    words += f"{activity.end - activity.start:.3g} s{', on the critical path' if critical else ''}"
    x, width = LEFT + (began - span[0]) * scale, (ended - began) * scale
    edge = ' stroke="#222" stroke-width="0.7"' if critical else ""
    return _rect(x, y + 1 + thin, width, LANE - 2 - 2 * thin, fill, edge, words)


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "", words: str = "") -> str:
    box = f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}"{more}'
    return f"{box}><title>{escape(words)}</title></rect>" if words else f"{box}/>"


def _axis(until: float, scale: float, top: float, bottom: float) -> list[str]:
    parts = []
    for seconds in ticks(until):
        x = LEFT + seconds * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#bbb" '
                     'stroke-dasharray="2 3"/>')  # fmt: skip
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{seconds:.4g} s</text>')
    return parts


def ticks(until: float) -> list[float]:
    """Return round numbers from 0 to ``until``, at most eleven."""
    size = 10.0 ** floor(log10(until))
    step = next(size * part for part in (0.1, 0.2, 0.5, 1) if until / (size * part) <= 10)
    return [step * i for i in range(int(until / step * (1 + 1e-9)) + 1)]


def stacked(pictures: list[str]) -> str:
    """Return several pictures one below the other."""
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
    """Return ranks as spans: 0-3,8."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return text if len(text) <= 14 else f"{text[:11]}..."
