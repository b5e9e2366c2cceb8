"""The charts of the page: which metrics they show, and their pictures for readers without JavaScript.

A picture has the width of its container: positions are percentages, and lines are in a stretched coordinate system.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from realhf.apps.view.report.series import Curve
from realhf.apps.view.report.text import clean, number_text
from realhf.system.metrics.descriptions import MetricInfo, describe

SECTIONS = {  # for each chart the metrics that it may contain; further runs have their own line of each
    "Learning": (
        ("reward/mean", "eval/reward"),
        ("reward/accuracy", "eval/accuracy"),
        ("kl/ref",),
    ),
    "Responses": (
        ("length/response", "eval/response_length"),
        ("actor_gen/truncated", "gen/truncated", "eval/truncated"),
        ("reward/failed", "eval/failed"),
    ),
    "Optimization": (
        ("loss", "eval/loss"),
        ("critic_train/critic_loss",),
        ("actor_train/grad_norm", "critic_train/grad_norm", "sft_train/grad_norm", "rw_train/grad_norm"),
        ("actor_train/approx_kl",),
        ("actor_train/clip_fraction", "critic_train/value_clip_fraction"),
        ("actor_train/entropy",),
        ("actor_train/lr", "critic_train/lr", "sft_train/lr", "rw_train/lr"),
    ),
    "Speed and memory": (
        ("time/step_s", "predicted/step_s", "limit/step_s"),
        ("tokens/per_s",),
        ("memory/worker_peak_gb",),
    ),
}
ALIAS = re.compile(r"`([^` ]+/[^` ]+)`( or `[^`]+`)*")  # a meaning that only names other metrics
WIDTH = HEIGHT = 1000.0  # of the stretched coordinate system
N_TICKS = 4
N_COLOURS = 10
STATIC_POINTS = 200  # of a picture; the interactive chart has more
SPARK_POINTS = 60


@dataclass(frozen=True)
class ChartLine:
    """A curve of a chart: the metric ``key`` of run number ``run``. Lines of one colour differ in their dashes."""

    key: str
    run: int
    label: str
    colour: int
    dash: int


@dataclass(frozen=True)
class Chart:
    id: str
    section: str
    title: str
    unit: str
    text: str
    lines: tuple[ChartLine, ...]


def info(key: str) -> MetricInfo:
    """Return name, unit and meaning of a metric; an unknown one is called by its key."""
    if (found := describe(key)) is None:
        return MetricInfo(key, "", "")
    alias = ALIAS.fullmatch(found.text)
    meaning = (alias and describe(alias[1])) or found
    return MetricInfo(_capital(found.name), found.unit, _capital(meaning.text.replace("`", "")))


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def charts_of(runs: Sequence[tuple[str, Iterable[str]]]) -> list[Chart]:
    """Return the charts of runs, given by their names and the keys of their metrics."""
    available = [set(keys) for _, keys in runs]
    charts: list[Chart] = []
    for section, chart_keys in SECTIONS.items():
        for keys in chart_keys:
            present = [key for key in keys if any(key in own for own in available)]
            if not present:
                continue
            names = [name for name, _ in runs]
            lines = [
                _line(key, run, names, present) for key in present for run in range(len(runs)) if key in available[run]
            ]
            title, unit, text = info(present[0])
            charts.append(Chart(f"chart-{keys[0]}", section, title, unit, text, tuple(lines)))
    return charts


def _line(key: str, run: int, names: Sequence[str], keys: Sequence[str]) -> ChartLine:
    number, title = keys.index(key), line_name(key, keys)
    if len(names) == 1:
        return ChartLine(key, run, title, number % N_COLOURS, 0)
    return ChartLine(key, run, names[run] if number == 0 else f"{names[run]}: {title}", run % N_COLOURS, number)


def line_name(key: str, keys: Sequence[str]) -> str:
    """Return the name of a metric, with its call if other metrics of the chart have the same name."""
    name, call = info(key).name, key.partition("/")[0]
    return f"{name} ({call})" if [info(other).name for other in keys].count(name) > 1 else name


@dataclass(frozen=True)
class Frame:
    """The ranges of a chart's axes."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        """Return a position from 0 (left) to 1."""
        return (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        """Return a position from 0 (top) to 1."""
        return (self.high - value) / (self.high - self.low)


def frame_of(curves: Iterable[Curve]) -> Frame | None:
    """Return axes that contain all points, None without points."""
    found = [curve for curve in curves if len(curve)]
    if not found:
        return None
    first, last = min(c.steps[0] for c in found), max(c.steps[-1] for c in found)
    low, high = min(c.means.min() for c in found), max(c.means.max() for c in found)
    margin = float(0.06 * (high / 2 - low / 2) * 2 or 0.06 * abs(high) or 1.0)
    return Frame(float(first), float(max(last, first + 1)), float(low) - margin, float(high) + margin)


def nice_ticks(low: float, high: float, n: int = N_TICKS) -> list[float]:
    """Return about ``n`` round numbers between two numbers."""
    span = high - low
    if not 0 < span < float("inf"):
        return []
    size = 10.0 ** floor(log10(span / n))
    step = next((size * part for part in (1, 2, 2.5, 5) if span / (size * part) <= n + 0.5), size * 10)
    start = -(-low // step)
    ticks = [(start + i) * step for i in range(2 * n + 2)]
    return [0.0 if abs(tick) < step * 1e-9 else tick for tick in ticks if low <= tick <= high]


def chart_svg(chart: Chart, curves: Mapping[tuple[int, str], Curve]) -> str:
    """Return the picture of a chart; empty if no curve has a point."""
    frame = frame_of(curves[line.run, line.key] for line in chart.lines)
    if frame is None:
        return ""
    parts = ['<svg class="frame" role="img" aria-label="' + escape(clean(_description(chart, curves))) + '">']
    for tick in nice_ticks(frame.low, frame.high):
        y = f"{100 * frame.y(tick):.2f}%"
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="-8" y="{y}" dy="4" text-anchor="end">{number_text(tick)}</text>')
    ends = ((frame.first, "0", "start"), (frame.last, "100%", "end"))
    for step, x, anchor in ends:
        parts.append(f'<text class="tick" x="{x}" y="100%" dy="18" text-anchor="{anchor}">{step:,.0f}</text>')
    parts.append('<text class="tick" x="50%" y="100%" dy="18" text-anchor="middle">step</text>')
    lines = (_polyline(curves[line.run, line.key], frame, f"line c{line.colour} d{min(line.dash, 3)}")
             for line in chart.lines)  # fmt: skip
    parts.append(stretched("".join(lines)))
    for line in chart.lines:
        curve = curves[line.run, line.key]
        if len(curve) == 1:
            at = f'cx="{100 * frame.x(curve.steps[0]):.2f}%" cy="{100 * frame.y(curve.means[0]):.2f}%"'
            parts.append(f'<circle class="dot c{line.colour}" {at} r="3.5"/>')
    return "".join([*parts, "</svg>"])


def _description(chart: Chart, curves: Mapping[tuple[int, str], Curve]) -> str:
    last = (f"{line.label} {number_text(curves[line.run, line.key].means[-1])}" for line in chart.lines
            if len(curves[line.run, line.key]))  # fmt: skip
    return f"{chart.title}, last values: {', '.join(last)}"


def stretched(content: str) -> str:
    return f'<svg class="plane" viewBox="0 0 1000 1000" preserveAspectRatio="none">{content}</svg>'


def _polyline(curve: Curve, frame: Frame, classes: str) -> str:
    points = " ".join(
        f"{WIDTH * frame.x(step):.1f},{HEIGHT * frame.y(value):.1f}"
        for step, value in zip(curve.steps.tolist(), curve.means.tolist(), strict=True)
    )
    return f'<polyline class="{classes}" points="{points}"/>'


def spark_svg(curve: Curve) -> str:
    """Return a small picture of a curve without axes."""
    frame = frame_of([curve])
    if frame is None or len(curve) < 2:
        return ""
    return f'<svg class="spark" aria-hidden="true">{stretched(_polyline(curve, frame, "line c0 d0"))}</svg>'
