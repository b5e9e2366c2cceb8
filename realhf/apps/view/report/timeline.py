"""The timeline of a step as a picture of the width of its container: workers by time, one colour per call."""

from collections.abc import Sequence
from html import escape

from realhf.api.program import Compute
from realhf.apps.view.report.charts import N_COLOURS
from realhf.apps.view.report.text import clean
from realhf.apps.view.timeline_svg import lanes_of, ranks_text, ticks
from realhf.plan.search.timeline import Activity, Timeline

LANE, LOW_LANE, GAP, FOOT = 22, 14, 3, 24  # pixels
MANY_LANES = 16  # more lanes are lower
MAX_BARS = 4000
SHORTEST = 3e-4  # of the time axis


def timeline_picture(timeline: Timeline, names: Sequence[str], title: str, until: float) -> str:
    """Return a picture of the settled steps. ``until`` is the length of the time axis in seconds, for comparisons."""
    start, end = timeline.steady_state
    until = until if until > 0 else 1.0
    shortest = _shortest(timeline, SHORTEST * until)
    lanes, critical = lanes_of(timeline, shortest), set(timeline.critical_path)
    size = LANE if len(lanes) <= MANY_LANES else LOW_LANE
    height = size * len(lanes)
    parts = [
        f'<svg class="lanes" height="{height + FOOT}" role="img" '
        f'aria-label="{escape(clean(f"{title}: {_summary(timeline, names)}"))}">'
    ]
    for seconds in ticks(until):
        x = f"{100 * seconds / until:.2f}%"
        anchor = "start" if seconds == 0 else "end" if seconds > 0.97 * until else "middle"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
        parts.append(f'<text class="tick sec" x="{x}" y="{height + 16}" text-anchor="{anchor}">{seconds:.4g} s</text>')
    for lane, (ranks, numbers) in enumerate(lanes):
        y = size * lane
        parts.append(
            f'<text class="tick" x="-8" y="{y + size // 2 + 3}" text-anchor="end">{escape(ranks_text(ranks))}</text>'
        )
        parts.append(f'<rect class="idle" x="0" y="{y}" width="{100 * (end - start) / until:.3f}%" '
                     f'height="{size - GAP}" rx="2"/>')  # fmt: skip
        for number in numbers:
            activity = timeline.activities[number]
            colour = names.index(activity.mfc) % N_COLOURS if activity.mfc in names else 0
            parts.append(_bar(activity, (start, end), until, (y, size - GAP), colour, number in critical))
    return "".join([*parts, "</svg>"])


def _shortest(timeline: Timeline, shortest: float) -> float:
    """Return the duration of omitted activities: a picture has at most ``MAX_BARS`` bars."""
    lengths = sorted((a.end - a.start for a in timeline.activities for _ in a.ranks), reverse=True)
    return max(shortest, lengths[MAX_BARS]) if len(lengths) > MAX_BARS else shortest


def _summary(timeline: Timeline, names: Sequence[str]) -> str:
    seconds = dict.fromkeys(names, 0.0)
    for activity in timeline.activities:
        if activity.mfc in seconds and isinstance(activity.instruction, Compute):
            seconds[activity.mfc] = max(seconds[activity.mfc], activity.end - activity.start)
    return ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())


def _bar(
    activity: Activity, span: tuple[float, float], until: float, lane: tuple[int, int], colour: int, critical: bool
) -> str:
    """Return the bar of an activity in a lane, given by its top and its height; communication is thinner."""
    began, ended = max(activity.start, span[0]), min(activity.end, span[1])
    thin = 0 if isinstance(activity.instruction, Compute) else lane[1] // 3
    title = f"{activity.mfc} {type(activity.instruction).__name__}: {activity.end - activity.start:.3g} s"
    title += ", on the critical path" if critical else ""
    x, width = 100 * (began - span[0]) / until, 100 * (ended - began) / until
    classes = f"bar f{colour}" + (" critical" if critical else "")
    y, height = lane[0] + thin, lane[1] - 2 * thin
    return (f'<rect class="{classes}" x="{x:.3f}%" y="{y}" width="{width:.3f}%" height="{height}">'
            f"<title>{escape(clean(title))}</title></rect>")  # fmt: skip
