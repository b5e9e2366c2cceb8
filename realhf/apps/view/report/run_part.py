"""The part of the page about one run: headline numbers, facts, tables and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from realhf.apps.view.error_text import agreement_text, expected_step_text, with_error
from realhf.apps.view.report.charts import SPARK_POINTS, info, spark_svg
from realhf.apps.view.report.metrics_file import MetricsFile
from realhf.apps.view.report.plan_pictures import LayoutRow, MemoryRow, layout_rows, memory_rows
from realhf.apps.view.report.responses import ResponseRow
from realhf.apps.view.report.run_reader import RunReader
from realhf.apps.view.report.status import RunState
from realhf.apps.view.report.text import duration_text, number_text, shortened, size_text
from realhf.apps.view.report.timeline import timeline_picture
from realhf.base.version import __version__
from realhf.plan.advice.expected_error import kind_of_work
from realhf.plan.run_spec import RunSpec
from realhf.plan.search.timeline import n_steady_steps

HEADLINES = ("reward/mean", "reward/accuracy", "eval/accuracy", "loss", "kl/ref", "length/response", "time/step_s",
             "tokens/per_s", "memory/worker_peak_gb")  # fmt: skip
N_TILES = 7
N_STATIC_RESPONSES, STATIC_TEXT = 6, 2_000  # rows, characters


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    label: str
    value: str
    unit: str
    note: str
    spark: str = ""
    progress: float | None = None


@dataclass(frozen=True)
class MetricRow:
    key: str
    name: str
    unit: str
    text: str
    last: str
    low: str
    high: str
    spark: str


@dataclass(frozen=True)
class CallRow:
    """Seconds of a call: the median of all steps but the first, and the prediction."""

    name: str
    seconds: str
    predicted: str
    share: str
    utilization: str


@dataclass
class RunPart:
    """The part of the page about one run."""

    number: int
    name: str
    state: RunState
    reason: str
    error: str
    progress: str
    tiles: list[Tile] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)  # steps and text
    problems: list[str] = field(default_factory=list)
    failure: str = ""
    timelines: list[tuple[str, str]] = field(default_factory=list)  # title and picture
    timeline_note: str = ""
    calls: list[CallRow] = field(default_factory=list)
    call_names: list[str] = field(default_factory=list)
    predicted_word: str = "Predicted"
    memory: list[MemoryRow] = field(default_factory=list)
    memory_facts: list[tuple[str, str]] = field(default_factory=list)
    layouts: list[LayoutRow] = field(default_factory=list)
    n_workers: int = 0
    metrics: list[MetricRow] = field(default_factory=list)
    responses_note: str = ""
    last_responses: Sequence[ResponseRow] = ()
    last_step: int = 0
    config_text: str = ""


def run_part(number: int, reader: RunReader) -> RunPart:
    """Return the part of the page about a run."""
    status, metrics = reader.status, reader.metrics
    assert status is not None, "the run has not been read"
    of = f" of {reader.n_steps:,}" if reader.n_steps else ""
    part = RunPart(number, reader.name, status.state, status.reason, status.error, f"{metrics.n_steps:,}{of}")
    part.problems, part.failure, part.config_text = reader.problems, reader.failure, reader.config_text
    part.tiles = [progress_tile(reader, status.state), *metric_tiles(reader)]
    part.facts = facts(reader)
    part.warnings = warnings(reader)
    part.metrics = [metric_row(key, metrics) for key in sorted(metrics.series) if metrics.series[key].n]
    if last := reader.responses.steps[-1:]:
        part.last_step = last[0].step
        part.last_responses = [replace(row, response=shortened(row.response, STATIC_TEXT)[0])
                               for row in last[0].rows[:N_STATIC_RESPONSES]]  # fmt: skip
    part.responses_note = reader.responses.note(reader.paths.samples)
    if reader.spec:
        _add_plan(part, reader, reader.spec)
    return part


def _add_plan(part: RunPart, reader: RunReader, run: RunSpec) -> None:
    part.n_workers = run.plan.n_workers
    part.layouts = layout_rows(run)
    part.call_names = [mfc.name for mfc in run.graph.mfcs]
    part.predicted_word = "Predicted" if run.expected is None or run.expected.is_measured else "At least"
    part.calls = [call_row(name, reader.metrics, run) for name in (mfc.name for mfc in run.graph.topological)]
    part.timelines, part.timeline_note = timelines(reader, part.call_names, part.predicted_word)
    peak = reader.metrics.maximum("memory/worker_peak_gb")
    measured = peak * 1e9 if peak is not None else None
    if reader.prediction:
        part.memory = memory_rows(reader.prediction.memory, measured, reader.prediction.usable)
        part.memory_facts.append(("usable per worker", size_text(reader.prediction.usable)))
    elif run.expected:
        peak_text = with_error(size_text(run.expected.peak_bytes), run.expected.memory_error)
        part.memory_facts.append(("predicted peak of a worker", peak_text))
    if measured is not None:
        part.memory_facts.insert(0, ("measured peak of the largest worker", size_text(measured)))


def progress_tile(reader: RunReader, state: RunState) -> Tile:
    n_done, n_steps = reader.metrics.n_steps, reader.n_steps
    seconds = reader.metrics.series.get("time/step_s")
    note = ""
    if seconds and seconds.n:
        curve = seconds.curve()
        spent = float(curve.means.mean()) * seconds.n
        note = f"{duration_text(spent)} in steps"
        if state is RunState.RUNNING and n_steps:
            note += f", about {duration_text(float(median(curve.means[-20:])) * (n_steps - n_done))} left"
    fraction = min(1.0, n_done / n_steps) if n_steps else None
    return Tile("Steps", f"{n_done:,}", f"of {n_steps:,}" if n_steps else "", note, progress=fraction)


def metric_tiles(reader: RunReader) -> list[Tile]:
    tiles: list[Tile] = []
    for key in HEADLINES:
        series = reader.metrics.series.get(key)
        is_minor = key == "loss" and "reward/mean" in reader.metrics.series  # that of a policy says little
        if not series or not series.n or is_minor or len(tiles) == N_TILES:
            continue
        name, unit, _ = info(key)
        note = f"from {number_text(series.first)}" if series.n > 1 else ""
        expected = reader.spec.expected if reader.spec else None
        if key == "time/step_s" and expected:
            note = expected_step_text(expected)
        if key == "memory/worker_peak_gb" and expected:
            note = f"predicted {with_error(size_text(expected.peak_bytes), expected.memory_error)}"
        spark = spark_svg(series.curve(SPARK_POINTS))
        tiles.append(Tile(name, number_text(series.last), unit if unit != "fraction" else "", note, spark))
    return tiles


def facts(reader: RunReader) -> list[tuple[str, str]]:
    rows = [("directory", str(reader.paths.root.absolute()))]
    if run := reader.spec:
        config = run.config
        held_out = f", {run.n_held_out:,} held out" if run.n_held_out else ""
        rows += [
            ("experiment", run.experiment),
            ("workers", f"{run.plan.n_workers} x {run.device}, mode {config.mode.value}"),
            ("data", f"{config.data_text}: {run.n_rows:,} rows{held_out}"),
            ("batch", f"{run.schedule.batch_size:,} rows per step"),
            ("models", ", ".join(f"{role}: {_source(run, role)}" for role in run.roles)),
            ("seed", str(config.seed)),
        ]
        if run.expected:
            word = "predicted" if run.expected.is_measured else "limit: at least"
            seconds = with_error(duration_text(run.expected.step_s), run.expected.step_error)
            rows.append((word, f"{seconds} per step, from {run.expected.source}"))
            if measured := reader.metrics.typical("time/step_s"):
                rows.append(("typical step", agreement_text(measured, run.expected)))
    return [*rows, ("realhf", __version__)]


def _source(run: RunSpec, role: str) -> str:
    spec = run.roles[role].spec
    return f"random weights of {spec.config}" if spec.init_from_scratch else run.config.portable(spec.path)


def warnings(reader: RunReader) -> list[tuple[str, str]]:
    """Return the warnings of options and steps, the latest first, with the steps that they concern."""
    spans = sorted(reader.metrics.warnings.values(), key=lambda span: -span.last)
    rows = [(steps_text(span.first, span.last, span.n_steps), span.text) for span in spans]
    options = reader.spec.config.warnings() if reader.spec else []
    return [("options", text) for text in options] + rows


def steps_text(first: int, last: int, n: int) -> str:
    if first == last:
        return f"step {first:,}"
    return f"steps {first:,} to {last:,}" if n == last - first + 1 else f"{n:,} steps from {first:,} to {last:,}"


def metric_row(key: str, metrics: MetricsFile) -> MetricRow:
    series, (name, unit, text) = metrics.series[key], info(key)
    spark = spark_svg(series.curve(SPARK_POINTS)) if series.minimum != series.maximum else ""
    return MetricRow(key, name, unit, text, number_text(series.last), number_text(series.minimum),
                     number_text(series.maximum), spark)  # fmt: skip


def call_row(name: str, metrics: MetricsFile, run: RunSpec) -> CallRow:
    seconds = metrics.typical(f"time/{name}_s")
    expected = run.expected
    predicted = expected.calls.get(name) if expected else None
    error = vars(expected.errors)[kind_of_work(run.graph[name])] if expected and expected.errors else 0.0
    rates = {kind.upper(): metrics.typical(f"{kind}/{name}") for kind in ("mfu", "mbu")}
    share = metrics.typical(f"time/{name}_share")
    return CallRow(
        name,
        f"{seconds:.3g}" if seconds is not None else "-",
        with_error(f"{predicted:.3g}", error) if predicted else "-",
        f"{share:.0%}" if share is not None else "-",
        ", ".join(f"{kind} {rate:.0%}" for kind, rate in rates.items() if rate is not None) or "-",
    )


def timelines(reader: RunReader, names: Sequence[str], word: str) -> tuple[list[tuple[str, str]], str]:
    """Return titles and pictures of the predicted and the measured step on the same axis, and why one is missing."""
    found = []
    if reader.prediction:
        timeline = reader.prediction.timeline
        n_drawn = n_steady_steps(len(timeline.step_ends), timeline.max_staleness)
        drawn = f" ({n_drawn} steps)" if n_drawn > 1 else ""
        seconds = with_error(duration_text(timeline.seconds_per_step), reader.prediction.step_error)
        found.append((f"{word}: {seconds} per step{drawn}", timeline))
    if reader.measured:
        step, timeline = reader.measured
        length = timeline.steady_state[1] - timeline.steady_state[0]
        found.append((f"Measured: step {step:,}, {duration_text(length)}", timeline))
    until = max((t.steady_state[1] - t.steady_state[0] for _, t in found), default=0.0)
    note = "" if reader.measured else f"{reader.paths.trace.name} has no complete step."
    pictures = [(title, timeline_picture(timeline, names, title, until)) for title, timeline in found]
    return pictures, " ".join(filter(None, (reader.prediction_note, note)))
