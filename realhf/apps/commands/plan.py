"""``realhf plan``: predicts what a run does and how long it takes, without launching it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from realhf.api.codec import to_plain
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, MultiStageExperiment
from realhf.api.graph import Kind
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.apps.commands.quickstart import help_pattern, print_help, read_words
from realhf.apps.prepare.cadence import checkpoint_plan
from realhf.apps.prepare.preflight import Findings, PlanReport, plan_report
from realhf.apps.view.console import open_console, write_out
from realhf.apps.view.tables import Listing, render_page
from realhf.apps.view.timeline_svg import ranks_text, stack_svgs, timeline_svg
from realhf.base.errors import InfeasibleError, UserError, did_you_mean
from realhf.plan.compile.check import graph_notes
from realhf.plan.compile.program import compile_program
from realhf.plan.cost.cost import VERIFIER
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.planner import Planner
from realhf.plan.search.timeline import Prediction
from realhf.system.metrics.telemetry import Telemetry

USAGE = """usage: realhf plan EXPERIMENT [--config FILE.yaml] [key=value ...]
  --out FILE.svg|FILE.html|FILE.json   write the timeline as an image, a page with all tables, or the plan as data
  --compare MODE,MODE,...              compare predictions of several allocation modes: heuristic,search,d4t2p1
  --why                                show the cost of the next best layout of each call

No weights, data or devices are needed: a model's config.json is enough, and dataset.path may be omitted.
EXPERIMENT is listed by realhf quickstart --help, or my_file.py:MyExperiment.

exit code 0: the plan can run; 1: it cannot, because the graph is invalid or memory is too small (with --compare: in all
modes); 2: an option or a file is invalid."""
FLAGS = ("--out", "--compare", "--why", "--config", "--help", "-h")
TEXT_WIDTH = 120
WORKER_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Values of ``env.workers`` and ``reward.processes`` for which steps are predicted."""
NEGLIGIBLE = 0.01  # gain of a step by more judge processes, below which they are enough
Predicted = Mapping[str, tuple[ExecutionPlan, Prediction]]  # by allocation mode


def main(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        return print(USAGE)
    words, flags = _flags(arguments)
    if (pattern := help_pattern(arguments)) is not None:
        return print_help(words[0], pattern)
    experiment, _ = read_words(words[0], words[1:])
    result = planned(words[0], experiment, _modes(flags.get("--compare", "")), why="--why" in flags)
    _show(result)
    if "--out" in flags:
        result.save(flags["--out"])
    if not result.fits:
        raise InfeasibleError(result.report.too_large())


@dataclass(frozen=True)
class Planned:
    """A planned run: predictions by allocation mode, of which the first is the run's, and the tables to show."""

    report: PlanReport
    results: Predicted
    tables: list[Listing]

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.report.prediction.seconds

    @property
    def peak_bytes(self) -> float:
        """The predicted peak memory of a worker."""
        return self.report.prediction.peak

    @property
    def fits(self) -> bool:
        """True if the memory of the workers suffices in one of the allocation modes."""
        return any(p.peak <= self.report.machine.hardware.usable for _, p in self.results.values())

    @property
    def layouts(self) -> dict[str, str]:
        """The workers and the layout of every call."""
        return {name: str(placement) for name, placement in self.report.plan.placements.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an image (``.svg``), a page with all tables (``.html``), or the plan as data (``.json``)."""
        _write(Path(path), self.report, self.results, self.tables)

    def __str__(self) -> str:
        return "\n\n".join(f"{table.title}\n{table.text(TEXT_WIDTH)}" for table in self.tables)


def planned(name: str, experiment: Experiment, modes: Sequence[str] = (), why: bool = False) -> Planned:
    """Plan a run, or compare ``modes``; ``UserError`` for invalid options or multi-stage experiments."""
    if isinstance(experiment, MultiStageExperiment):
        raise UserError(f"{name} consists of several runs that are planned one by one; plan one of them,"
                        " for example gen or sft")  # fmt: skip
    if modes:
        experiment.allocation_mode = modes[0]
    report = plan_report(name, experiment)
    results = {experiment.allocation_mode: (report.plan, report.prediction), **_others(report, modes[1:])}
    if modes:
        tables = [_comparison(report, results)]
    else:
        prediction, capacity = report.prediction, report.machine.hardware.usable
        instructions = _instructions(report.planner, report.plan)
        tables = [_allocation(report), *_savings(report), instructions, _memory(prediction, capacity),
                  *_environments(report), *_judges(report), _step(report)]  # fmt: skip
    if why:
        tables.append(_why(report.planner, report.plan))
    return Planned(report, results, tables)


def _flags(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    words, flags, rest = [], {}, iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if word in ("--why", "--help", "-h"):
            flags["--help" if word == "-h" else word] = "yes"
        elif name in ("--out", "--compare"):
            flags[name] = value if equals else next(rest, "")
            if not flags[name]:
                raise UserError(f"{name} needs a value\n{USAGE}")
        elif word.startswith("-") and word != "--config":
            raise UserError(f"unknown flag {word}{did_you_mean(name, FLAGS)}\n{USAGE}")
        else:
            words.append(word)
    if not words:
        raise UserError(f"missing EXPERIMENT\n{USAGE}")
    if "--out" in flags and Path(flags["--out"]).suffix not in (".svg", ".html", ".json"):
        raise UserError(f"--out {flags['--out']}: the suffix must be .svg, .html or .json")
    return words, flags


def _modes(text: str) -> list[str]:
    """Split modes at commas, except within modes of single calls: ``heuristic,actor_gen:d2,*:d1`` are two."""
    modes: list[str] = []
    for part in filter(None, text.split(",")):
        if ":" in part and modes and ":" in modes[-1]:
            modes[-1] += f",{part}"
        else:
            modes.append(part)
    return list(dict.fromkeys(modes))


def _others(report: PlanReport, modes: Sequence[str]) -> Predicted:
    findings = Findings()  # the profile may have no entry that a plan needs
    results = {mode: findings.attempt(partial(report.under, mode), f"allocation_mode={mode}: ") for mode in modes}
    findings.report()
    return {mode: found for mode, found in results.items() if found}


def _allocation(report: PlanReport) -> Listing:
    rows = []
    seconds = report.prediction.call_seconds
    for mfc in report.planner.graph.topological:
        placement = report.plan[mfc.name]
        limits, (compute, moves) = placement.micro_batching, seconds[mfc.name]
        batching = f"{limits.max_tokens_per_mb}" + (f", {limits.max_num_seqs} rows" if limits.max_num_seqs else "")
        cells = (mfc.name, mfc.kind.value, mfc.role or "-", str(placement), batching)
        rows.append((*cells, f"{compute:.3g}", f"{moves:.3g}" if moves else "-"))
    return Listing("allocation", "llllrrr", ("call", "kind", "role", "layout", "tokens/mb", _seconds(report), "moves"),
                   tuple(rows))  # fmt: skip


def _savings(report: PlanReport) -> list[Listing]:
    """Return what the planner has chosen for options that are ``auto``."""
    chosen = {name: placement.saving for name, placement in report.plan.placements.items() if placement.saving}
    rows = tuple((name, str(saving)) for name, saving in chosen.items())
    return [Listing("memory saving (auto)", "ll", (), rows)] if rows else []


def _instructions(planner: Planner, plan: ExecutionPlan) -> Listing:
    rows = []
    for name, steps in compile_program(planner.graph, plan).items():
        mfc = planner.graph[name]
        for i, step in enumerate(steps):
            outputs = f", outputs {', '.join(mfc.outputs)}" if isinstance(step, Compute) and mfc.outputs else ""
            rows.append((name if i == 0 else "", type(step).__name__, instruction_text(step) + outputs))
    return Listing("instructions", "lll", (), tuple(rows))


def instruction_text(step: Instruction) -> str:
    match step:
        case Transfer(keys, layout):
            return f"{', '.join(keys)} to {layout}"
        case Reallocate(role, src, target, dst, eta):
            ema = f", EMA update of {target} with weight {eta:g}" if eta < 1 else ""
            return f"{role} from {src} to {dst}{ema}"
        case Compute(_, role, layout):
            return f"{role or 'no model'} on {layout}"
        case Load(role, layout) | Offload(role, layout) | Release(role, layout):
            return f"{role} on {layout}"


def _environments(report: PlanReport) -> list[Listing]:
    """Return the predicted rollout for several values of ``env.workers``, up to the first that makes no difference."""
    calls, rows, before = report.planner.calls, list[tuple[str, str]](), float("inf")
    if (load := calls.cost.environment) is None:
        return []
    mfc = next(mfc for mfc in report.planner.graph.mfcs if mfc.kind is Kind.GENERATE)
    placement = report.plan[mfc.name]
    rollouts = calls.rows(mfc, placement.layout.strategy.dp)
    for workers in (*WORKER_COUNTS, load.workers):
        cost = replace(calls.cost, environment=replace(load, workers=workers))
        seconds = cost.compute(mfc, placement, rollouts).seconds
        if workers == load.workers or seconds < 0.99 * before:
            rows.append((f"{workers}", f"{seconds:.3g}"))
        before = min(before, seconds)
    rows = sorted(set(rows), key=lambda row: int(row[0]))
    return [Listing("environments", "rr", ("env.workers", f"{mfc.name}, {_seconds(report)}"), tuple(rows))]


def _judges(report: PlanReport) -> list[Listing]:
    """Return the predicted step for several values of ``reward.processes``, up to the first that is enough.

    Further processes would make a step less than 1 % faster: the rewards are not on its critical path, or one response
    takes as long.
    """
    planner, cost = report.planner, report.planner.calls.cost
    verifier = next((mfc.name for mfc in planner.graph.topological if mfc.interface.name == VERIFIER), "")
    if (load := cost.rewards) is None:
        return []

    def predicted(processes: int) -> Prediction:
        changed = replace(cost, rewards=replace(load, processes=processes))
        return replace(planner, calls=replace(planner.calls, cost=changed)).predict(report.plan)

    rows, least, enough = [], predicted(max(1 << 20, load.processes)).seconds, 0
    for processes in sorted({*WORKER_COUNTS, load.processes}):
        found = report.prediction if processes == load.processes else predicted(processes)
        if not enough or processes == load.processes:
            share = f"{100 * found.critical_shares.get(verifier, 0.0):.0f}%"
            seconds = f"{found.call_seconds[verifier][0]:.3g}", f"{found.seconds:.4g}"
            rows.append((f"{processes}", *seconds, share))
        if not enough and found.seconds <= (1 + NEGLIGIBLE) * least:
            enough = processes
    title = f"judges ({enough} processes are enough)" if enough else "judges (more processes are needed)"
    head = "reward.processes", f"{verifier}, {_seconds(report)}", "step", "of the critical path"
    return [Listing(title, "rrrr", head, tuple(rows))]


def _memory(prediction: Prediction, capacity: float) -> Listing:
    rows = []
    for needed, ranks in _group_by_memory(prediction).items():
        parts = sorted(((size, name) for name, size in asdict(needed).items() if size), reverse=True)
        breakdown = ", ".join(f"{name.replace('_', ' ')} {size_text(size)}" for size, name in parts)
        rows.append((ranks_text(ranks), size_text(needed.total), size_text(capacity), breakdown))
    return Listing("memory", "lrrl", ("worker", "needed", "usable", "breakdown"), tuple(rows))


def _group_by_memory(prediction: Prediction) -> dict[Bytes, list[int]]:
    groups: dict[Bytes, list[int]] = {}
    for rank, needed in prediction.memory.items():
        groups.setdefault(needed, []).append(rank)
    return groups


def size_text(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _seconds(report: PlanReport) -> str:
    """Return the name of predicted seconds: without a profile they are limits of the hardware, not predictions."""
    return "seconds" if report.machine.is_measured else "seconds, at least"


def _step(report: PlanReport) -> Listing:
    prediction = report.prediction
    shares = prediction.critical_shares.items()
    path = ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares if share >= 0.005)
    busy = f"{100 * (1 - prediction.timeline.idle):.0f}%"
    word = "predicted" if report.machine.is_measured else "at least"
    step = (word, f"{prediction.seconds:.4g} s")
    checkpoints = [("checkpoints", str(plan))] if (plan := checkpoint_plan(report)) else []
    return Listing("step", "ll", (), (step, ("workers busy", busy), ("critical path", path), *checkpoints))


def _comparison(report: PlanReport, results: Predicted) -> Listing:
    capacity = report.machine.hardware.usable
    best = min(p.seconds for _, p in results.values())
    rows = []
    for mode, (plan, p) in results.items():
        fits = "" if p.peak <= capacity else ", too large"
        busy = f"{100 * (1 - p.timeline.idle):.0f}%"
        cells = (mode, f"{p.seconds:.4g} s", f"{p.seconds / best:.2f}", busy, size_text(p.peak) + fits)
        rows.append((*cells, layouts_text(plan)))
    head = (
        "allocation_mode",
        "step" if report.machine.is_measured else "step, at least",
        "relative",
        "busy",
        "peak memory",
        "layouts",
    )
    return Listing(f"comparison (usable memory per worker: {size_text(capacity)})", "lrrrrl", head, tuple(rows))


def layouts_text(plan: ExecutionPlan) -> str:
    """Return the layouts of a plan with their calls, or the only layout."""
    calls: dict[str, list[str]] = {}
    for name, placement in plan.placements.items():
        calls.setdefault(str(placement), []).append(name)
    if len(calls) == 1:
        return next(iter(calls))
    return "; ".join(f"{layout}: {', '.join(names)}" for layout, names in calls.items())


def _why(planner: Planner, plan: ExecutionPlan) -> Listing:
    now, others = planner.alternatives(plan)
    rows = []
    for name, best in others.items():
        cells = (str(best.layout), f"{100 * (best.seconds / now - 1):+.1f}%") if best else ("none that fits", "-")
        rows.append((name, str(plan[name].layout), *cells))
    return Listing("why", "lllr", ("call", "layout", "next best with the others fixed", "step time"), tuple(rows))


def _show(result: Planned) -> None:
    report = result.report
    out, word = open_console(), "predicted from" if report.machine.is_measured else "bounded by"
    out.print(f"{report.name}: {report.n_rows_text}, {report.plan.n_workers} x {report.device}, {word} "
              f"{report.machine.source}\n", markup=False)  # fmt: skip
    for listing in result.tables:
        out.print(listing.title, style="bold", markup=False)
        out.print(f"{listing.text(out.width)}\n", markup=False)
    for note in graph_notes(report.graph, report.experiment.roles(), Telemetry.logged_keys):
        out.print(f"note: {note}", markup=False)
    for warning in report.experiment.warnings():
        out.print(f"warning: {warning}", markup=False)


def _write(path: Path, report: PlanReport, results: Predicted, tables: list[Listing]) -> None:
    names = [m.name for m in report.graph.mfcs]
    until = max(p.timeline.steady_state[1] - p.timeline.steady_state[0] for _, p in results.values())
    images = [timeline_svg(p.timeline, names, f"{report.name}, {mode}: {p.seconds:.3g} s per step", until)
              for mode, (_, p) in results.items()]  # fmt: skip
    match path.suffix:
        case ".svg":
            content = stack_svgs(images)
        case ".html":
            content = render_page(f"realhf plan {report.name}", images, tables)
        case _:
            content = json.dumps(_data(report, results), indent=1)
    write_out(path, content)


def _data(report: PlanReport, results: Predicted) -> dict[str, object]:
    modes = {
        mode: {
            "step_s": p.seconds,
            "busy": 1 - p.timeline.idle,
            "peak_bytes": p.peak,
            "fits": p.peak <= report.machine.hardware.usable,
            "calls": {name: {"compute_s": c, "moves_s": m} for name, (c, m) in p.call_seconds.items()},
            "memory": [{"workers": ranks, **asdict(needed)} for needed, ranks in _group_by_memory(p).items()],
            "plan": to_plain(plan),
        }
        for mode, (plan, p) in results.items()
    }
    return {
        "experiment": report.name,
        "machine": report.machine.source,
        "is_measured": report.machine.is_measured,
        "modes": modes,
    }
