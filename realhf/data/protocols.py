"""The protocols between backends and algorithms: an ``Engine`` computes, an ``Interface`` defines what to compute.

T is the number of tokens of a batch, B its number of rows. Columns are packed, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from realhf.api.config import GenerationConfig
from realhf.api.curriculum import PromptResult
from realhf.api.messages import State, Stats
from realhf.api.model_config import ModelConfig
from realhf.data.turns import TurnDriver

if TYPE_CHECKING:  # annotations only: importing this module does not import torch
    from torch import Tensor

    from realhf.data.batch import SequenceBatch


class Outputs(Protocol):
    """The outputs of a forward pass over one micro-batch, computed on request; ``[T, V]`` logits are never stored.

    With a ``mask``, ``[T]``, the head, and if possible the last MLP, compute only what the tokens need where it is not
    0; others have 0.
    """

    def logprobs(self, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """Return the log-probability of each token given its prefix, ``[T]`` float32; 0 at every row's first token."""

    def distribution(self, ids: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of ``ids``, ``[T, k]`` int64, in place of each token, and entropies, ``[T]``.

        In nats, float32, with gradients; 0 at every row's first token. ``k`` may be 0.
        """

    def top_logprobs(self, k: int, vocab: int, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """Return the ``k`` most probable tokens below ``vocab`` in place of each token, then their log-probabilities.

        ``[T, 2 k]`` float32 without gradients; 0 at every row's first token.
        """

    def values(self, mask: Tensor | None = None) -> Tensor:
        """Return the scalar head's output at every token, ``[T]`` float32."""

    def last_values(self) -> Tensor:
        """Return the scalar head's output at every row's last token, ``[B]`` float32."""


@dataclass(frozen=True)
class Loss:
    """A micro-batch's loss: ``total`` is a sum to differentiate, ``stats`` are (sum, count) pairs for monitoring."""

    total: Tensor
    stats: Mapping[str, tuple[Tensor | float, Tensor | float]]


LossFn = Callable[[Outputs, "SequenceBatch"], Loss]
Limits = Mapping[str, float]
"""Statistic -> the largest global mean with which an optimizer step is made."""


class Engine(Protocol):
    """One role's model on one worker in one layout. It reads the token ids of column ``tokens``, ``[T]`` int64.

    ``forward`` and ``train`` give tokens the experts of column ``routed_experts``, if a batch has it (router replay).
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def version(self) -> int:
        """Number of training steps of the weights."""

    def forward(self, batch: SequenceBatch, fn: Callable[[Outputs, SequenceBatch], Tensor]) -> Tensor:
        """Run without gradients; return the results of ``fn``, packed in the batch's row order.

        They are ``[T]``, ``[T, c]`` or ``[B]``.
        """

    def train(
        self, batch: SequenceBatch, loss_fn: LossFn, count: float, limits: Limits | None = None, together: bool = False
    ) -> Stats:
        """Make one optimizer step on ``sum of totals / global count``; return this worker's statistics.

        ``count`` is this worker's share of the denominator. Totals and counts are summed over data-parallel ranks, so
        the step does not depend on micro-batches or layout. If a statistic's global mean exceeds its limit, gradients
        are dropped and no step is made (statistic ``step_skipped``). ``together`` keeps the rows of a prompt in one
        micro-batch. Collective: every data-parallel rank calls it, with an empty batch if it has no rows.
        """

    def generate(
        self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int, record_experts: bool = False
    ) -> SequenceBatch:
        """Sample ``n`` responses to every row of column ``prompts``; rows are ``(prompt, 0..n-1)`` in that order.

        With ``config.keep_first`` only the rows of each prompt that end first, the shortest.

        Columns, of length ``[T]`` unless stated: ``tokens`` (int64, prompt and response), ``prompt_mask`` (uint8),
        ``logprobs`` (float32, of the tempered distribution as in training; 0 on the prompt), ``sampling_logprobs``
        (float32, after top-k, top-p and min_new_tokens), and ``truncated`` (``[B]`` uint8, 1 if the response has no
        stop token). Samples depend only on (seed, prompt, sample, position). With ``record_experts`` also
        ``routed_experts``, the numbers of every token's experts in all routed layers, ``[T * L * k]``; the number of
        experts stands for those of the last token, which is not computed.
        """

    def sample_turns(
        self,
        make_driver: Callable[[], TurnDriver],
        config: GenerationConfig,
        seed: int,
        max_len: int,
        max_episodes: int,
    ) -> bytes:
        """Sample the turns that a driver requests, and return its result on all ranks of the replica.

        The first rank makes the driver. ``max_len`` bounds the tokens of an episode, ``max_episodes`` those open at a
        time. Samples depend only on (seed, prompt, sample, number of sampled tokens) and the tokens before.
        """

    def reduce(self, sums: Tensor) -> Tensor:
        """Sum a tensor of any shape over the data-parallel ranks in float64. Collective."""

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder. The layout's first data-parallel rank writes; the others return."""


@dataclass(frozen=True)
class InterfaceContext:
    """The worker's properties that an interface can use. ``tokenizer`` is None for models that read no text.

    ``report_failure`` takes the description of a response without a reward, for the user. ``report_results`` takes the
    rewards of a call's prompts, before responses are selected; it is None if they are not needed. ``add_span`` takes
    the name, the start and the duration, in microseconds of the wall clock, of a call in another process, for the
    trace.
    """

    seed: int
    tokenizer: Any
    run_root: Path
    dp_rank: int = 0
    report_failure: Callable[[str], None] = lambda text: None
    report_results: Callable[[Sequence[PromptResult]], None] | None = None
    add_span: Callable[[str, int, int], None] = lambda name, start_us, duration_us: None


class Interface(Protocol):
    """An algorithm's computations. An interface defines only the methods that make sense for its role.

    A call receives this data-parallel rank's rows and the role's persistent ``state``. ``generate`` and ``inference``
    return the output batch and statistics, ``train_step`` returns statistics and the new state. Training batches have
    the column ``minibatch`` (``[B]`` int64), the number of each row's mini-batch.
    """

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]: ...

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]: ...

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]: ...
