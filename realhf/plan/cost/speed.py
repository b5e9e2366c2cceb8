"""Interfaces of the cost model to a machine: ``Speed`` (seconds) and ``Footprint`` (bytes).

Implementations: ``roofline.py`` with ``activation_memory.py`` (hardware limits), ``profile.py`` (measurements).
Times are seconds of a worker that has its core or device to itself.
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
    """Size of a micro-batch: rows, distinct row lengths, tokens, and (query, visible key) pairs.

    ``trained`` counts the tokens with a loss (None: all), to which the backward pass of the vocabulary head is limited.
    A prompt shared by several rows counts once, as a row of its own.
    """

    rows: int
    runs: int
    tokens: int
    pairs: int
    trained: int | None = None

    @staticmethod
    def of(lengths: Sequence[int], trained: int | None = None, before: Sequence[int] = ()) -> "Work":
        """Return the work of rows; row ``i`` also attends to ``before[i]`` tokens of a shared prompt (default: 0)."""
        pairs = sum([n * (n + 1) // 2 for n in lengths])
        if before:
            pairs += sum(n * b for n, b in zip(lengths, before, strict=True))
        return Work(len(lengths), len(set(lengths)), sum(lengths), pairs, trained)


@dataclass(frozen=True)
class Traffic:
    """Load of an exchange on its busiest worker, in bytes.

    ``node`` and ``cluster``: the larger of bytes sent and bytes received over such links. ``copied``: all bytes through
    the worker's memory (sent, received, local copies); ``local`` counts only the local copies. ``n_parts`` is the
    number of tensor slices, ``total`` the sum of ``copied`` over all workers.
    """

    local: int = 0
    node: int = 0
    cluster: int = 0
    n_parts: int = 0
    copied: int = 0
    total: int = 0


@dataclass(frozen=True)
class StageShard:
    """One worker's share of a model: ``n_blocks`` transformer blocks, each split ``tp`` ways, and perhaps an end."""

    model: ModelConfig
    tp: int
    n_blocks: int
    first: bool
    last: bool
    bf16: bool
    recompute: bool = False  # gradient checkpointing
    sequence_parallel: bool = False  # training: outside tensor-parallel layers each rank has its share of the tokens

    @property
    def itemsize(self) -> int:
        return 2 if self.bf16 else 4


class Speed(Protocol):
    """Seconds of every kind of work. ``ranks`` of methods that take a shard are its tensor-parallel group."""

    def forward(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> float:
        """Seconds of a micro-batch without autograd, tensor-parallel collectives included."""

    def train(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        """Seconds of a forward pass that saves activations, and of the backward pass (recomputation included)."""

    def decode(self, shard: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        """Seconds of one new token for each of ``rows`` rows with ``context`` cached tokens each, with sampling."""

    def optimizer(self, shard: StageShard, numel: int) -> float:
        """Seconds of an update of ``numel`` parameters."""

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective over ``ranks`` on a buffer whose full size is ``nbytes``."""

    def send(self, nbytes: float, src: int, dst: int) -> float: ...

    def exchange(self, traffic: Traffic) -> float:
        """Seconds of moving rows or parameter boxes."""

    def host_copy(self, nbytes: float) -> float:
        """Seconds to copy a worker's weights to host memory or back."""

    def interface(self, name: str, rows: int, tokens: int) -> float:
        """Seconds of an algorithm outside the model on one worker's rows (a verifier, advantages)."""

    @property
    def call(self) -> float:
        """Seconds from the master to a worker and back."""


class Footprint(Protocol):
    """Bytes that a micro-batch takes on one worker beyond weights, gradients and optimizer state."""

    def train_bytes(self, shard: StageShard, work: Work) -> tuple[float, float]:
        """Bytes saved for the backward pass, and the peak, which includes them."""

    def forward_bytes(self, shard: StageShard, work: Work) -> float:
        """Peak bytes without autograd."""
