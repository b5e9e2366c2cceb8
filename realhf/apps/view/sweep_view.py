"""The table and the picture of a sweep: time, cost and memory against the size of the cluster."""

from collections.abc import Callable, Sequence
from html import escape
from math import log

from realhf.apps.prepare.sweep import N_GPUS, Sweep, SweepPoint
from realhf.apps.view.error_text import with_error
from realhf.apps.view.plan_summary import rate_text
from realhf.apps.view.tables import Listing, size_text
from realhf.apps.view.timeline_svg import COLOURS, ticks

WIDTH, HEIGHT, LEFT, TOP, FOOT, RIGHT = 380, 220, 70, 50, 46, 30


def efficiency(points: Sequence[SweepPoint]) -> list[float]:
    """Return tokens per second and GPU relative to the first plan that fits (or the first)."""
    first = next((point for point in points if point.report.fits), points[0])
    base = first.report.economy.tokens_per_s_per_worker
    return [point.report.economy.tokens_per_s_per_worker / base if base else 0.0 for point in points]


def sweep_table(sweep: Sweep, points: Sequence[SweepPoint]) -> Listing:
    first = points[0].report
    priced, is_measured = first.economy.dollars_per_hour, first.machine.is_measured
    unit = "GPU-hours" if first.device != "cpu" else "worker-hours"
    cost = ("$" if priced else unit) + " per 1,000 steps"
    step = "step" if is_measured else "step, at least"
    head: tuple[str, ...] = (sweep.key, "GPUs", step, "tokens/s", cost, "memory", "efficiency", "layouts")
    rows = list[tuple[str, ...]]()
    for point, share in zip(points, efficiency(points), strict=True):
        found, report = point.report.economy, point.report
        price = 1000 * (found.dollars if priced else found.worker_hours)
        memory = size_text(report.prediction.peak) + ("" if report.fits else ", too large")
        layouts = "; ".join(dict.fromkeys(str(placement) for placement in report.plan.placements.values()))
        price_text = f"{price:,.2f}" if priced else f"{price:,.4g}"
        seconds = with_error(f"{found.seconds:.4g} s", report.relative_error)
        rows.append((f"{point.value}", f"{point.n_workers}", seconds, rate_text(found.tokens_per_s), price_text, memory,
                     f"{100 * share:.0f}%", layouts))  # fmt: skip
    if sweep.key == N_GPUS:
        head, rows = (head[0], *head[2:]), [(row[0], *row[2:]) for row in rows]
    usable = size_text(first.machine.hardware.usable)
    return Listing(f"sweep (usable memory per worker: {usable})", "r" * (len(head) - 1) + "l", head, tuple(rows))


def sweep_svg(sweep: Sweep, points: Sequence[SweepPoint], title: str) -> str:
    """Return two charts, of seconds and cost per step; hollow points do not fit in memory."""
    priced = points[0].report.economy.dollars_per_hour
    unit = "$ per 1,000 steps" if priced else "worker-hours per 1,000 steps"
    charts: dict[str, Callable[[SweepPoint], float]] = {
        "seconds per step": lambda point: point.report.economy.seconds,
        unit: lambda point: 1000 * (point.report.economy.dollars or point.report.economy.worker_hours),
    }
    panel = LEFT + WIDTH + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(charts) * panel}" height="{TOP + HEIGHT + FOOT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect x="0" y="0" width="{len(charts) * panel}" height="{TOP + HEIGHT + FOOT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    label = "GPUs" if sweep.key == N_GPUS else sweep.key
    for number, (name, value_of) in enumerate(charts.items()):
        dots = [(point.value, value_of(point), point.report.fits) for point in points]
        parts += [f'<g transform="translate({number * panel} 0)">', *_chart(dots, name, label, COLOURS[number]), "</g>"]
    return "\n".join([*parts, "</svg>"])


def _chart(dots: Sequence[tuple[int, float, bool]], name: str, label: str, colour: str) -> list[str]:
    """Return a chart with a logarithmic axis of values and a linear one from zero."""
    first, last = log(dots[0][0]), log(dots[-1][0])
    high = 1.1 * max(value for _, value, _ in dots) or 1.0
    bottom = TOP + HEIGHT

    def at(x: int, y: float) -> tuple[float, float]:
        share = (log(x) - first) / (last - first) if last > first else 0.5
        return LEFT + share * WIDTH, bottom - y / high * HEIGHT

    parts = [f'<text x="{LEFT}" y="{TOP - 12}">{escape(name)}</text>']
    for tick in ticks(high)[::2]:
        y = at(dots[0][0], tick)[1]
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y, _ in dots)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    shown = float("-inf")
    for x, y, fits in dots:
        left, top = at(x, y)
        fill = colour if fits else "#fff"
        hint = f"{label} {x}: {y:.4g} {name}{'' if fits else ', does not fit'}"
        parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{fill}" stroke="{colour}">'
                     f"<title>{escape(hint)}</title></circle>")  # fmt: skip
        if left - shown >= 30:  # labels do not overlap
            parts.append(f'<text x="{left:.1f}" y="{bottom + 16}" text-anchor="middle">{x}</text>')
            shown = left
    parts.append(f'<text x="{LEFT + WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">{escape(label)}</text>')
    return parts
