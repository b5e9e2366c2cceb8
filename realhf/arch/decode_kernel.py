"""What the CPU kernels compute: sublayers of a model's blocks in decoding, and heads with the gated delta rule."""

from realhf.api.model_config import CLAMPED_SWIGLU, KERNEL_ACTIVATIONS, ModelConfig

WIDTH = 16
"""Widths are multiples of it."""
DELTA_WIDTH = 8
"""The sizes of heads with the gated delta rule are multiples of it."""
GATED_ACTIVATIONS = (CLAMPED_SWIGLU,)
"""Activations of gated MLPs that it computes beside ``KERNEL_ACTIVATIONS``, in their numbering."""


def fits(width: int) -> bool:
    return width % WIDTH == 0


def fits_delta(key_dim: int, value_dim: int) -> bool:
    """Return True if kernels compute the gated delta rule of such heads, of one token per row and of packed rows."""
    return key_dim % DELTA_WIDTH == 0 and value_dim % DELTA_WIDTH == 0


def has_activation(config: ModelConfig) -> bool:
    """Return True if the kernel computes the activation of MLPs."""
    is_gated = config.mlp == "gated" and config.activation in GATED_ACTIVATIONS
    return is_gated or config.activation in KERNEL_ACTIVATIONS


def fuses_attention(config: ModelConfig, tp: int = 1) -> bool:
    """Return True if the kernel computes attention, but not gated delta rules, on each of ``tp`` tensor-parallel ranks.

    Norms over the queries of all ranks are not computed.
    """
    has_kernel = config.latent is None and (tp == 1 or config.qk_norm != "full")
    return has_kernel and fits(config.hidden) and fits(config.head_dim)


def fuses_some(config: ModelConfig, tp: int = 1) -> bool:
    """Return True if the kernel computes attention or MLPs, dense or routed ones, on each of ``tp`` ranks."""
    widths = [config.intermediate] if len(config.routed_layers) < config.n_layers else []
    widths += [config.expert_intermediate] if config.n_experts else []
    fuses_mlps = fits(config.hidden) and has_activation(config) and any(fits(width // tp) for width in widths)
    return fuses_mlps or fuses_attention(config, tp)
