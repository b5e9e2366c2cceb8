"""What the page shows: the charts and tables of all runs, and the data of its scripts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from realhf.apps.view.report.charts import STATIC_POINTS, Chart, chart_svg, charts_of, info
from realhf.apps.view.report.options import OptionRow, changed_options
from realhf.apps.view.report.responses import ResponseRow
from realhf.apps.view.report.run_part import HEADLINES, RunPart, run_part
from realhf.apps.view.report.run_reader import RunReader
from realhf.apps.view.report.series import MAX_POINTS, Curve
from realhf.apps.view.report.text import number_text

MAX_POINTS_ON_PAGE = 60_000
MIN_POINTS = 20  # of a curve


@dataclass(frozen=True)
class PageContent:
    """Everything on the page. ``data`` is for its scripts."""

    title: str
    runs: list[RunPart]
    sections: list[tuple[str, list[tuple[Chart, str]]]]  # charts and their pictures
    overview: list[tuple[str, list[str]]]  # metric and values of the runs
    option_runs: list[str]  # the columns of the options
    options: list[OptionRow]
    data: dict[str, Any]
    made_at: str


CurveKey = tuple[int, str]  # number of the run, metric


def page_content(readers: Sequence[RunReader], title: str) -> PageContent:
    charts = charts_of([(reader.name, reader.metrics.series) for reader in readers])
    static = {(line.run, line.key): readers[line.run].metrics.series[line.key].curve(STATIC_POINTS)
              for chart in charts for line in chart.lines}  # fmt: skip
    charts = [chart for chart in charts if any(static[line.run, line.key].means.any() for line in chart.lines)]
    pictures = [(chart, picture) for chart in charts if (picture := chart_svg(chart, static))]
    configs = [reader.spec.config for reader in readers if reader.spec]
    data = {
        "runs": [reader.name for reader in readers],
        "charts": [asdict(chart) for chart, _ in pictures],
        **curve_data(dict(_curves(readers))),
        "names": {key: info(key)._asdict() for key in sorted({key for r in readers for key in r.metrics.series})},
        "responses": [response_data(reader) for reader in readers],
    }
    made_at = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    sections = [(name, list(part)) for name, part in groupby(pictures, key=lambda each: each[0].section)]
    return PageContent(title, [run_part(i, reader) for i, reader in enumerate(readers)], sections,
                       list(overview(readers)), [reader.name for reader in readers if reader.spec],
                       changed_options(configs), data, made_at)  # fmt: skip


def overview(readers: Sequence[RunReader]) -> Iterator[tuple[str, list[str]]]:
    """Yield the headline metrics with their last values in all runs."""
    for key in HEADLINES:
        values = [reader.metrics.value(key) for reader in readers]
        if any(value is not None for value in values):
            name, unit, _ = info(key)
            yield (f"{name}, {unit}" if unit else name), ["-" if v is None else number_text(v) for v in values]


def _curves(readers: Sequence[RunReader]) -> Iterator[tuple[CurveKey, Curve]]:
    """Yield the curves of all metrics; they share the points that the page may contain."""
    n = sum(len(reader.metrics.series) for reader in readers)
    limit = min(MAX_POINTS, max(MIN_POINTS, MAX_POINTS_ON_PAGE // max(1, n)))
    for run, reader in enumerate(readers):
        for key, series in reader.metrics.series.items():
            if series.n:
                yield (run, key), series.curve(limit)


def curve_data(curves: Mapping[CurveKey, Curve]) -> dict[str, Any]:
    """Return the curves for the scripts. Curves with equal steps share one list of them."""
    steps: list[list[float]] = []
    numbers: dict[bytes, int] = {}
    lines = []
    for (run, key), curve in curves.items():
        number = numbers.setdefault(curve.steps.tobytes(), len(steps))
        if number == len(steps):
            steps.append([int(step) for step in curve.steps])
        line: dict[str, Any] = {"run": run, "key": key, "x": number, "y": rounded(curve.means)}
        if curve.is_averaged:
            line |= {"low": rounded(curve.low), "high": rounded(curve.high)}
        lines.append(line)
    return {"steps": steps, "curves": lines}


def rounded(values: Sequence[float] | Any) -> list[float]:
    """Return numbers with five significant digits."""
    return [float(f"{value:.5g}") for value in values]


def response_data(reader: RunReader) -> list[dict[str, Any]]:
    return [{"step": part.step, "rows": [_row_data(row) for row in part.rows]} for part in reader.responses.steps]


def _row_data(row: ResponseRow) -> dict[str, Any]:
    data: dict[str, Any] = {"p": row.prompt, "r": row.response, "s": row.sample}
    data |= {} if row.reward is None else {"w": row.reward}
    data |= {} if row.n_tokens is None else {"n": row.n_tokens}
    data |= {"t": 1} if row.is_truncated else {}
    data |= {"x": row.turns} if row.turns else {}
    return data | ({"o": row.n_omitted} if row.n_omitted else {})
