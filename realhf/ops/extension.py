"""The compiled kernels of csrc: found and loaded at first use, absent without complaint.

A kernel is called by the function that has its plain-torch twin, in the twin's file; nothing else calls one. (The twin
of ``decode_blocks`` is the model itself: models/fused_decode.py.)
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def _twice_like_values(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, bootstrap: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), values.new_empty(values.shape)


def _twice_like_rewards(
    rewards: Tensor, values: Tensor, ends: Tensor, truncates: Tensor, gamma: float, lam: float, overlap: bool
) -> tuple[Tensor, Tensor]:
    return rewards.new_empty(rewards.shape), rewards.new_empty(rewards.shape)


def _of_unknown_length(src: Tensor, intervals: Tensor) -> Tensor:
    return src.new_empty(torch.library.get_ctx().new_dynamic_size())


def _nothing(*given: object) -> None:
    return None


def _three_floats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    largest, exp_sums, picked = (logits.new_empty(targets.shape, dtype=torch.float32) for _ in range(3))
    return largest, exp_sums, picked


def _token_and_two_floats(
    logits: Tensor, u: Tensor, forbid: Tensor | None, forbid_rows: Tensor | None, *options: float
) -> tuple[Tensor, Tensor, Tensor]:
    return u.new_empty(u.shape, dtype=torch.int64), logits.new_empty(u.shape), logits.new_empty(u.shape)


def _double_per_counter(seed: int, prompts: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    return prompts.new_empty(prompts.shape, dtype=torch.float64)


def _like_queries(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, angles: Tensor | None, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _like_all_three(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: object) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] + 2 * k.shape[1], q.shape[2]))


def _floats_of_width(x: Tensor, panels: Tensor, outs: int) -> Tensor:
    return x.new_empty((x.shape[0], outs), dtype=torch.float32)


def _like_first(x: Tensor, *given: object) -> Tensor:
    return x.new_empty(x.shape)


def _like_second(grad: Tensor, wide: Tensor, *given: object) -> Tensor:
    return wide.new_empty(wide.shape)


def _like_both_of_a_norm(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _inner_part(wide: Tensor, activation: int, gated: bool) -> Tensor:
    return wide.new_empty((wide.shape[0], wide.shape[1] // 2 if gated else wide.shape[1]))


# What each kernel returns, as shapes and dtypes only: torch.compile asks.
SHAPES: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "packed_gae": _twice_like_values,
        "gae_2d": _twice_like_rewards,
        "slice_intervals": _of_unknown_length,
        "set_intervals": _nothing,
        "copy_box_": _nothing,
        "logit_stats": _three_floats,
        "logit_slopes_": _nothing,
        "sample_tokens": _token_and_two_floats,
        "counter_uniform": _double_per_counter,
        "packed_attention": _like_queries,
        "packed_attention_backward": _like_all_three,
        "adamw_": _nothing,
        "decode_blocks": _like_first,
        "tiled_linear": _floats_of_width,
        "rms_norm": _like_first,
        "rms_norm_backward": _like_both_of_a_norm,
        "activate": _inner_part,
        "activate_backward": _like_second,
    }
)
DEVICES = ("cpu", "cuda")


def available() -> bool:
    """Say whether the compiled library is there and loads."""
    return _load()


@cache
def kernels() -> tuple[str, ...]:
    """Return what the library can do, as ``name:device``; empty where it is absent."""
    return tuple(f"{name}:{device}" for name in SHAPES for device in DEVICES if kernel(name, device) is not None)


@cache
def kernel(name: str, device: str) -> Callable[..., Any] | None:
    """Return the kernel ``name`` where it was compiled for devices of that type, else None."""
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
            "build it anew with: python setup.py build_ext --inplace",
            stacklevel=2,
        )
        return False
    for name, shapes in SHAPES.items():
        if _compiled(name):
            torch.library.register_fake(f"realhf::{name}", shapes)
    return True


def _compiled(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel(f"realhf::{name}"))
