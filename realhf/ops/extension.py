"""Loads the compiled kernels of csrc at first use; they are compiled if there are none but a compiler.

A kernel is called only by the function of ops/ that also has its reference implementation in plain torch. (The
reference implementation of ``decode_blocks`` is the model itself: models/fused/fused_blocks.py.)
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from realhf.base import native


def _like(*indices: int) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Return the fake kernel with one output like each of these arguments."""

    def outputs(*args: Any) -> Tensor | tuple[Tensor, ...]:
        results = tuple(args[i].new_empty(args[i].shape) for i in indices)
        return results if len(results) > 1 else results[0]

    return outputs


def _in_place(*args: object) -> None:
    return None


# Fake kernels for torch.compile: they return only shapes and dtypes.
SHAPES: Mapping[str, Callable[..., object]] = {
    "packed_gae": _like(1, 1),
    "gae_2d": _like(0, 0),
    "slice_intervals": lambda src, *_: src.new_empty(torch.library.get_ctx().new_dynamic_size()),
    "set_intervals": _in_place,
    "copy_box_": _in_place,
    "logit_stats": lambda logits, targets, scale: tuple(
        targets.new_empty(targets.shape, dtype=torch.float32) for _ in range(3)
    ),
    "logit_slopes_": _in_place,
    "sample_tokens": lambda logits, u, *_: (
        u.new_empty(u.shape, dtype=torch.int64),
        logits.new_empty(u.shape),
        logits.new_empty(u.shape),
    ),
    "counter_uniform": lambda seed, prompts, *_: prompts.new_empty(prompts.shape, dtype=torch.float64),
    "packed_attention": lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)),
    "packed_attention_backward": lambda grad, q, k, *_: q.new_empty(
        (q.shape[0], q.shape[1] + 2 * k.shape[1], q.shape[2])
    ),
    "adamw_": _in_place,
    "decode_blocks": _like(0),
    "decode_steps": lambda state, embed, places, head, stops, n_steps, *_: state.new_empty(
        (n_steps, 3, state.shape[1]), dtype=torch.float64
    ),
    "tiled_linear": lambda x, tiles, n_outs: x.new_empty((x.shape[0], n_outs), dtype=torch.float32),
    "delta_step": lambda projected, conv, a_log, dt_bias, norm, tails, states, _: projected.new_empty(
        (projected.shape[0], states.shape[1] * states.shape[3])
    ),
    "causal_conv_silu": _like(0),
    "causal_conv_silu_backward": lambda grad, x, weight, rows: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape, dtype=torch.float32),
    ),
    "delta_rule": lambda mixed, decay, rate, rows, states, saves: (
        states.new_empty((mixed.shape[0], states.shape[1], states.shape[3])),
        states.new_empty(states.shape),
        states.new_empty((torch.library.get_ctx().new_dynamic_size() if saves else 0, *states.shape[1:])),
    ),
    "delta_rule_backward": _like(2, 3, 4, 1),
    "rms_norm": _like(0),
    "rms_norm_backward": _like(1, 2),
    "activate": lambda x, _, gated: x.new_empty((x.shape[0], x.shape[1] // 2 if gated else x.shape[1])),
    "activate_backward": _like(1),
    "rotate": lambda x, *_: x.new_empty(x.shape),
}


def kernels() -> tuple[str, ...]:
    """Return the available kernels as ``name:device``."""
    return tuple(f"{name}:{device}" for name in SHAPES for device in ("cpu", "cuda") if kernel(name, device))


@cache
def kernel(name: str, device: str) -> Callable[..., Any] | None:
    """Return the kernel ``name`` for a device type, or None if it is not compiled for it."""
    is_compiled = available() and _compiled(name)
    if not is_compiled or not torch._C._dispatch_has_kernel_for_dispatch_key(f"realhf::{name}", device.upper()):
        return None
    return getattr(torch.ops.realhf, name).default


def required(name: str, device: str) -> Callable[..., Any]:
    """Return a kernel that the caller, or the forward pass, has found before."""
    found = kernel(name, device)
    assert found is not None, f"kernel {name} is not compiled for {device}"
    return found


@cache
def available() -> bool:
    """Return True if the compiled library exists and loads."""
    path = native.ensure(native.KERNELS)
    if path is None:
        return False
    try:
        torch.ops.load_library(path)
    except OSError as error:
        warnings.warn(
            f"{path.name} does not load and plain torch is used instead ({error}); "
            "rebuild it with: python setup.py build_ext --inplace",
            stacklevel=2,
        )
        return False
    for name, shapes in SHAPES.items():
        if _compiled(name):
            torch.library.register_fake(f"realhf::{name}", shapes)
    return True


def _compiled(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel(f"realhf::{name}"))
