"""``realhf report``: one HTML page about a run: curves, measured and predicted timelines, responses, plan, options."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from realhf.api.execution_plan import ExecutionPlan
from realhf.apps.prepare.launching import read_run
from realhf.apps.prepare.preflight import plan_report
from realhf.apps.view.console import write_out
from realhf.apps.view.curves_svg import Curve, curves_svg
from realhf.apps.view.tables import Listing, render_page
from realhf.apps.view.timeline_svg import timeline_svg
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.plan.run_spec import RunSpec
from realhf.plan.search.timeline import Activity, Timeline

USAGE = "usage: realhf report RUN_DIR [--out FILE.html]   (default: RUN_DIR/report.html)"
CURVES = {  # the metrics in each chart
    "reward": ("reward/mean", "reward/accuracy", "eval/reward", "eval/accuracy"),
    "loss": ("loss", "eval/loss", "critic_train/critic_loss"),
    "KL to the reference": ("kl/ref",),
    "response length, tokens": ("length/response", "eval/response_length"),
    "fraction truncated": ("actor_gen/truncated", "gen/truncated", "eval/truncated"),
    "gradient norm": ("actor_train/grad_norm", "critic_train/grad_norm", "sft_train/grad_norm", "rw_train/grad_norm"),
    "seconds per step": ("time/step_s", "predicted/step_s", "limit/step_s"),
    "tokens per second": ("tokens/per_s",),
    "peak memory over workers, GB": ("memory/worker_peak_gb",),
}
N_SAMPLES = 8
MAX_LANES = 64
CLOCK_S = 1e-3  # tolerance between the end of one activity and the start of the next
Metrics = Mapping[str, Any]


def main(arguments: list[str]) -> None:
    if not arguments:
        raise UserError(f"missing RUN_DIR\n{USAGE}")
    words = [word for argument in arguments for word in argument.split("=", 1)]
    if len(words) not in (1, 3) or (len(words) == 3 and words[1] != "--out"):
        raise UserError(f"invalid arguments: {' '.join(arguments)}\n{USAGE}")
    paths = RunDir(Path(words[0]))
    if paths.stages.is_file():
        stages = sorted(str(plan.parent) for plan in paths.root.glob("*/plan.json"))
        raise UserError(f"{paths.root} has several runs; report one of them: {', '.join(stages) or 'none has started'}")
    target = Path(words[2]) if len(words) == 3 else paths.root / "report.html"
    write_out(target, report(read_run(paths.root)))


def report(run: RunSpec) -> str:
    steps = list(json_lines(run.paths.metrics))
    timelines, note = _timelines(run)
    samples_step, samples = _samples(run)
    tables = [_summary(run, steps), _calls(run, steps)]
    charts = [svg for title, names in CURVES.items() if (svg := curves_svg(title, curves(steps, names)))]
    failure = run.paths.failure.read_text("utf-8") if run.paths.failure.is_file() else ""
    return render_page(f"realhf {run.experiment}: {run.paths.root.name}", timelines, tables, curves=charts, note=note,
                       samples=samples, samples_step=samples_step, failure=failure,
                       config=run.paths.config)  # fmt: skip


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the objects of a file with one per line, or of a trace; a file in progress has an incomplete last line."""
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    if isinstance(value := json.loads(line.strip().rstrip(",")), dict):
                        yield value


def curves(steps: list[Metrics], names: tuple[str, ...]) -> dict[str, Curve]:
    return {name: [(line["step"], line[name]) for line in steps if name in line] for name in names}


def _summary(run: RunSpec, steps: list[Metrics]) -> Listing:
    last = steps[-1] if steps else {}
    metrics = [f"{names[0]} {last[names[0]]:.4g}" for names in CURVES.values() if names[0] in last]
    rows = [
        ("directory", str(run.paths.root)),
        ("steps", f"{last.get('step', 0)} of {run.schedule.n_steps}, {run.schedule.batch_size} rows each"),
        ("workers", f"{run.plan.n_workers} x {run.device}"),
        ("data", f"{run.config.portable(run.config.dataset.path)}, {run.n_rows} rows"),
        ("last step", ", ".join(metrics) or "none yet"),
    ]
    if run.expected:
        word = "predicted" if run.expected.is_measured else "limit: at least"
        rows.append((word, f"{run.expected.step_s:.3g} s per step, from {run.expected.source}"))
    return Listing("run", "ll", (), tuple(rows))


def _calls(run: RunSpec, steps: list[Metrics]) -> Listing:
    """Return the median seconds of each call over all steps but the first, with the predicted ones."""

    def values(name: str) -> list[float]:
        return [line[name] for line in steps[1:] or steps if name in line]

    rows = []
    for mfc in run.graph.topological:
        seconds = values(f"time/{mfc.name}_s")
        predicted = run.expected.calls.get(mfc.name) if run.expected else None
        rates = {kind: values(f"{kind}/{mfc.name}") for kind in ("mfu", "mbu")}
        utilization = [f"{kind.upper()} {median(found):.0%}" for kind, found in rates.items() if found]
        rows.append((mfc.name, mfc.kind.value, mfc.role or "-", str(run.plan[mfc.name]),
                     f"{median(seconds):.3g}" if seconds else "-", f"{predicted:.3g}" if predicted else "-",
                     ", ".join(utilization)))  # fmt: skip
    word = "at least" if run.expected and not run.expected.is_measured else "predicted"
    head = ("call", "kind", "role", "layout", "seconds", word, "of the data sheet")
    return Listing("calls", "llllrrl", head, tuple(rows))


def _timelines(run: RunSpec) -> tuple[list[str], str]:
    """Return images of the predicted step and the last complete one on the same axis; a note if there is none."""
    last = measured(run)
    if last is None:
        return [], ""
    predicted, note = _predict(run)
    names = [mfc.name for mfc in run.graph.mfcs]
    step, timeline = last
    length = timeline.steady_state[1] - timeline.steady_state[0]
    until = max(length, predicted.steady_state[1] - predicted.steady_state[0]) if predicted else length
    image = timeline_svg(timeline, names, f"measured: step {step}, {length:.3g} s", until)
    if predicted is None:
        return [image], note
    word = "predicted" if run.expected and run.expected.is_measured else "by limits"
    title = f"{word}: {predicted.seconds_per_step:.3g} s per step"
    return [timeline_svg(predicted, names, title, until), image], ""


def _predict(run: RunSpec) -> tuple[Timeline | None, str]:
    """Return the prediction of the current planner for this plan, or None and the reason."""
    try:
        planner = plan_report(run.experiment, run.config).planner
        placements = {mfc.name: run.plan[mfc.name] for mfc in run.graph.mfcs}
        return planner.predict(ExecutionPlan(run.plan.n_workers, placements)).timeline, ""
    except (UserError, ValueError, OSError) as error:
        return None, f"No prediction: {error}"


def measured(run: RunSpec) -> tuple[int, Timeline] | None:
    """Return the last step in the trace in which every call has finished, with its timeline."""
    events: dict[int, list[tuple[str, int, float, float]]] = {}
    for event in json_lines(run.paths.trace):
        if "/" in event["name"] and event.get("ph") == "X":
            span = (event["name"], event["pid"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            events.setdefault(event["args"]["step"], []).append(span)
    computes = {f"{mfc.name}/Compute" for mfc in run.graph.mfcs}
    complete = [step for step, spans in events.items() if computes <= {name for name, *_ in spans}]
    if not complete:
        return None
    last = max(complete)
    spans = sorted(events[last], key=lambda span: span[2])
    origin = spans[0][2]
    instructions = {f"{mfc}/{type(step).__name__}": step for mfc, steps in run.program.items() for step in steps}
    activities: list[Activity] = []
    for name, rank, start, end in spans:
        if name not in instructions or rank >= MAX_LANES:
            continue
        latest = start - origin + CLOCK_S
        before = [(a.end, i) for i, a in enumerate(activities) if a.start < a.end <= latest]
        after = max(before, default=(0.0, None))[1]
        activities.append(Activity(name.partition("/")[0], last - 1, instructions[name], (rank,), start - origin,
                                   end - origin, after))  # fmt: skip
    n_lanes = min(run.plan.n_workers, MAX_LANES)
    return last, Timeline(n_lanes, tuple(activities), (max(a.end for a in activities),))


def _samples(run: RunSpec) -> tuple[int, list[dict[str, Any]]]:
    files = {int(file.stem.split("_")[1]): file for file in run.paths.root.glob("generations/step_*.jsonl")}
    step = max(files, default=0)
    return step, list(islice(json_lines(files[step]), N_SAMPLES)) if files else []
