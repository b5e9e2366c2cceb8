"""Packed attention on GPUs by a variable-length kernel: FlashAttention where it is installed, else torch's.

Rows with a shared prefix are supported: its keys and values are gathered in front of each row's own, and autograd sums
the gradients of the copies. The kernels align a row's last query with its last key, as a row with a prefix needs.

FlashAttention 2 is ``flash_attn``, FlashAttention 3 (Hopper) ``flash_attn_interface``; both have soft caps. torch 2.10
has causal attention alone, 2.11 adds ``scale`` and ``window_size``, 2.12 ``enable_gqa`` and ``seqused_k``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.ops.rows import RowLayout

MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
AMPERE, HOPPER, BLACKWELL, ANY = (8, 0), (9, 0), (10, 0), (99, 0)
SOURCES = (  # in order of preference: module, function, lowest capability, first that is too high
    ("flash_attn_interface", "flash_attn_varlen_func", HOPPER, BLACKWELL),
    ("flash_attn", "flash_attn_varlen_func", AMPERE, ANY),
    ("torch.nn.attention.varlen", "varlen_attn", AMPERE, ANY),
)
CACHED = "flash_attn_with_kvcache"

Rule = tuple[float, int]
"""Soft cap and window of a layer, 0 without."""


@dataclass(frozen=True)
class VarlenKernel:
    """A function for variable-length attention, and the names of its parameters in the installed version.

    ``cached``, in FlashAttention, attends from one query per row to the used part of a cache; its parameters are
    ``cached_parameters``. A device's compute capability is at least ``lowest`` and below ``limit``.
    """

    module: str
    function: Callable[..., Any]
    parameters: frozenset[str]
    lowest: tuple[int, int] = AMPERE
    limit: tuple[int, int] = ANY
    cached: Callable[..., Any] | None = None
    cached_parameters: frozenset[str] = frozenset()

    @property
    def is_flash(self) -> bool:
        return "softmax_scale" in self.parameters

    @property
    def reads_used_lengths(self) -> bool:
        """Whether it can read the first keys of a row only, as decoding needs."""
        return self.cached is not None or "seqused_k" in self.parameters

    @property
    def reads_spans(self) -> bool:
        """Whether ``attend_spans`` is supported: FlashAttention 2.7, torch 2.12."""
        if self.cached is not None:
            return self.cached_parameters >= {"cache_batch_idx", "cache_leftpad", "return_softmax_lse"}
        return self.parameters >= {"seqused_k", "return_aux"}

    def accepts(self, head_dim: int, softcap: float, window: int) -> bool:
        has_window = not window or "window_size" in self.parameters
        has_softcap = not softcap or "softcap" in self.parameters
        return has_window and has_softcap and head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: tuple[Tensor, Tensor, int, int], scale: float, rule: Rule,
        used: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend causally to the last ``window`` keys, of which each row has the first ``used``."""
        if self.is_flash:
            options = self._flash_options(scale, rule)
        else:
            q, k, v, options = self._torch_options(q, k, v, scale, rule)
        if used is not None:
            options["seqused_k"] = used
        out = self.function(q, k, v, *layout, **options)
        attended: Tensor = out[0] if isinstance(out, tuple) else out  # early FlashAttention 3 adds the normalisers
        return attended

    def _flash_options(self, scale: float, rule: Rule) -> dict[str, Any]:
        softcap, window = rule
        options = {"softmax_scale": scale, "causal": True, "window_size": (window - 1 if window else -1, 0)}
        if softcap:
            options["softcap"] = softcap
        if "deterministic" in self.parameters:  # its backward pass sums by atomics otherwise
            options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        return options

    def _torch_options(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        has, (_, window), options = self.parameters, rule, dict[str, Any]()
        if "window_size" in has:
            options["window_size"] = (window - 1 if window else -1, 0)
        else:
            options["is_causal"] = True
        default = q.shape[-1] ** -0.5
        if "scale" in has:
            options["scale"] = scale
        elif scale != default:
            q = q * (scale / default)
        if (groups := q.shape[1] // k.shape[1]) > 1:
            if "enable_gqa" in has:
                options["enable_gqa"] = True
            else:
                k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        return q, k, v, options

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, used: Tensor, scale: float, rule: Rule) -> Tensor:
        """Attend by ``cached``, which splits long rows over processors, from q ``[S, H, d]`` to ``used`` keys."""
        assert self.cached is not None
        options = self._flash_options(scale, rule)
        options.pop("deterministic", None)
        out: Tensor = self.cached(q[:, None], k[: len(q)], v[: len(q)], cache_seqlens=used, **options)
        return out[:, 0]

    def attend_spans(
        self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor | None, starts: Tensor, stops: Tensor, longest: int,
        scale: float, softcap: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend from q ``[B, m, H, d]`` to tokens ``starts[b]`` to ``stops[b]``, at most ``longest``, of cache slots.

        ``k``, ``v`` are ``[n_slots, max_len, K, d]``; ``slots`` None stands for the first B. All m queries attend to
        the whole span. Returns results like q and normalisers, the log of the sum of exponentials, ``[B, m, H]``.
        """
        count, n_queries, n_heads, _ = q.shape
        if self.cached is not None:
            caches = (k[:count], v[:count]) if slots is None else (k, v)
            out, sums, *_ = self.cached(
                q, *caches, cache_seqlens=stops, cache_batch_idx=slots, cache_leftpad=starts, softmax_scale=scale,
                softcap=softcap, return_softmax_lse=True,
            )  # fmt: skip
            return out, sums.reshape(count, n_heads, n_queries).transpose(1, 2)
        batch = torch.arange(count + 1, dtype=torch.int32, device=q.device)
        firsts = (batch[:-1] if slots is None else slots) * k.shape[1] + starts
        layout = (batch * n_queries, F.pad(firsts, (0, 1)), n_queries, longest)
        options = {"scale": scale, "enable_gqa": True, "seqused_k": stops - starts}
        from torch.nn.attention.varlen import AuxRequest  # torch 2.10

        packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out, sums = self.function(*packed, *layout, return_aux=AuxRequest(lse=True), **options)
        return out.view(q.shape), sums.t().reshape(count, n_queries, n_heads)


def kernels() -> tuple[VarlenKernel, ...]:
    """Return the kernels of the installed packages, in order of preference."""
    return tuple(kernel for source in SOURCES if (kernel := _load(*source)) is not None)


@lru_cache(maxsize=len(SOURCES))
def _load(module: str, name: str, lowest: tuple[int, int], limit: tuple[int, int]) -> VarlenKernel | None:
    try:
        found = import_module(module)
        function = getattr(found, name)
    except (ImportError, AttributeError):  # not installed, for another torch, or torch before 2.10
        return None
    cached = getattr(found, CACHED, None)
    parameters, cached_parameters = (frozenset(signature(f).parameters if f else ()) for f in (function, cached))
    return VarlenKernel(module, function, parameters, lowest, limit, cached, cached_parameters)


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, rules: Iterable[Rule], decoding: bool = False
) -> VarlenKernel | None:
    """Return the preferred kernel for the layers of these rules: on a GPU, Ampere or later, in 16 bits; else None."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    capability, rules = torch.cuda.get_device_capability(device), set(rules)
    for kernel in kernels():
        runs = kernel.lowest <= capability < kernel.limit and (kernel.reads_used_lengths or not decoding)
        if runs and all(kernel.accepts(head_dim, *rule) for rule in rules):
            return kernel
    return None


def varlen_attention(
    kernel: VarlenKernel, q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float, rule: Rule
) -> Tensor:
    """Attend like ``rotary_attention`` from q ``[T, H, d]`` to k, v ``[T, K, d]``."""
    if (index := layout.key_index) is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
    cu_q, cu_k = layout.cu_seqlens
    return kernel(q, k, v, (cu_q, cu_k, max(layout.lengths, default=0), layout.longest), scale, rule)


@dataclass(frozen=True)
class CachedRows:
    """One query per slot of a cache of ``max_len`` tokens per slot: offsets ``[S + 1]`` and used lengths ``[S]``."""

    kernel: VarlenKernel
    cu_q: Tensor
    cu_k: Tensor
    used: Tensor

    @classmethod
    def of(cls, kernel: VarlenKernel, positions: Tensor, max_len: int) -> "CachedRows":
        offsets = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        return cls(kernel, offsets, offsets * max_len, positions.int() + 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, longest: int, scale: float, rule: Rule) -> Tensor:
        """Attend from q ``[S, H, d]`` to the ``used`` keys of k, v ``[slots, max_len, K, d]``, at most ``longest``."""
        if self.kernel.cached is not None:
            return self.kernel.attend_cached(q, k, v, self.used, scale, rule)
        layout = (self.cu_q, self.cu_k, 1, longest)
        return self.kernel(q, k.flatten(0, 1), v.flatten(0, 1), layout, scale, rule, self.used)
