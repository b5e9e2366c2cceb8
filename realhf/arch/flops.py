"""Floating-point operations of a model's passes, and bytes that decoding reads, from sizes and the lengths of rows.

Counts multiply-adds as two. Grouped-query attention and causal masks are counted as they are computed.
"""

from collections.abc import Iterable, Sequence
from operator import mul

from realhf.api.model_config import ModelConfig


def matrix_params(config: ModelConfig) -> int:
    """Weights that every token multiplies with, the head apart."""
    attention = config.hidden * config.head_dim * (2 * config.n_heads + 2 * config.n_kv_heads)
    routed = len(config.routed_layers)
    width = (config.n_layers - routed) * config.intermediate
    width += routed * config.experts_per_token * config.expert_intermediate
    mlp = config.hidden * width * (3 if config.mlp == "gated" else 2) + routed * config.hidden * config.n_experts
    return config.n_layers * attention + mlp


def forward_flops(config: ModelConfig, lengths: Iterable[int], head_tokens: int | None = None) -> int:
    """Operations of one causal pass over packed rows; ``head_tokens`` go through the head (default: all)."""
    lengths = list(lengths)
    tokens = sum(lengths)
    pairs = (sum(map(mul, lengths, lengths)) + tokens) // 2
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * pairs
    out = config.vocab if config.head == "lm" else 1
    head = 2 * config.hidden * out * (tokens if head_tokens is None else head_tokens)
    return 2 * matrix_params(config) * tokens + attention + head


def train_flops(config: ModelConfig, lengths: Iterable[int], recompute: bool = False) -> int:
    """Operations of forward and backward (twice the forward), and the recomputed forward where asked for."""
    return (4 if recompute else 3) * forward_flops(config, lengths)


def generate_flops(config: ModelConfig, prompts: Iterable[int], rows: Iterable[int]) -> int:
    """Operations of computing every prompt once and drawing the same number of answers to each.

    ``rows`` are lengths of prompt and answer together. Every new token takes the head once; a row's last token is drawn
    but not computed with.
    """
    prompts, rows = list(prompts), list(rows)
    n = len(rows) // max(1, len(prompts))
    new = sum(rows) - n * sum(prompts)
    once = forward_flops(config, prompts, head_tokens=0)
    return forward_flops(config, (length - 1 for length in rows), head_tokens=new) - (n - 1) * once


def generate_bytes(config: ModelConfig, prompts: Sequence[int], rows: Sequence[int], slots: int, itemsize: int) -> int:
    """Return what one replica reads at the least as it draws: weights once a step, keys and values of every row.

    ``rows[i]`` is the length of prompt and answer together, ``prompts[i]`` of the prompt in it; ``slots`` rows are
    decoded at a time. An answer's first token comes from its prompt's pass.
    """
    steps = [row - prompt - 1 for row, prompt in zip(rows, prompts, strict=True)]
    seen = sum(step * prompt + step * (step + 1) // 2 for step, prompt in zip(steps, prompts, strict=True))
    n_steps = max(max(steps, default=0), -(-sum(steps) // slots))
    weights = matrix_params(config) + config.hidden * config.vocab
    return itemsize * (n_steps * weights + seen * 2 * config.n_layers * config.n_kv_heads * config.head_dim)
