"""Expert and context parallelism and chunks of layers of calls: what each can have, and what the planner considers."""

from dataclasses import replace

from realhf.api.config.choices import Backend
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Kind
from realhf.api.layout import Layout, ParallelStrategy, expert_degrees
from realhf.api.model_config import ModelConfig

N_CHUNKS = 2
"""Number of chunks that the planner considers: more need more messages and save less."""


def call_problem(mfc: MFC, strategy: ParallelStrategy, role: RoleSpec | None, backend: Backend = Backend.native) -> str:
    """Return why a call cannot divide experts, rows or stages as a strategy does, or an empty string."""
    return (
        chunk_problem(mfc, strategy) or expert_problem(mfc, strategy, role, backend)
        or context_problem(mfc, strategy, role)
    )  # fmt: skip


def of_call(mfc: MFC, strategy: ParallelStrategy, model: ModelConfig | None) -> ParallelStrategy:
    """Return what a strategy for several calls means for one of them, as far as it can have it.

    Calls without experts do not divide any.
    """
    if model is None or not model.n_experts:
        strategy = replace(strategy, ep=1)
    return strategy.for_generation() if mfc.role is None or mfc.kind is Kind.GENERATE else strategy


def expert_problem(
    mfc: MFC, strategy: ParallelStrategy, role: RoleSpec | None, backend: Backend = Backend.native
) -> str:
    """Return why a call cannot have this degree of expert parallelism, or an empty string."""
    ep, tp = strategy.ep, strategy.tp
    if ep == 1 or role is None:
        return ""
    if backend is Backend.vllm:
        return f"{strategy}: vLLM shards experts by tensor parallelism; leave out e{ep}"
    if mfc.is_train and role.spec.zero_stage == 3:
        return f"{strategy}: {mfc.role}.zero_stage=3 already shards experts; leave out e{ep} or set it to 1"
    if strategy.expert_dp == 1:
        return ""
    if mfc.kind is Kind.GENERATE:
        return (f"{strategy}: replicas that generate make different numbers of steps, so experts can be divided over "
                f"tensor-parallel ranks only; nearest legal: {replace(strategy, ep=tp)}")  # fmt: skip
    if mfc.is_train and role.spec.backend is Backend.megatron:
        return f"{strategy}: megatron-core's optimizer has no range of experts; set {mfc.role}.backend=native"
    if mfc.is_train and role.spec.zero_stage == 2:
        return (f"{strategy}: with {mfc.role}.zero_stage=2 experts can be divided over tensor-parallel ranks only; set "
                f"it to 1, or use {replace(strategy, ep=tp)}")  # fmt: skip
    return ""


def expert_layouts(
    mfc: MFC, layout: Layout, model: ModelConfig | None, role: RoleSpec | None, node_size: int
) -> list[Layout]:
    """Return a layout, and with routed experts its copies with the degrees of expert parallelism to consider.

    These are tensor-parallel ranks, and the largest degrees within a node and at all. Others are between them in memory
    and in traffic.
    """
    strategy = layout.strategy
    if model is None or role is None or not model.n_experts or strategy.zero3 or strategy.ep > 1:
        return [layout]
    dp, tp = strategy.dp, strategy.tp
    legal = [ep for ep in expert_degrees(dp, tp) if max(tp, 2) <= ep <= model.n_experts]
    allowed = [ep for ep in legal if not expert_problem(mfc, replace(strategy, ep=ep), role)]
    wanted = {*allowed[:1], *allowed[-1:], *[ep for ep in allowed if ep <= node_size][-1:]}
    return [layout, *(Layout(layout.mesh, replace(strategy, ep=ep)) for ep in sorted(wanted))]


def context_problem(mfc: MFC, strategy: ParallelStrategy, role: RoleSpec | None) -> str:
    """Return why a call cannot have context parallelism, or an empty string."""
    if not strategy.context or role is None:
        return ""
    if mfc.kind is Kind.GENERATE:
        return (f"{strategy}: rows that are generated are not divided; nearest legal: "
                f"{replace(strategy, context=False)}")  # fmt: skip
    if mfc.is_train and role.spec.backend is Backend.megatron:
        return f"{strategy}: context parallelism requires {mfc.role}.backend=native"
    if mfc.is_train and role.spec.zero_stage in (2, 3):
        return f"{strategy}: context parallelism requires {mfc.role}.zero_stage=1"
    return ""


def chunk_problem(mfc: MFC, strategy: ParallelStrategy) -> str:
    """Return why a call cannot have several chunks of layers per stage, or an empty string."""
    if strategy.vpp == 1 or mfc.kind is not Kind.GENERATE:
        return ""
    return (f"{strategy}: a token of generation passes through every stage once, so stages have one chunk of layers; "
            f"nearest legal: {replace(strategy, vpp=1)}")  # fmt: skip


def chunk_layouts(mfc: MFC, layout: Layout, model: ModelConfig | None) -> list[Layout]:
    """Return a layout and, if a call trains a model in pipeline stages, its copy with several chunks in each."""
    strategy = layout.strategy
    if model is None or not mfc.is_train or strategy.pp == 1 or strategy.pp * N_CHUNKS > model.n_layers:
        return [layout]
    return [layout, Layout(layout.mesh, replace(strategy, vpp=N_CHUNKS))]
