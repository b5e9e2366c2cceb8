"""``realhf plan``: what a run would do and how long it would take, without launching it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from realhf.api.codec import to_plain
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.multi_stage import MultiStageExperiment
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.apps.commands.quickstart import print_options, read_words
from realhf.apps.prepare.preflight import PlanReport, plan_report
from realhf.apps.view.console import open_console, write_out
from realhf.apps.view.tables import Listing
from realhf.apps.view.timeline_svg import page, ranks_text, stack_svgs, timeline_svg
from realhf.base.errors import InfeasibleError, UserError, did_you_mean
from realhf.plan.compile.check import graph_notes
from realhf.plan.compile.program import compile_program
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.planner import Planner
from realhf.plan.search.prediction import Alternative, Prediction
from realhf.system.metrics.telemetry import Telemetry

USAGE = """usage: realhf plan EXPERIMENT [--config FILE.yaml] [key=value ...]
  --out FILE.svg|FILE.html|FILE.json   the timeline as a picture, everything on a page, or the plan as data
  --compare MODE,MODE,...              predict several allocation modes side by side: heuristic,search,d4t2p1
  --why                                what the next best layout of every call would cost

Neither weights nor data nor devices are needed: a model's config.json is enough, and dataset.path may be left out.
EXPERIMENT is one that realhf quickstart --help lists, or my_file.py:MyExperiment.

exit code 0: the plan can run; 1: it cannot, the graph is wrong or too little memory is there (of --compare: for every
mode), each problem is named; 2: an option or a file is wrong."""
FLAGS = ("--out", "--compare", "--why", "--config", "--help", "-h")
Predicted = Mapping[str, tuple[ExecutionPlan, Prediction]]
"""Plans and what is expected of them, by allocation mode."""


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    words, flags = _flags(arguments)
    if "--help" in flags:
        print(f"{USAGE}\n")
        print_options(words[0])
        return
    experiment, _ = read_words(words[0], words[1:])
    if isinstance(experiment, MultiStageExperiment):
        raise UserError(f"{words[0]} is several runs, each of which is planned when its turn comes; plan one of them,"
                        " like gen or sft")  # fmt: skip
    modes = _modes(flags.get("--compare", ""))
    if modes:
        experiment.config.allocation_mode = modes[0]
    found = plan_report(words[0], experiment)
    results = {experiment.config.allocation_mode: (found.plan, found.prediction), **_others(found, modes[1:])}
    listings = [_comparison(found, results)] if modes else _listings(found)
    if "--why" in flags:
        listings.append(_why(found.planner, found.plan))
    _show(found, listings)
    if "--out" in flags:
        _write(Path(flags["--out"]), found, results, listings)
    if all(prediction.peak > found.machine.hardware.usable for _, prediction in results.values()):
        raise InfeasibleError(found.too_large())


def _flags(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Take the flags of this command out of the words."""
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
        raise UserError(f"which experiment?\n{USAGE}")
    if "--out" in flags and Path(flags["--out"]).suffix not in (".svg", ".html", ".json"):
        raise UserError(f"--out {flags['--out']}: write .svg, .html or .json")
    return words, flags


def _modes(text: str) -> list[str]:
    """Read modes; those for single calls have commas of their own: ``heuristic,actor_gen:d2,*:d1`` are two."""
    modes: list[str] = []
    for part in filter(None, text.split(",")):
        if ":" in part and modes and ":" in modes[-1]:
            modes[-1] += f",{part}"
        else:
            modes.append(part)
    return list(dict.fromkeys(modes))


def _others(found: PlanReport, modes: list[str]) -> Predicted:
    """Predict further modes; what is wrong with any of them is said at once."""
    results, problems = {}, []
    for mode in modes:
        try:
            plan = found.under(mode)
            results[mode] = (plan, found.planner.predict(plan))
        except UserError as error:
            problems += error.problems
        except ValueError as error:  # the profile lacks something that this plan needs
            problems.append(f"allocation_mode={mode}: {error}")
    if problems:
        raise UserError(problems)
    return results


def _listings(found: PlanReport) -> list[Listing]:
    prediction = found.prediction
    return [
        _allocation(found),
        _instructions(found.planner, found.plan),
        _memory(prediction, found.machine.hardware.usable),
        _step(prediction),
    ]


def _allocation(found: PlanReport) -> Listing:
    rows = []
    spent = found.prediction.call_seconds
    for mfc in found.planner.graph.topological:
        placement = found.plan[mfc.name]
        limits, (compute, moves) = placement.micro_batching, spent[mfc.name]
        batching = f"{limits.max_tokens_per_mb}" + (f", {limits.max_num_seqs} rows" if limits.max_num_seqs else "")
        cells = (mfc.name, mfc.kind.value, mfc.role or "-", str(placement), batching)
        rows.append((*cells, f"{compute:.3g}", f"{moves:.3g}" if moves else "-"))
    return Listing("allocation", "llllrrr", ("call", "kind", "role", "layout", "tokens/mb", "seconds", "moves"),
                   tuple(rows))  # fmt: skip


def _instructions(planner: Planner, plan: ExecutionPlan) -> Listing:
    rows = []
    for name, steps in compile_program(planner.graph, plan).items():
        mfc = planner.graph[name]
        for i, step in enumerate(steps):
            made = f", makes {', '.join(mfc.outputs)}" if isinstance(step, Compute) and mfc.outputs else ""
            rows.append((name if i == 0 else "", type(step).__name__, text(step) + made))
    return Listing("instructions", "lll", (), tuple(rows))


def text(step: Instruction) -> str:
    """Return what an instruction does with what, in words."""
    match step:
        case Transfer(keys, layout):
            return f"{', '.join(keys)} to {layout}"
        case Reallocate(role, src, target, dst, eta):
            follows = f" of {target}, which moves by {eta:g}" if eta < 1 else ""
            return f"{role} from {src} to {dst}{follows}"
        case Compute(_, role, layout):
            return f"{role or 'no model'} on {layout}"
        case Load(role, layout) | Offload(role, layout) | Release(role, layout):
            return f"{role} on {layout}"


def _memory(prediction: Prediction, capacity: float) -> Listing:
    rows = [(ranks_text(ranks), size_text(some.total), size_text(capacity), _parts(some))
            for ranks, some in _alike(prediction)]  # fmt: skip
    return Listing("memory", "lrrl", ("worker", "needs", "may fill", "for"), tuple(rows))


def _alike(prediction: Prediction) -> list[tuple[list[int], Bytes]]:
    """Return workers that need the same, and what."""
    alike: dict[Bytes, list[int]] = {}
    for rank, some in prediction.memory.items():
        alike.setdefault(some, []).append(rank)
    return [(ranks, some) for some, ranks in alike.items()]


def _parts(some: Bytes) -> str:
    parts = sorted(((size, name) for name, size in asdict(some).items() if size), reverse=True)
    return ", ".join(f"{name.replace('_', ' ')} {size_text(size)}" for size, name in parts)


def size_text(nbytes: float) -> str:
    """Return bytes in the largest unit that leaves a digit before the point."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _step(prediction: Prediction) -> Listing:
    path = prediction.critical_shares
    chain = ", ".join(f"{name} {100 * share:.0f}%" for name, share in path.items() if share >= 0.005)
    rows = (
        ("predicted", f"{prediction.seconds:.4g} s"),
        ("workers busy", f"{100 * (1 - prediction.timeline.idle):.0f}%"),
        ("critical path", chain),
    )
    return Listing("step", "ll", (), rows)


def _comparison(found: PlanReport, results: Predicted) -> Listing:
    capacity = found.machine.hardware.usable
    best = min(p.seconds for _, p in results.values())
    rows = []
    for mode, (plan, p) in results.items():
        fits = "" if p.peak <= capacity else ", too much"
        busy = f"{100 * (1 - p.timeline.idle):.0f}%"
        cells = (mode, f"{p.seconds:.4g} s", f"{p.seconds / best:.2f}", busy, size_text(p.peak) + fits)
        rows.append((*cells, layouts_text(plan)))
    head = ("allocation_mode", "step", "of best", "busy", "fullest worker", "layouts")
    return Listing(f"comparison (workers may fill {size_text(capacity)})", "lrrrrl", head, tuple(rows))


def layouts_text(plan: ExecutionPlan) -> str:
    """Return the layouts of a plan, each with its calls; one that all share stands alone."""
    calls: dict[str, list[str]] = {}
    for name, placement in plan.placements.items():
        calls.setdefault(str(placement), []).append(name)
    if len(calls) == 1:
        return next(iter(calls))
    return "; ".join(f"{layout}: {', '.join(names)}" for layout, names in calls.items())


def _why(planner: Planner, plan: ExecutionPlan) -> Listing:
    now, others = planner.alternatives(plan)
    rows = [(name, str(plan[name].layout), *_alternative(found, now)) for name, found in others.items()]
    head = ("call", "has", "next best while the others stay", "a step takes")
    return Listing("why", "lllr", head, tuple(rows))


def _alternative(found: Alternative | None, now: float) -> tuple[str, str]:
    if found is None:
        return "none that fits", "-"
    return str(found.layout), f"{100 * (found.seconds / now - 1):+.1f}%"


def _show(found: PlanReport, listings: list[Listing]) -> None:
    out = open_console()
    out.print(f"{found.name}: {found.n_rows_text}, {found.plan.n_workers} x {found.device}, predicted from "
              f"{found.machine.source}\n", markup=False)  # fmt: skip
    for listing in listings:
        out.print(listing.title, style="bold", markup=False)
        out.print(f"{listing.text(out.width)}\n", markup=False)
    for note in graph_notes(found.graph.mfcs, found.experiment.roles(), Telemetry.logged_keys):
        out.print(f"note: {note}", markup=False)
    for warning in found.experiment.config.warnings():
        out.print(f"warning: {warning}", markup=False)


def _write(path: Path, found: PlanReport, results: Predicted, listings: list[Listing]) -> None:
    names = [m.name for m in found.graph.mfcs]
    until = max(p.timeline.steady_state[1] - p.timeline.steady_state[0] for _, p in results.values())
    pictures = [timeline_svg(p.timeline, names, f"{found.name}, {mode}: {p.seconds:.3g} s a step", until)
                for mode, (_, p) in results.items()]  # fmt: skip
    match path.suffix:
        case ".svg":
            content = stack_svgs(pictures)
        case ".html":
            content = page(f"realhf plan {found.name}", pictures, listings)
        case _:
            content = json.dumps(_data(found, results), indent=1)
    write_out(path, content)


def _data(found: PlanReport, results: Predicted) -> dict[str, object]:
    modes = {
        mode: {
            "step_s": p.seconds,
            "busy": 1 - p.timeline.idle,
            "peak_bytes": p.peak,
            "fits": p.peak <= found.machine.hardware.usable,
            "calls": {name: {"compute_s": c, "moves_s": m} for name, (c, m) in p.call_seconds.items()},
            "memory": [{"workers": ranks, **asdict(some)} for ranks, some in _alike(p)],
            "plan": to_plain(plan),
        }
        for mode, (plan, p) in results.items()
    }
    return {"experiment": found.name, "machine": found.machine.source, "modes": modes}
