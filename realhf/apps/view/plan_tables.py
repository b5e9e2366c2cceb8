"""Tables of a plan: allocation, instructions, memory, environments, comparisons, and what decides."""

from collections.abc import Mapping
from dataclasses import asdict, replace

from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import Kind
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.apps.prepare.plan_report import PlanReport
from realhf.apps.view.error_text import with_error
from realhf.apps.view.tables import Listing, size_text
from realhf.apps.view.timeline_svg import ranks_text
from realhf.plan.advice.comparison import decision_text
from realhf.plan.compile.program import compile_program
from realhf.plan.cost.cost import VERIFIER
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.planner import Planner
from realhf.plan.search.timeline import Prediction

WORKER_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Values of ``env.workers`` and ``reward.processes`` for which steps are predicted."""
EQUAL = " (equal within the error)"
NEGLIGIBLE = 0.01  # gain of a step by more judge processes, below which they are enough


def allocation_table(report: PlanReport) -> Listing:
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


def saving_tables(report: PlanReport) -> list[Listing]:
    """Return what the planner has chosen for options that are ``auto``."""
    chosen = {name: placement.saving for name, placement in report.plan.placements.items() if placement.saving}
    rows = tuple((name, str(saving)) for name, saving in chosen.items())
    return [Listing("memory saving (auto)", "ll", (), rows)] if rows else []


def instructions_table(planner: Planner, plan: ExecutionPlan) -> Listing:
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


def environment_tables(report: PlanReport) -> list[Listing]:
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


def judge_tables(report: PlanReport) -> list[Listing]:
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


def memory_table(prediction: Prediction, capacity: float) -> Listing:
    rows = []
    for needed, ranks in group_by_memory(prediction).items():
        parts = sorted(((size, name) for name, size in asdict(needed).items() if size), reverse=True)
        breakdown = ", ".join(f"{name.replace('_', ' ')} {size_text(size)}" for size, name in parts)
        rows.append((ranks_text(ranks), size_text(needed.total), size_text(capacity), breakdown))
    return Listing("memory", "lrrl", ("worker", "needed", "usable", "breakdown"), tuple(rows))


def group_by_memory(prediction: Prediction) -> dict[Bytes, list[int]]:
    groups: dict[Bytes, list[int]] = {}
    for rank, needed in prediction.memory.items():
        groups.setdefault(needed, []).append(rank)
    return groups


def _seconds(report: PlanReport) -> str:
    """Return the name of predicted seconds: without a profile they are limits of the hardware, not predictions."""
    return "seconds" if report.machine.is_measured else "seconds, at least"


def comparison_table(report: PlanReport, results: Mapping[str, tuple[ExecutionPlan, Prediction]]) -> Listing:
    capacity = report.machine.hardware.usable
    best = min((p for _, p in results.values()), key=lambda p: p.seconds)
    rows = []
    for mode, (plan, p) in results.items():
        fits = "" if p.peak <= capacity else ", too large"
        busy = f"{100 * (1 - p.timeline.idle):.0f}%"
        equal = EQUAL if p is not best and report.is_equal(p, best) else ""
        relative = f"{p.seconds / best.seconds:.2f}{equal}"
        step = with_error(f"{p.seconds:.4g} s", report.relative_error_of(p))
        cells = (mode, step, relative, busy, size_text(p.peak) + fits)
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


def why_table(report: PlanReport) -> Listing:
    planner, plan, prediction = report.planner, report.plan, report.prediction
    now, others = planner.alternatives(plan)
    rows = []
    for name, best in others.items():
        cells = ("none that fits", "-", "memory")
        if best:
            changed = replace(plan, placements={**plan.placements, name: best.placement})
            other, change = planner.predict(changed), 100 * (best.seconds / now - 1)
            equal = EQUAL if report.is_equal(prediction, other) else ""
            cells = (str(best.layout), f"{change:+.1f}%{equal}", decision_text(name, prediction, other))
        rows.append((name, str(plan[name].layout), *cells))
    head = ("call", "layout", "next best with the others fixed", "step time", "what decides")
    return Listing("why", "lllrl", head, tuple(rows))
