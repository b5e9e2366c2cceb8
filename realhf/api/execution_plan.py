"""The execution plan of a graph: layout, micro-batching and backend of every MFC."""

from dataclasses import dataclass

from realhf.api.config.choices import Backend, Recompute
from realhf.api.layout import Layout


@dataclass(frozen=True)
class MicroBatching:
    """At least ``n_mbs`` micro-batches of at most ``max_tokens_per_mb`` tokens, unless a single row is longer.

    ``max_num_seqs`` caps the rows that a replica decodes at a time (0: no cap beyond the sampling options).
    """

    n_mbs: int = 1
    max_tokens_per_mb: int = 16384
    max_num_seqs: int = 0

    def __post_init__(self) -> None:
        if min(self.n_mbs, self.max_tokens_per_mb, self.max_num_seqs + 1) < 1:
            raise ValueError(f"{self}: numbers must be positive")

    def limit_num_seqs(self, requested: int) -> int:
        """Return the number of rows to decode at a time, given the number in the sampling options."""
        return min(requested, self.max_num_seqs) if self.max_num_seqs else requested


@dataclass(frozen=True)
class MemorySaving:
    """How a training call saves memory: what its backward pass recomputes, and optimizer state in host memory."""

    recompute: Recompute | None = None
    offload_optimizer: bool = False

    def __str__(self) -> str:
        state = "offloaded" if self.offload_optimizer else "on the device"
        return f"recompute {self.recompute.value if self.recompute else 'nothing'}, optimizer state {state}"


@dataclass(frozen=True)
class Placement:
    """Where and how one MFC runs; ``backend`` is its generation engine.

    ``saving`` has the choices of the planner where options of the role are ``auto``; None if none is.
    """

    layout: Layout
    micro_batching: MicroBatching = MicroBatching()
    backend: Backend = Backend.native
    saving: MemorySaving | None = None

    def __str__(self) -> str:
        return str(self.layout) if self.backend is Backend.native else f"{self.backend.value} {self.layout}"


@dataclass(frozen=True)
class ExecutionPlan:
    """``{MFC name: placement}`` on ``n_workers`` model workers."""

    n_workers: int
    placements: dict[str, Placement]

    def __getitem__(self, mfc: str) -> Placement:
        return self.placements[mfc]
