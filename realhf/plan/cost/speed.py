"""How long one stage's parts of the work take on one machine: what the cost model asks, answered in two ways.

``plan/cost/roofline.py`` answers from the limits of named hardware, ``plan/cost/profile.py`` from measurements of this machine.
Times are seconds of one worker that has its core or device to itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from realhf.api.model_config import ModelConfig


class CollectiveKind(Enum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"


class Work(NamedTuple):
    """One micro-batch: rows, distinct lengths among them, tokens, and pairs of a token and one that it sees.

    ``trained`` counts the tokens with a loss (None: all): the vocabulary head looks at no other on its way back. What
    rows share counts once, as a row of its own.
    """

    rows: int
    runs: int
    tokens: int
    pairs: int
    trained: int | None = None

    @staticmethod
    def of(lengths: Sequence[int], trained: int | None = None, before: Sequence[int] = ()) -> "Work":
        """Return the work of rows of which each goes on from ``before`` tokens of another one (default: none does)."""
        pairs = sum([n * (n + 1) // 2 for n in lengths])
        if before:
            pairs += sum(n * b for n, b in zip(lengths, before, strict=True))
        return Work(len(lengths), len(set(lengths)), sum(lengths), pairs, trained)


@dataclass(frozen=True)
class Traffic:
    """What one exchange asks of its busiest worker, in bytes.

    ``node`` and ``cluster``: what it sends or what it receives over such links, whichever is more. ``copied``: all that
    passes through its memory (sent, received and its own copies); ``local`` is the last alone. ``n_parts`` counts the
    pieces it handles, ``total`` is the sum of what all workers copy.
    """

    local: int = 0
    node: int = 0
    cluster: int = 0
    n_parts: int = 0
    copied: int = 0
    total: int = 0


@dataclass(frozen=True)
class StageShard:
    """A stage's share of a model: ``n_blocks`` transformer blocks, each cut ``tp`` ways, and perhaps either end."""

    model: ModelConfig
    tp: int
    n_blocks: int
    first: bool
    last: bool
    bf16: bool
    recompute: bool = False  # gradient checkpointing
    sequence_parallel: bool = False  # in training, between the cut layers every rank keeps its share of the tokens


class Speed(Protocol):
    def forward(self, part: StageShard, work: Work, ranks: Sequence[int]) -> float:
        """Seconds of one micro-batch through a part without autograd, its tensor-parallel collectives included.

        ``ranks`` are the members of the tensor-parallel group (as in all methods that take a part).
        """

    def train(self, part: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        """Seconds of the forward pass that keeps activations, and of backward (with what it computes again)."""

    def decode(self, part: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        """Seconds of one new token for each of ``rows`` rows that see ``context`` tokens each, sampling included."""

    def optimizer(self, part: StageShard, numel: int) -> float:
        """Seconds of an update of ``numel`` parameters."""

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds until ``ranks`` have reduced or gathered a buffer of ``nbytes`` (its whole size)."""

    def send(self, nbytes: float, src: int, dst: int) -> float:
        """Seconds from one worker to another."""

    def exchange(self, traffic: Traffic) -> float:
        """Seconds of moving rows or boxes."""

    def host_copy(self, nbytes: float) -> float:
        """Seconds to bring a worker's weights to host memory or back."""

    def interface(self, name: str, rows: int, tokens: int) -> float:
        """Seconds that an algorithm spends on one worker's rows outside of the model (a verifier, advantages)."""

    @property
    def call(self) -> float:
        """Seconds from the master to a worker and back."""


class Footprint(Protocol):
    """Bytes on one worker that a micro-batch takes beyond weights, gradients and optimizer."""

    def train_bytes(self, part: StageShard, work: Work) -> tuple[float, float]:
        """What it keeps for its backward pass, and the peak until that is over (what is kept included)."""

    def forward_bytes(self, part: StageShard, work: Work) -> float:
        """The peak without autograd."""
