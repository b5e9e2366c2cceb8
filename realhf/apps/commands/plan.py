"""``realhf plan``: predicts what a run does and how long it takes, without launching it."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from realhf.api.codec import to_json, to_plain
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, MultiStageExperiment
from realhf.apps.commands.quickstart import help_pattern, print_help, read_words
from realhf.apps.prepare.plan_report import PlanReport
from realhf.apps.prepare.preflight import Findings, plan_report
from realhf.apps.prepare.sweep import (
    Sweep,
    SweepPoint,
    cheapest,
    cluster_words,
    parse_sweep,
    smaller_clusters,
    swept,
    with_goal,
)
from realhf.apps.view.console import open_console, write_out
from realhf.apps.view.plan_summary import assumptions, step_table
from realhf.apps.view.plan_tables import (
    allocation_table,
    comparison_table,
    environment_tables,
    group_by_memory,
    instructions_table,
    judge_tables,
    memory_table,
    saving_tables,
    why_table,
)
from realhf.apps.view.sweep_view import sweep_svg, sweep_table
from realhf.apps.view.tables import Listing, render_page
from realhf.apps.view.timeline_svg import stack_svgs, timeline_svg
from realhf.base.errors import InfeasibleError, UserError, did_you_mean
from realhf.plan.advice.goals import Goal
from realhf.plan.advice.throughput import Economy
from realhf.plan.compile.check import graph_notes
from realhf.plan.compile.plan_text import SUFFIX
from realhf.plan.search.timeline import Prediction
from realhf.system.metrics.telemetry import Telemetry

USAGE = """usage: realhf plan EXPERIMENT [--config FILE.yaml] [key=value ...]
  --out FILE.svg|FILE.html|FILE.json   write the timeline as an image, a page with all tables, or the plan as data
  --save FILE.json                     write the plan; allocation_mode=FILE.json runs it
  --compare MODE,MODE,...              compare predictions of several allocation modes: heuristic,search,d4t2p1
  --sweep n_gpus=8,16,64               compare values of n_gpus or of an integer option; 8..64 doubles, 2..8..2 adds 2
  --goal step|cost|memory              search the fastest step, the fewest GPU-hours, or the smallest peak memory
  --why                                show the next best layout of each call, and what decides against it

No weights, data or devices are needed: a model's config.json is enough, and dataset.path may be omitted.
EXPERIMENT is listed by realhf quickstart --help, or my_file.py:MyExperiment.

exit code 0: the plan can run; 1: it cannot, because the graph is invalid or memory is too small (with --compare: in all
modes, with --sweep: for all values); 2: an option or a file is invalid."""
VALUED = ("--out", "--save", "--compare", "--sweep", "--goal")
FLAGS = (*VALUED, "--why", "--config", "--help", "-h")
TEXT_WIDTH = 120
Predicted = Mapping[str, tuple[ExecutionPlan, Prediction]]  # by allocation mode


def main(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        return print(USAGE)
    words, flags = _flags(arguments)
    if (pattern := help_pattern(arguments)) is not None:
        return print_help(words[0], pattern)
    name, goal = words[0], Goal(flags.get("--goal", Goal.step.value))

    def read(more: Sequence[str] = ()) -> Experiment:
        experiment = read_words(name, [*words[1:], *more])[0]
        return with_goal(experiment, goal) if "--goal" in flags else experiment

    experiment = read()
    if "--sweep" in flags:
        return _sweep(name, read, parse_sweep(flags["--sweep"]), goal, flags)
    if goal is Goal.cost and not isinstance(experiment, MultiStageExperiment):
        sweep = smaller_clusters(experiment)
        points = swept(name, read, sweep)
        best = cheapest(points)
        experiment = read(cluster_words(best.value, experiment))
        result = replace(planned(name, experiment, why="--why" in flags, report=best.report), sizes=(sweep, points))
    else:
        result = planned(name, experiment, _modes(flags.get("--compare", "")), why="--why" in flags, goal=goal)
    _show(result)
    if "--out" in flags:
        result.save(flags["--out"])
    if not result.fits:
        raise InfeasibleError(result.report.too_large())
    if "--save" in flags:
        write_out(Path(flags["--save"]), to_json(result.report.plan))


def _sweep(
    name: str, read: Callable[[Sequence[str]], Experiment], sweep: Sweep, goal: Goal, flags: Mapping[str, str]
) -> None:
    points = swept(name, read, sweep, goal)
    table, out = sweep_table(sweep, points), open_console()
    report = points[0].report
    out.print(f"{name}: {report.n_rows_text}, {_source(report)}\n", markup=False)
    out.print(table.title, style="bold", markup=False)
    out.print(f"{table.text(out.width)}\n", markup=False)
    if "--out" in flags:
        picture = sweep_svg(sweep, points, f"{name}, {report.device}, {report.experiment.allocation_mode}")
        content = {
            ".svg": picture,
            ".html": render_page(f"realhf plan {name}", [picture], [table]),
            ".json": json.dumps([{sweep.key: point.value, **_sweep_data(point)} for point in points], indent=1),
        }
        write_out(Path(flags["--out"]), content[Path(flags["--out"]).suffix])
    if not any(point.report.fits for point in points):
        raise InfeasibleError(points[-1].report.too_large())


def _sweep_data(point: SweepPoint) -> dict[str, object]:
    report = point.report
    return {"n_workers": point.n_workers, "allocation_mode": report.allocation_text, "plan": to_plain(report.plan),
            "fits": report.fits, "peak_bytes": report.prediction.peak, "step_error": report.relative_error,
            **_economy(report.economy)}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A planned run: predictions by allocation mode, of which the first is the run's, and the tables to show.

    ``sizes`` are the compared sizes of the cluster, of which the report has the cheapest.
    """

    report: PlanReport
    results: Predicted
    tables: list[Listing]
    sizes: tuple[Sweep, Sequence[SweepPoint]] | None = None

    @property
    def allocation_mode(self) -> str:
        """The allocation mode that makes this plan, with the same options otherwise."""
        return self.report.allocation_text

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


def planned(
    name: str,
    experiment: Experiment,
    modes: Sequence[str] = (),
    why: bool = False,
    goal: Goal = Goal.step,
    report: PlanReport | None = None,
) -> Planned:
    """Plan a run (or take its ``report``), or compare ``modes``; ``UserError`` for invalid options or several runs."""
    if isinstance(experiment, MultiStageExperiment):
        raise UserError(f"{name} consists of several runs that are planned one by one; plan one of them,"
                        " for example gen or sft")  # fmt: skip
    if modes:
        experiment.allocation_mode = modes[0]
    report = report or plan_report(name, experiment, goal)
    results = {experiment.allocation_mode: (report.plan, report.prediction), **_others(report, modes[1:])}
    if modes:
        tables = [comparison_table(report, results)]
    else:
        tables = [allocation_table(report), *saving_tables(report), instructions_table(report.planner, report.plan),
                  memory_table(report.prediction, report.machine.hardware.usable), *environment_tables(report),
                  *judge_tables(report), step_table(report)]  # fmt: skip
    if why:
        tables.append(why_table(report))
    return Planned(report, results, tables)


def _flags(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    words, flags, rest = [], {}, iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if word in ("--why", "--help", "-h"):
            flags["--help" if word == "-h" else word] = "yes"
        elif name in VALUED:
            flags[name] = value if equals else next(rest, "")
            if not flags[name]:
                raise UserError(f"{name} needs a value\n{USAGE}")
        elif word.startswith("-") and word != "--config":
            raise UserError(f"unknown flag {word}{did_you_mean(name, FLAGS)}\n{USAGE}")
        else:
            words.append(word)
    if not words:
        raise UserError(f"missing EXPERIMENT\n{USAGE}")
    _check_flags(flags)
    return words, flags


def _check_flags(flags: Mapping[str, str]) -> None:
    if "--out" in flags and Path(flags["--out"]).suffix not in (".svg", ".html", ".json"):
        raise UserError(f"--out {flags['--out']}: the suffix must be .svg, .html or .json")
    if "--save" in flags and Path(flags["--save"]).suffix != SUFFIX:
        raise UserError(f"--save {flags['--save']}: the suffix must be {SUFFIX}")
    goals = [goal.value for goal in Goal]
    if (goal := flags.get("--goal", goals[0])) not in goals:
        raise UserError(f"--goal {goal}: use {', '.join(goals)}{did_you_mean(goal, goals)}")
    for one, others in {"--sweep": ("--compare", "--why", "--save"), "--compare": ("--goal", "--save")}.items():
        if one in flags and (both := [other for other in others if other in flags]):
            raise UserError(f"{one} and {both[0]} cannot be combined; use one of them")


def _modes(text: str) -> list[str]:
    """Split modes at commas, except within modes of single calls: ``heuristic,actor_gen:d2@0,3,*:d1`` are two."""
    modes: list[str] = []
    for part in filter(None, text.split(",")):
        if modes and ":" in modes[-1] and (":" in part or part[0].isdigit()):
            modes[-1] += f",{part}"
        else:
            modes.append(part)
    return list(dict.fromkeys(modes))


def _others(report: PlanReport, modes: Sequence[str]) -> Predicted:
    findings = Findings()  # the profile may have no entry that a plan needs
    results = {mode: findings.attempt(partial(report.under, mode), f"allocation_mode={mode}: ") for mode in modes}
    findings.report()
    return {mode: found for mode, found in results.items() if found}


def _source(report: PlanReport) -> str:
    return f"{'predicted from' if report.machine.is_measured else 'bounded by'} {report.machine.source}"


def _show(result: Planned) -> None:
    report = result.report
    out, tables = open_console(), [*([sweep_table(*result.sizes)] if result.sizes else []), *result.tables]
    out.print(f"{report.name}: {report.n_rows_text}, {report.plan.n_workers} x {report.device}, {_source(report)}\n",
              markup=False)  # fmt: skip
    for listing in tables:
        out.print(listing.title, style="bold", markup=False)
        out.print(f"{listing.text(out.width)}\n", markup=False)
    if len(result.results) == 1:  # not a comparison
        size = report.planner.cluster.node_size
        cluster = f"n_nodes={report.plan.n_workers // size} n_gpus_per_node={size} "
        out.print(f"to run this plan: {cluster}allocation_mode='{result.allocation_mode}'\n", markup=False,
                  soft_wrap=True)  # fmt: skip
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


def _economy(found: Economy) -> dict[str, float]:
    return {"step_s": found.seconds, "tokens_per_s": found.tokens_per_s, "mfu": found.mfu,
            "worker_hours": found.worker_hours, "dollars": found.dollars}  # fmt: skip


def _data(report: PlanReport, results: Predicted) -> dict[str, object]:
    modes = {
        mode: {
            "busy": 1 - p.timeline.idle,
            "peak_bytes": p.peak,
            "fits": p.peak <= report.machine.hardware.usable,
            "calls": {name: {"compute_s": c, "moves_s": m} for name, (c, m) in p.call_seconds.items()},
            "memory": [{"workers": ranks, **asdict(needed)} for needed, ranks in group_by_memory(p).items()],
            "plan": to_plain(plan),
            "step_error": report.relative_error_of(p),
            **_economy(report.economy_of(p.seconds)),
        }
        for mode, (plan, p) in results.items()
    }
    return {
        "experiment": report.name,
        "machine": report.machine.source,
        "is_measured": report.machine.is_measured,
        "assumed": assumptions(report.planner.calls.cost.workload, report.planner.calls.batch_size),
        "search": str(report.search or ""),
        "allocation_mode": report.allocation_text,
        "modes": modes,
    }
