"""``realhf report``: a run on one page: curves, its last step measured and predicted, plan, answers, options."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from realhf.api.execution_plan import ExecutionPlan
from realhf.apps.prepare.launching import as_experiment, read_run
from realhf.apps.prepare.preflight import plan_report
from realhf.apps.view.console import write_out
from realhf.apps.view.curves_svg import Curve, curves_svg
from realhf.apps.view.tables import Listing
from realhf.apps.view.timeline_svg import page, timeline_svg
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.plan.run_spec import RunSpec
from realhf.plan.search.timeline import Activity, Timeline

USAGE = "usage: realhf report RUN_DIR [--out FILE.html]   (default: RUN_DIR/report.html)"
CURVES = {
    "reward": ("reward/mean", "reward/accuracy", "eval/reward", "eval/accuracy"),
    "loss": ("loss", "eval/loss", "critic_train/critic_loss"),
    "KL to the reference": ("kl/ref",),
    "answers, tokens": ("length/response", "eval/response_length"),
    "cut off, share": ("actor_gen/truncated", "gen/truncated", "eval/truncated"),
    "gradient norm": ("actor_train/grad_norm", "critic_train/grad_norm", "sft_train/grad_norm", "rw_train/grad_norm"),
    "seconds a step": ("time/step_s", "predicted/step_s"),
    "tokens a second": ("tokens/per_s",),
    "memory of the fullest worker, GB": ("memory/worker_peak_gb",),
}
"""Pictures, and the metrics in each."""
N_SAMPLES = 8
MOST_LANES = 64
CLOCK_S = 1e-3
"""How far apart the end of one activity and the beginning of the next may be told."""
Metrics = Mapping[str, Any]


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    words = [word for argument in arguments for word in argument.split("=", 1)]
    if len(words) not in (1, 3) or (len(words) == 3 and words[1] != "--out"):
        raise UserError(f"not understood: {' '.join(arguments)}\n{USAGE}")
    paths = RunDir(Path(words[0]))
    if paths.stages.is_file():
        stages = sorted(str(plan.parent) for plan in paths.root.glob("*/plan.json"))
        raise UserError(f"{paths.root} is several runs; report one of them: {', '.join(stages) or 'none has begun'}")
    if not paths.plan.is_file() or not paths.config.is_file():
        raise UserError(f"{paths.root} holds no run: {paths.config.name} and {paths.plan.name} are not both there")
    target = Path(words[2]) if len(words) == 3 else paths.root / "report.html"
    write_out(target, report(read_run(paths.root)))


def report(run: RunSpec) -> str:
    """Return the page of a run that has ended, or as far as it has come."""
    steps = list(json_lines(run.paths.metrics))
    listings = [_summary(run, steps), _calls(run, steps)]
    pictures = [picture for title, names in CURVES.items() if (picture := curves_svg(title, curves(steps, names)))]
    side = [f'<div style="display:flex;flex-wrap:wrap">{"".join(pictures)}</div>'] if pictures else []
    return page(f"realhf {run.experiment}: {run.paths.root.name}", [*side, *_timelines(run), *_samples(run)],
                listings, [_options(run)])  # fmt: skip


def json_lines(path: Path) -> Iterator[Any]:
    """Yield what the lines of a file hold; the last one may not be written to its end yet."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def curves(steps: list[Metrics], names: tuple[str, ...]) -> dict[str, Curve]:
    return {name: [(line["step"], line[name]) for line in steps if name in line] for name in names}


def _summary(run: RunSpec, steps: list[Metrics]) -> Listing:
    last = steps[-1] if steps else {}
    told = {name: last[name] for names in CURVES.values() for name in names[:1] if name in last}
    rows = [
        ("directory", str(run.paths.root)),
        ("steps", f"{last.get('step', 0)} of {run.schedule.n_steps}, {run.schedule.batch_size} rows each"),
        ("workers", f"{run.plan.n_workers} x {run.device}"),
        ("data", f"{run.config.dataset.path}, {run.n_rows} rows"),
        ("at the last step", ", ".join(f"{name} {value:.4g}" for name, value in told.items()) or "nothing yet"),
    ]
    if run.expected:
        rows.append(("expected", f"{run.expected.step_s:.3g} s a step, from {run.expected.source}"))
    return Listing("run", "ll", (), tuple(rows))


def _calls(run: RunSpec, steps: list[Metrics]) -> Listing:
    """What calls take, by the median of all steps but the first, beside what was expected."""
    settled = steps[1:] or steps
    rows = []
    for mfc in run.graph.topological:
        measured = [line[name] for line in settled if (name := f"time/{mfc.name}_s") in line]
        expected = run.expected.calls.get(mfc.name) if run.expected else None
        shares = [f"{kind.upper()} {median(found):.0%}" for kind in ("mfu", "mbu")
                  if (found := [line[name] for line in settled if (name := f"{kind}/{mfc.name}") in line])]  # fmt: skip
        rows.append((mfc.name, mfc.kind.value, mfc.role or "-", str(run.plan[mfc.name]),
                     f"{median(measured):.3g}" if measured else "-", f"{expected:.3g}" if expected else "-",
                     ", ".join(shares)))  # fmt: skip
    return Listing("calls", "llllrrl", ("call", "kind", "role", "layout", "seconds", "expected", "of the data sheet"),
                   tuple(rows))  # fmt: skip


def _timelines(run: RunSpec) -> list[str]:
    """Draw the last whole step, and above it the one that was predicted, over the same seconds."""
    names = [mfc.name for mfc in run.graph.mfcs]
    expected, why = _expected(run)
    found = measured(run)
    if found is None:
        return []
    step, timeline = found
    length = timeline.steady_state[1] - timeline.steady_state[0]
    until = max(length, expected.steady_state[1] - expected.steady_state[0]) if expected else length
    pictures = [timeline_svg(timeline, names, f"measured: step {step}, {length:.3g} s", until)]
    if expected is None:
        return [*pictures, f"<p>{escape(why)}</p>"]
    word = "predicted" if run.expected and run.expected.is_measured else "by limits"
    title = f"{word}: {expected.seconds_per_step:.3g} s a step"
    return [timeline_svg(expected, names, title, until), *pictures]


def _expected(run: RunSpec) -> tuple[Timeline | None, str]:
    """Return what the planner says of this plan today, or why it says nothing."""
    try:
        planner = plan_report(run.experiment, as_experiment(run.config)).planner
        placements = {mfc.name: run.plan[mfc.name] for mfc in run.graph.mfcs}
        return planner.predict(ExecutionPlan(run.plan.n_workers, placements)).timeline, ""
    except (UserError, ValueError, OSError) as error:
        return None, f"No prediction: {error}"


def measured(run: RunSpec) -> tuple[int, Timeline] | None:
    """Return the last step that every training call has ended in the trace, and who did what in it."""
    events: dict[int, list[tuple[str, int, float, float]]] = {}
    for event in _trace(run.paths.trace):
        if "/" in event["name"] and event.get("ph") == "X":
            span = (event["name"], event["pid"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            events.setdefault(event["args"]["step"], []).append(span)
    wanted = {f"{mfc.name}/Compute" for mfc in run.graph.mfcs}
    whole = [step for step, spans in events.items() if wanted <= {name for name, *_ in spans}]
    if not whole:
        return None
    spans = sorted(events[max(whole)], key=lambda span: span[2])
    start = spans[0][2]
    known = {f"{mfc}/{type(step).__name__}": step for mfc, steps in run.program.items() for step in steps}
    found: list[Activity] = []
    for name, rank, began, ended in spans:
        if name not in known or rank >= MOST_LANES:
            continue
        before = [(a.end, i) for i, a in enumerate(found) if a.end <= began - start + CLOCK_S and a.end > a.start]
        after = max(before, default=(0.0, None))[1]
        found.append(Activity(name.partition("/")[0], max(whole) - 1, known[name], (rank,), began - start,
                              ended - start, after))  # fmt: skip
    n_lanes = min(run.plan.n_workers, MOST_LANES)
    return max(whole), Timeline(n_lanes, tuple(found), (max(a.end for a in found),))


def _trace(path: Path) -> Iterator[Any]:
    """Yield the events of a trace, whose end may not be written yet."""
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            for line in file:
                text = line.strip().rstrip(",")
                if text.startswith("{") and text.endswith("}"):
                    yield json.loads(text)


def _samples(run: RunSpec) -> list[str]:
    """Show some answers of the last step that has any, with what was thought of them."""
    files = sorted(run.paths.root.glob("generations/step_*.jsonl"), key=lambda file: int(file.stem.split("_")[1]))
    if not files:
        return []
    parts = [f"<h2>answers after step {files[-1].stem.split('_')[1]}</h2>"]
    for _, row in zip(range(N_SAMPLES), json_lines(files[-1]), strict=False):
        facts = "  ".join(f"{key} {row[key]:.4g}" for key in ("rewards", "answer_tokens") if key in row)
        parts.append(f"<pre style='background:#f5f5f5;padding:8px;white-space:pre-wrap'><b>{escape(row['prompt'])}</b>"
                     f"{escape(row['response'])}\n<i>{escape(facts)}</i></pre>")  # fmt: skip
    return parts


def _options(run: RunSpec) -> str:
    text = run.paths.config.read_text(encoding="utf-8")
    return f"<details><summary>options ({run.paths.config.name})</summary><pre>{escape(text)}</pre></details>"
