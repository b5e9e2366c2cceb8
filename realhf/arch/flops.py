"""Floating-point operations of a model's passes, and bytes read by decoding, from sizes and sequence lengths.

A multiply-add counts as two operations. Grouped-query attention and causal masks count as they are computed.
"""

from collections.abc import Iterable, Sequence
from operator import mul

from realhf.api.model_config import ModelConfig


def matrix_params(config: ModelConfig) -> int:
    """Return the number of weights that multiply every token, without the head."""
    routed = len(config.routed_layers)
    width = (config.n_layers - routed) * config.intermediate
    width += routed * (config.experts_per_token * config.expert_intermediate + config.shared_intermediate)
    mlp = config.hidden * width * (3 if config.mlp == "gated" else 2) + routed * config.hidden * config.n_experts
    mixers = len(config.attention_layers) * config.attention_numel + len(config.delta_layers) * config.delta_numel
    return mixers + mlp


def delta_flops(config: ModelConfig) -> int:
    """Return the operations per token of the gated delta rule in all its blocks, by definition, and of convolutions.

    They are three products with the state of every head.
    """
    if config.delta is None:
        return 0
    delta = config.delta
    per_block = 6 * delta.state_numel + 2 * delta.kernel * (2 * delta.keys + delta.values)
    return len(config.delta_layers) * per_block


def forward_flops(config: ModelConfig, lengths: Iterable[int], head_tokens: int | None = None) -> int:
    """Return the operations of a causal pass over packed rows; ``head_tokens`` go through the head (default: all)."""
    lengths = list(lengths)
    tokens = sum(lengths)
    pairs = (sum(map(mul, lengths, lengths)) + tokens) // 2
    attention = 2 * len(config.attention_layers) * config.n_heads * (config.head_dim + config.value_dim) * pairs
    attention += tokens * delta_flops(config)
    out = config.vocab if config.head == "lm" else 1
    head = 2 * config.hidden * out * (tokens if head_tokens is None else head_tokens)
    return 2 * matrix_params(config) * tokens + attention + head


def train_flops(config: ModelConfig, lengths: Iterable[int], recompute: bool = False) -> int:
    """Return the operations of forward and backward (twice the forward), plus a recomputed forward if requested.

    The backward pass of frozen weights, below LoRA adapters, has half as many.
    """
    return ((3 if config.lora is None else 2) + recompute) * forward_flops(config, lengths)


def generate_flops(config: ModelConfig, prompts: Iterable[int], rows: Iterable[int]) -> int:
    """Return the operations of generation: each prompt is computed once and has the same number of responses.

    ``rows`` are lengths of prompt plus response. The head runs once per new token; a row's last token is not computed.
    """
    prompts, rows = list(prompts), list(rows)
    n = len(rows) // max(1, len(prompts))
    new = sum(rows) - n * sum(prompts)
    once = forward_flops(config, prompts, head_tokens=0)
    return forward_flops(config, (length - 1 for length in rows), head_tokens=new) - (n - 1) * once


def generate_bytes(config: ModelConfig, prompts: Sequence[int], rows: Sequence[int], slots: int, itemsize: int) -> int:
    """Return a lower bound on the bytes one replica reads in decoding: weights once per step, KV cache and states.

    ``rows[i]`` is the length of prompt plus response, ``prompts[i]`` that of its prompt; ``slots`` rows are decoded
    concurrently. The first token of a response comes from the prefill.
    """
    steps = [row - prompt - 1 for row, prompt in zip(rows, prompts, strict=True)]
    seen = sum(step * prompt + step * (step + 1) // 2 for step, prompt in zip(steps, prompts, strict=True))
    n_steps = max(max(steps, default=0), -(-sum(steps) // slots))
    weights = matrix_params(config) + config.hidden * config.vocab
    cached = seen * len(config.attention_layers) * config.cache_numel
    states = 0 if config.delta is None else config.delta.slot_bytes(itemsize)
    return itemsize * (n_steps * weights + cached) + sum(steps) * len(config.delta_layers) * states
