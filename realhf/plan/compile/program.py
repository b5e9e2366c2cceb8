"""Compiles graph and plan into a program, the instructions of each MFC in order, and what workers derive from it."""

from dataclasses import replace
from itertools import chain

from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import AXES, Layout
from realhf.api.program import Compute, Instruction, Load, Offload, Program, Reallocate, Release, Transfer


def home_mfc(graph: Graph, role: str) -> MFC:
    """Return the MFC in whose layout a role's weights are stored between calls: its trainer, else its first MFC.

    A moving average without calls is stored in the layout of the call that updates it.
    """
    own = graph.trainer(role) or next((m for m in graph.mfcs if m.role == role), None) or graph.updater(role)
    assert own is not None, f"no call has or updates role '{role}'"
    return own


def home_layout(graph: Graph, plan: ExecutionPlan, role: str) -> Layout:
    """Return the layout in which a role's weights are stored between calls."""
    return plan[home_mfc(graph, role).name].layout


def with_evaluation(graph: Graph, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with placements for the evaluation MFCs: that of the role's home, or of an MFC without a role.

    Generation has the nearest layout in which a model can generate.
    """
    roleless = next((m for m in graph.mfcs if m.role is None), graph.mfcs[0])
    placements = {m.name: plan[home_mfc(graph, m.role).name if m.role else roleless.name] for m in graph.evaluation}
    for m in graph.evaluation:
        if m.kind is Kind.GENERATE:
            layout = placements[m.name].layout.for_generation()
            placements[m.name] = replace(placements[m.name], layout=layout)
    return replace(plan, placements=plan.placements | placements)


def compile_program(graph: Graph, plan: ExecutionPlan) -> Program:
    """Return the instructions of every MFC; evaluation MFCs are included if they have a placement."""
    placed = (*graph.mfcs, *(m for m in graph.evaluation if m.name in plan.placements))
    return {m.name: _instructions(m, graph, plan) for m in placed}


def _instructions(mfc: MFC, graph: Graph, plan: ExecutionPlan) -> tuple[Instruction, ...]:
    layout = plan[mfc.name].layout
    rows = Transfer(mfc.inputs, layout)  # first, so that the holders of the rows send them before other work
    work: list[Instruction] = [Compute(mfc.name, mfc.role, layout)]
    if mfc.role is None:
        return (rows, *work)
    source = home_layout(graph, plan, mfc.role)
    if source != layout:  # the call gets a temporary copy of the weights
        work = [Reallocate(mfc.role, source, mfc.role, layout), *work, Release(mfc.role, layout)]
    for sync in graph.syncs:
        if sync.after == mfc.name:
            src, dst = (home_layout(graph, plan, role) for role in (sync.source, sync.target))
            work.append(Reallocate(sync.source, src, sync.target, dst, sync.eta))
    if mfc.role in graph.offloaded:
        work = [Load(mfc.role, source), *work, Offload(mfc.role, source)]
    return (rows, *work)


def rank_engines(program: Program, rank: int) -> tuple[tuple[str, Layout], ...]:
    """Return the (role, layout) pairs for which a worker needs an engine: to compute, or to send or receive weights."""
    pairs: dict[tuple[str, Layout], None] = {}
    for step in chain.from_iterable(program.values()):
        match step:
            case Compute(_, str() as role, layout):
                pairs[role, layout] = None
            case Reallocate(role, src, target, dst):
                pairs[role, src] = pairs[target, dst] = None
    return tuple((role, layout) for role, layout in pairs if rank in layout.mesh.ranks)


def served_engines(graph: Graph, plan: ExecutionPlan) -> frozenset[tuple[str, Layout]]:
    """Return the (role, layout) pairs whose weights are mapped by an inference server."""
    placed = ((m.role, plan[m.name]) for m in graph.mfcs)
    return frozenset((role, p.layout) for role, p in placed if role is not None and p.backend is not Backend.native)


def process_groups(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the process groups of the program, in the order in which every worker creates them."""
    layouts = [step.layout for step in chain.from_iterable(program.values()) if isinstance(step, Compute)]
    axes = ((layout, axis) for layout in layouts for axis in AXES)
    groups = dict.fromkeys(layout.axis(axis, rank) for layout, axis in axes for rank in layout.mesh.ranks)
    return tuple(members for members in groups if len(members) > 1)


def instruction_ranks(step: Instruction) -> frozenset[int]:
    """Return the workers in the layouts of an instruction, without the holders of rows."""
    match step:
        case Reallocate(_, src, _, dst):
            return frozenset((*src.mesh.ranks, *dst.mesh.ranks))
        case Transfer(_, layout) | Compute(_, _, layout) | Load(_, layout) | Offload(_, layout) | Release(_, layout):
            return frozenset(layout.mesh.ranks)


def layout_ranks(instructions: tuple[Instruction, ...]) -> frozenset[int]:
    """Return the workers in the layouts of an MFC's instructions, without the holders of its rows."""
    return frozenset().union(*map(instruction_ranks, instructions))
