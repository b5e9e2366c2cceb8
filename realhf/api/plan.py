"""The allocation of a whole graph: for every MFC where it runs, how it is cut, and its micro-batching."""

from dataclasses import dataclass

from realhf.api.layout import Layout


@dataclass(frozen=True)
class MicroBatching:
    """``n_mbs`` is a minimum; ``max_tokens_per_mb`` a cap that only a single longer row may exceed."""

    n_mbs: int = 1
    max_tokens_per_mb: int = 16384


@dataclass(frozen=True)
class Placement:
    layout: Layout
    micro_batching: MicroBatching = MicroBatching()


@dataclass(frozen=True)
class ExecutionPlan:
    """``{MFC name: placement}`` on ``n_workers`` model workers."""

    n_workers: int
    placements: dict[str, Placement]

    def __getitem__(self, mfc: str) -> Placement:
        return self.placements[mfc]
