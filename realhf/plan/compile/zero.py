"""Which calls run in ZeRO-3 layouts: training of roles with ``zero_stage=3``, and forward passes if requested."""

from collections.abc import Mapping
from dataclasses import replace

from realhf.api.config.option import AUTO
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import Layout

Roles = Mapping[str, RoleSpec]


def zero3_layout(mfc: MFC, layout: Layout, roles: Roles) -> Layout:
    """Return the layout that a call has: with shares of weights on data-parallel ranks, or whole ones.

    Generation needs whole weights for every token, and LoRA's frozen weights are not sharded.
    """
    if mfc.role is None:
        return layout.with_zero3(False)
    spec = roles[mfc.role].spec
    wanted = layout.strategy.zero3 or (mfc.is_train and spec.zero_stage == 3)
    return layout.with_zero3(wanted and mfc.kind is not Kind.GENERATE and not spec.lora.rank)


def zero3_layouts(mfc: MFC, layout: Layout, roles: Roles) -> list[Layout]:
    """Return the layouts among which the planner chooses: with ``zero_stage=auto`` training also has ZeRO-3."""
    given = zero3_layout(mfc, layout, roles)
    if mfc.role is None or not mfc.is_train or roles[mfc.role].spec.zero_stage != AUTO:
        return [given]
    return list(dict.fromkeys([given, zero3_layout(mfc, layout.with_zero3(True), roles)]))


def with_zero3(plan: ExecutionPlan, graph: Graph, roles: Roles) -> ExecutionPlan:
    """Return the plan with the layouts of ``zero3_layout``."""
    layouts = {m.name: zero3_layout(m, plan[m.name].layout, roles) for m in graph.mfcs}
    placements = {name: replace(plan[name], layout=layout) for name, layout in layouts.items()}
    return replace(plan, placements=plan.placements | placements)
