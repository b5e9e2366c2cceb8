"""Context parallelism of calls: which calls can have it."""

from dataclasses import replace

from realhf.api.config.choices import Backend
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Kind
from realhf.api.layout import ParallelStrategy


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


def of_call(mfc: MFC, strategy: ParallelStrategy) -> ParallelStrategy:
    """Return what a strategy for several calls means for one of them: calls that generate shard weights instead."""
    return replace(strategy, context=False) if mfc.kind is Kind.GENERATE else strategy
