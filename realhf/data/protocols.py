"""The two halves of a computation: an engine (a backend's half) and an interface (an algorithm's half)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from realhf.api.config import GenerationConfig
from realhf.api.messages import State, Stats
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box

if TYPE_CHECKING:  # annotations only: this floor runs without torch
    from torch import Tensor

    from realhf.data.batch import SequenceBatch


class Outputs(Protocol):
    """What a forward pass over one micro-batch offers; nothing of size ``[T, V]`` is ever kept."""

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        """Log-probability of each token given those before it, ``[T]`` float32; 0 at every row's first token."""

    def values(self) -> Tensor:
        """The scalar head at every token, ``[T]`` float32."""

    def last_values(self) -> Tensor:
        """The scalar head at every row's last token, ``[B]`` float32."""


@dataclass(frozen=True)
class Loss:
    """What a loss function returns for one micro-batch: a sum to differentiate and monitors as (sum, count)."""

    total: Tensor
    stats: Mapping[str, tuple[Tensor | float, Tensor | float]]


LossFn = Callable[[Outputs, "SequenceBatch"], Loss]
Limits = Mapping[str, float]
"""Statistic -> the largest global mean at which a mini-batch still counts."""


class Engine(Protocol):
    """One role's model on one worker, in one layout. ``tokens`` is the column that a model reads."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: SequenceBatch, fn: Callable[[Outputs, SequenceBatch], Tensor]) -> Tensor:
        """Run without gradients; ``fn`` maps each micro-batch to a packed column. Results are in the batch's order."""

    def train(
        self, batch: SequenceBatch, loss_fn: LossFn, count: float, limits: Limits | None = None, together: bool = False
    ) -> Stats:
        """Make one optimizer step on ``sum of totals / global count`` and return this worker's statistics.

        ``count`` is this worker's share of the denominator; the engine sums both over data-parallel ranks, so the
        step depends on neither micro-batching nor layout. When a statistic's global mean exceeds its limit, the
        gradient is dropped and no step is made (statistic ``step_skipped``). Collective: every data-parallel rank calls it,
        with an empty batch where it has no rows. ``together`` keeps the rows of one prompt in one micro-batch.
        """

    def generate(self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int) -> SequenceBatch:
        """Sample ``n`` continuations of every row of column ``prompts``.

        Returns rows ``(prompt, 0..n-1)`` in that order with columns ``tokens`` (prompt and answer), ``prompt_mask``
        (uint8), ``logprobs`` (of the tempered distribution, as training recomputes them; 0 on the prompt),
        ``sampling_logprobs`` (after top-k, top-p and min_new_tokens) and the scalar ``truncated`` (uint8: 1 when the
        answer ended without a stop token). What is drawn depends on (seed, prompt, sample, position) alone.
        """

    def reduce(self, sums: Tensor) -> Tensor:
        """Sum over the data-parallel ranks (in float64). Collective."""

    def read(self, name: str, box: Box) -> Tensor: ...

    def write(self, name: str, box: Box, tensor: Tensor) -> None: ...

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder (this layout's first data-parallel rank writes; the others return)."""


@dataclass(frozen=True)
class InterfaceContext:
    """What an interface may know of its worker. ``tokenizer`` is None for models that read no text."""

    seed: int
    tokenizer: Any
    run_root: Path
    dp_rank: int = 0


class Interface(Protocol):
    """An algorithm's half. Each method takes (engine, batch, state); a kind that makes no sense is not defined.

    ``generate`` and ``inference`` return the output batch and statistics; ``train_step`` statistics and the new state.
    A batch's column ``minibatch`` (int64 scalar) numbers the mini-batch of each row of a training call.
    """

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]: ...

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]: ...

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]: ...
