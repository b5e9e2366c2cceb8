"""The allocation of a whole graph: for every MFC where it runs, how it is cut, and its micro-batching."""

from dataclasses import dataclass

from realhf.api.config.choices import Backend
from realhf.api.layout import Layout


@dataclass(frozen=True)
class MicroBatching:
    """``n_mbs`` is a minimum; ``max_tokens_per_mb`` a cap that only a single longer row may exceed.

    ``max_num_seqs`` is how many rows a replica decodes at a time at the most (0: as the sampling options have it).
    """

    n_mbs: int = 1
    max_tokens_per_mb: int = 16384
    max_num_seqs: int = 0

    def limit_num_seqs(self, wanted: int) -> int:
        """Return the rows that are decoded at a time where the sampling options want so many."""
        return min(wanted, self.max_num_seqs) if self.max_num_seqs else wanted


@dataclass(frozen=True)
class Placement:
    """``backend`` is the engine that a generating call has there."""

    layout: Layout
    micro_batching: MicroBatching = MicroBatching()
    backend: Backend = Backend.native

    def __str__(self) -> str:
        return str(self.layout) if self.backend is Backend.native else f"{self.backend.value} {self.layout}"


@dataclass(frozen=True)
class ExecutionPlan:
    """``{MFC name: placement}`` on ``n_workers`` model workers."""

    n_workers: int
    placements: dict[str, Placement]

    def __getitem__(self, mfc: str) -> Placement:
        return self.placements[mfc]
