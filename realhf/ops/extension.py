"""Loads the compiled kernels of csrc at first use, if they are built.

A kernel is called only by the function of ops/ that also has its reference implementation in plain torch. (The
reference implementation of ``decode_blocks`` is the model itself: models/fused_decode.py.)
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def _like(*indices: int) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Return the fake kernel with one output like each of these arguments."""

    def outputs(*args: Any) -> Tensor | tuple[Tensor, ...]:
        results = tuple(args[i].new_empty(args[i].shape) for i in indices)
        return results if len(results) > 1 else results[0]

    return outputs


def _in_place(*args: object) -> None:
    return None


def _slice_intervals(src: Tensor, intervals: Tensor) -> Tensor:
    return src.new_empty(torch.library.get_ctx().new_dynamic_size())


def _logit_stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    largest, exp_sums, picked = (logits.new_empty(targets.shape, dtype=torch.float32) for _ in range(3))
    return largest, exp_sums, picked


def _sample_tokens(logits: Tensor, u: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    return u.new_empty(u.shape, dtype=torch.int64), logits.new_empty(u.shape), logits.new_empty(u.shape)


def _counter_uniform(seed: int, prompts: Tensor, *counters: Tensor) -> Tensor:
    return prompts.new_empty(prompts.shape, dtype=torch.float64)


def _packed_attention(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _packed_attention_backward(grad: Tensor, q: Tensor, k: Tensor, *args: object) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] + 2 * k.shape[1], q.shape[2]))


def _tiled_linear(x: Tensor, tiles: Tensor, n_outs: int) -> Tensor:
    return x.new_empty((x.shape[0], n_outs), dtype=torch.float32)


def _activate(x: Tensor, activation: int, gated: bool) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2 if gated else x.shape[1]))


# Fake kernels for torch.compile: they return only shapes and dtypes.
SHAPES: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "packed_gae": _like(1, 1),
        "gae_2d": _like(0, 0),
        "slice_intervals": _slice_intervals,
        "set_intervals": _in_place,
        "copy_box_": _in_place,
        "logit_stats": _logit_stats,
        "logit_slopes_": _in_place,
        "sample_tokens": _sample_tokens,
        "counter_uniform": _counter_uniform,
        "packed_attention": _packed_attention,
        "packed_attention_backward": _packed_attention_backward,
        "adamw_": _in_place,
        "decode_blocks": _like(0),
        "tiled_linear": _tiled_linear,
        "rms_norm": _like(0),
        "rms_norm_backward": _like(1, 2),
        "activate": _activate,
        "activate_backward": _like(1),
    }
)
DEVICES = ("cpu", "cuda")


def available() -> bool:
    """Return True if the compiled library exists and loads."""
    return _load()


@cache
def kernels() -> tuple[str, ...]:
    """Return the available kernels as ``name:device``."""
    return tuple(f"{name}:{device}" for name in SHAPES for device in DEVICES if kernel(name, device) is not None)


@cache
def kernel(name: str, device: str) -> Callable[..., Any] | None:
    """Return the kernel ``name`` for a device type, or None if it is not compiled for it."""
    if not _load() or not _compiled(name):
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"realhf::{name}", device.upper()):
        return None
    return getattr(torch.ops.realhf, name).default


@cache
def _load() -> bool:
    path = Path(__file__).with_name("_C.so")
    if not path.exists():
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
