"""From graph and plan to a program: per MFC, the instructions in order. And what every worker derives from it."""

from dataclasses import replace

from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph
from realhf.api.layout import Layout
from realhf.api.program import Compute, Instruction, Load, Offload, Program, Reallocate, Release, Transfer


def home_layout(graph: Graph, plan: ExecutionPlan, role: str) -> Layout:
    """Return the layout in which a role's weights live between calls: its trainer's, or its first call's."""
    keeper = graph.trainer(role) or next(m for m in graph.mfcs if m.role == role)
    return plan[keeper.name].layout


def with_evaluation(graph: Graph, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with a placement for every call on held-out rows: its role's home, or the first call's."""

    def like(role: str | None) -> Placement:
        first = next((m for m in graph.mfcs if m.role == role), graph.mfcs[0])
        return plan[(graph.trainer(role) or first).name if role else first.name]

    return replace(plan, placements={**plan.placements, **{m.name: like(m.role) for m in graph.evaluation}})


def compile_program(graph: Graph, plan: ExecutionPlan) -> Program:
    """Return the instructions of every MFC that has a placement, which those on held-out rows may lack.

    Weights are borrowed wherever a call is laid out unlike its role's home.
    """
    placed = (*graph.mfcs, *(m for m in graph.evaluation if m.name in plan.placements))
    return {m.name: _instructions(m, graph, plan) for m in placed}


def _instructions(mfc: MFC, graph: Graph, plan: ExecutionPlan) -> tuple[Instruction, ...]:
    """Rows come first: who holds them gives them away before it turns to work of its own."""
    layout = plan[mfc.name].layout
    rows = Transfer(mfc.inputs, layout)
    work: list[Instruction] = [Compute(mfc.name, mfc.role, layout)]
    if mfc.role is None:
        return (rows, *work)
    source = home_layout(graph, plan, mfc.role)
    if source != layout:
        work = [Reallocate(mfc.role, source, mfc.role, layout), *work, Release(mfc.role, layout)]
    for sync in graph.syncs:
        if sync.after == mfc.name:
            ends = (home_layout(graph, plan, sync.source), home_layout(graph, plan, sync.target))
            work.append(Reallocate(sync.source, ends[0], sync.target, ends[1], sync.eta))
    if mfc.role in graph.offloaded:
        work = [Load(mfc.role, source), *work, Offload(mfc.role, source)]
    return (rows, *work)


def rank_engines(program: Program, rank: int) -> tuple[tuple[str, Layout], ...]:
    """Return the (role, layout) pairs that a worker must hold an engine for: where it computes or lends weights."""
    pairs: dict[tuple[str, Layout], None] = {}
    for instructions in program.values():
        for step in instructions:
            match step:
                case Compute(_, str() as role, layout):
                    pairs[role, layout] = None
                case Reallocate(role, src, target, dst):
                    pairs[role, src] = pairs[target, dst] = None
    return tuple((role, layout) for role, layout in pairs if rank in layout.mesh.ranks)


def served_engines(graph: Graph, plan: ExecutionPlan) -> frozenset[tuple[str, Layout]]:
    """Return the (role, layout) pairs from which a server generates: it maps their weights."""
    calls = [m for m in graph.mfcs if m.role is not None and plan[m.name].backend is not Backend.native]
    return frozenset((m.role, plan[m.name].layout) for m in calls if m.role is not None)


def process_groups(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the process groups that the program needs, in the one order in which every worker creates them."""
    groups: dict[tuple[int, ...], None] = {}
    for instructions in program.values():
        for step in instructions:
            if not isinstance(step, Compute):
                continue
            for axis in ("dp", "tp", "pp"):
                for rank in step.layout.mesh.ranks:
                    members = step.layout.axis(axis, rank)
                    if len(members) > 1:
                        groups[members] = None
    return tuple(groups)


def layout_ranks(instructions: tuple[Instruction, ...]) -> frozenset[int]:
    """Return the workers that take part in an MFC by its layouts (holders of its rows come on top)."""
    ranks: set[int] = set()
    for step in instructions:
        match step:
            case Reallocate(_, src, _, dst):
                ranks |= {*src.mesh.ranks, *dst.mesh.ranks}
            case Compute(_, _, layout):
                ranks |= {*layout.mesh.ranks}
    return frozenset(ranks)
