"""Decoding steps of a whole model in one call of a compiled kernel, which embeds and samples as well.

A step of a small model takes about as long as the host's operations between two steps.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from realhf.api.config import GenerationConfig
from realhf.api.model_config import ModelConfig
from realhf.models.bound_weights import StageWeights
from realhf.models.fused.fused_blocks import TiledBlocks
from realhf.models.kv_cache import KVCache
from realhf.ops import extension
from realhf.ops.sampling import as_int64

SMALL_BYTES = 1 << 25
"""Weights of blocks with which several steps take milliseconds, for which turns can wait."""


@dataclass(frozen=True)
class FusedSteps:
    """``embed`` is ``[V, D]``, ``of_positions`` ``[P, D]`` of a model with learned positions; ``head`` is tiled."""

    config: ModelConfig
    blocks: TiledBlocks
    embed: Tensor
    of_positions: Tensor | None
    head: Tensor

    @cached_property
    def are_short(self) -> bool:
        return sum(weight.nbytes for weight in self.blocks.weights) <= SMALL_BYTES

    def run(
        self, state: Tensor, cache: KVCache, prefixes: Tensor | None, longest: int, n_steps: int,
        rule: GenerationConfig, seed: int, stop_tokens: Tensor,
    ) -> Tensor:  # fmt: skip
        """Make up to ``n_steps`` steps of the cache's first S slots; return ``[n_steps, 3, S]`` float64.

        ``state`` is ``[6, S]`` int64: last token, position, prompt number, sample, token count, and its limit. The
        result has tokens (``SKIPPED`` after a row's end, ``NO_TOKEN`` for logits that are not finite) and two
        log-probabilities, the same bits as those of single steps. ``prefixes`` are as for ``Transformer.decode``, and
        ``longest`` is the length of the longest row after the first step.
        """
        config, shape = self.config, self.blocks.shape
        root = float(torch.tensor(config.hidden**0.5, dtype=self.embed.dtype)) if config.scaled_embedding else 1.0
        found: Tensor = extension.required("decode_steps", "cpu")(
            state, self.embed, self.of_positions, self.head, stop_tokens, n_steps, config.vocab, as_int64(seed),
            rule.min_new_tokens, 0.0 if rule.greedy else rule.temperature, rule.top_k, rule.top_p, root,
            config.embedding_scale, config.logit_scale, self.blocks.weights, cache.k, cache.v, prefixes,
            *shape.of_blocks(min(longest + n_steps - 1, cache.max_len)), *shape.numbers,
        )  # fmt: skip
        return found


def fused_steps(
    config: ModelConfig, weights: StageWeights, blocks: TiledBlocks | None, head: Tensor | None
) -> FusedSteps | None:
    """Return what makes several steps of a model that one worker has; None for models that single steps compute."""
    if blocks is None or head is None or weights.embed is None or weights.fused is None or not weights.fused.is_whole:
        return None
    if config.head != "lm" or config.logit_softcap or extension.kernel("decode_steps", "cpu") is None:
        return None
    places = None if weights.positions is None else weights.positions.detach()
    return FusedSteps(config, blocks, weights.embed.detach(), places, head)
