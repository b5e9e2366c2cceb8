"""Arithmetic and memory of the gated delta rule (models/attention/delta_mixer.py) on one of ``tp`` ranks."""

from realhf.api.model_config import ModelConfig
from realhf.arch.decode_kernel import fits_delta

CHUNK = 64
"""Tokens of a chunk, as in ops/delta."""
FLOAT32 = 4
STATE_PASSES = 6
"""Reads and writes of a state in a decoding step, which decays it, reads it, changes it and reads it again."""


def delta_share(config: ModelConfig) -> float:
    """Return the fraction of a model's blocks that have the rule instead of attention."""
    return len(config.delta_layers) / config.n_layers


def rule_flops(config: ModelConfig, tp: int) -> float:
    """Return the operations per token: three products with the state, and those within a chunk."""
    if config.delta is None:
        return 0.0
    delta = config.delta
    within = CHUNK * (4 * delta.keys + delta.value_heads * (delta.key_dim + 3 * delta.value_dim))
    return (6 * delta.state_numel + within) / tp


def rule_numel(config: ModelConfig, tp: int) -> float:
    """Return the float32 elements per token that the rule and its convolution write, and autograd saves.

    For every value head they are four matrices with a column for every token of the chunk, the states between chunks,
    six vectors of keys and four of values; for every key head a matrix and four vectors; and the convolution's inputs.
    """
    if config.delta is None:
        return 0.0
    delta = config.delta
    per_head = 4 * CHUNK + 6 * delta.key_dim + 4 * delta.value_dim + delta.key_dim * delta.value_dim / CHUNK
    per_key = CHUNK + 4 * delta.key_dim
    return (delta.value_heads * per_head + delta.key_heads * per_key + 2 * delta.keys + delta.values) / tp


def saved_rule_numel(config: ModelConfig, tp: int, itemsize: int, device: str) -> float:
    """Return the elements per token that autograd saves for a block with the rule, beside the residual stream.

    The CPU kernels save one state per ``CHUNK`` tokens, and no matrices of a chunk; what is behind them is float32.
    """
    if config.delta is None:
        return 0.0
    delta, wide = config.delta, FLOAT32 / itemsize
    if not has_rule_kernel(config, device):
        return _mixer_numel(config, tp) + rule_numel(config, tp) * wide
    channels = 2 * delta.keys + delta.values
    of_heads = 5 * delta.values + 6 * delta.value_heads + delta.state_numel / CHUNK
    return ((1 + 2 / wide) * channels + of_heads * wide) / tp


def has_rule_kernel(config: ModelConfig, device: str) -> bool:
    """Return True if a kernel computes the rule of packed rows (ops/delta)."""
    return device == "cpu" and config.delta is not None and fits_delta(config.delta.key_dim, config.delta.value_dim)


def _mixer_numel(config: ModelConfig, tp: int) -> float:
    """Return the further elements per token: products, their part before the activation, gates and outputs."""
    if config.delta is None:
        return 0.0
    channels = 2 * config.delta.keys + config.delta.values
    return (2 * channels + 5 * config.delta.values + 2 * config.delta.value_heads) / tp
