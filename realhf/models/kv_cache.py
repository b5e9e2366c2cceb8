"""Cached keys and values, with one slot per row that is being generated."""

import math
import mmap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from realhf.models.attention.delta_mixer import DeltaCache
from realhf.models.routing import ExpertCache
from realhf.ops.rows import on_device

ON_HUGE_PAGES = 1 << 26
"""Largest cache on huge pages, of which unwritten tokens may take memory."""
HUGE_PAGE = 1 << 21
COPY_BYTES = 1 << 28
"""Limit of the temporary memory of ``copy_slots``."""


class KVCache:
    """``k`` and ``v`` of shape ``[L, n_slots, K, max_len, head_dim]``, indexed by slot and token position.

    Both are slices of one tensor, so that one operation copies both. ``zeroed``: unwritten positions are zero, for
    kernels that read them with zero attention weight. ``by_token``: dimensions ``K`` and ``max_len`` are swapped, for
    attention that reads only the used length. ``experts``: those of the cached tokens, if they are recorded.
    ``latent``: keys are also the values. ``delta``: the states of blocks without keys, behind all tokens of a slot.
    ``bf16``: keys and values are bfloat16 for a model of any type, else they have the type of ``like``.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        n_slots: int,
        max_len: int,
        like: Tensor,
        zeroed: bool,
        by_token: bool = False,
        experts: ExpertCache | None = None,
        latent: bool = False,
        delta: DeltaCache | None = None,
        bf16: bool = False,
    ) -> None:
        self.experts, self.delta = experts, delta
        inner = (max_len, n_kv_heads) if by_token else (n_kv_heads, max_len)
        shape = (1 if latent else 2, n_layers, n_slots, *inner, head_dim)
        dtype = torch.bfloat16 if bf16 else like.dtype
        if like.device.type == "cpu" and 0 < math.prod(shape) * dtype.itemsize <= ON_HUGE_PAGES:
            self.both = zeros_on_huge_pages(shape, dtype)
        else:
            self.both = (like.new_zeros if zeroed else like.new_empty)(shape, dtype=dtype)
        self.k, self.v = self.both[0], self.both[-1]
        self.n_slots, self.max_len, self.by_token = n_slots, max_len, by_token
        self._n_heads, self._width = n_kv_heads, head_dim * (n_kv_heads if by_token else 1)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in one layer."""
        return self.both.nbytes // (max(1, self.both.shape[1]) * self.n_slots * self.max_len)

    @property
    def nbytes(self) -> int:
        return self.both.nbytes + (self.delta.nbytes if self.delta is not None else 0)

    def indices(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the flat indices ``[T*K]`` of tokens ``(slot, position)``, which are the same in all layers.

        A cache ``by_token`` has one index per token, ``[T]``.
        """
        if self.by_token:
            return slots * self.max_len + positions
        heads = torch.arange(self._n_heads, device=slots.device)
        return ((slots[:, None] * self._n_heads + heads) * self.max_len + positions[:, None]).view(-1)

    def write(self, layer: int, indices: Tensor, *new_ones: Tensor) -> None:
        """Store new keys and values, ``[T, K, head_dim]`` each, of one layer; a cache of latents has no values."""
        for store, new in zip(self.both, new_ones, strict=True):
            store[layer].view(-1, self._width).index_copy_(
                0, indices, new.detach().to(store.dtype).reshape(-1, self._width)
            )

    def first(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the first keys and values of a slot, ``[K, count, head_dim]`` each, as views."""
        k, v = self.k[layer, slot], self.v[layer, slot]
        return (k[:count].transpose(0, 1), v[:count].transpose(0, 1)) if self.by_token else (k[:, :count], v[:, :count])

    def copy_slots(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy tokens ``start`` to ``stop`` of a slot to another slot, for each (source, target, start, stop).

        States are copied as a whole: a source has no tokens from ``stop`` on.

        On a GPU copies that do not depend on each other are one copy by index, unless it is large.
        """
        for run in _independent(moves) if self.experts is not None or self.delta is not None else ():
            if run and self.experts is not None:
                self.experts.copy(*on_device(_tokens_of(run), self.both.device))
            if run and self.delta is not None:
                self.delta.copy(*on_device(torch.tensor(run)[:, :2].t().contiguous(), self.both.device))
        if not self.both.is_cuda:
            for src, dst, start, stop in moves:
                # both layouts have two dimensions after the slot, of which one is the position
                part = (slice(start, stop),) if self.by_token else (slice(None), slice(start, stop))
                self.both[(slice(None), slice(None), dst, *part)] = self.both[(slice(None), slice(None), src, *part)]
            return
        for run in _independent(moves):
            self._copy_by_index(run)

    def _copy_by_index(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        if not (n_tokens := sum(stop - start for *_, start, stop in moves)) or not self.both.numel():
            return
        flat = self.both.view(len(self.both) * self.both.shape[1], -1, self._width)
        per_copy = max(1, COPY_BYTES * self.n_slots * self.max_len // self.both.nbytes)
        for part in on_device(_tokens_of(moves), self.both.device).split(
            [min(per_copy, n_tokens - first) for first in range(0, n_tokens, per_copy)], 1
        ):
            sources, targets, positions = part
            values = flat.index_select(1, self.indices(sources, positions))
            flat.index_copy_(1, self.indices(targets, positions), values)


def zeros_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on pages of 2 MiB where Linux has them: there is one page fault per page and not per 4 KiB."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if not n_bytes:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and n_bytes >= HUGE_PAGE:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


def _independent(moves: Sequence[tuple[int, int, int, int]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """Split copies into runs in which no source or target is the target of an earlier copy."""
    run, targets = list[tuple[int, int, int, int]](), set[int]()
    for move in moves:
        if targets & set(move[:2]):
            yield run
            run, targets = [], set()
        run.append(move)
        targets.add(move[1])
    yield run


def _tokens_of(moves: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Return the source slot, target slot and position of every token of the moves, ``[3, n]``."""
    table = torch.tensor(moves)
    counts = table[:, 3] - table[:, 2]
    sources, targets, starts = table[:, :3].repeat_interleave(counts, 0).t()
    offsets = torch.arange(len(starts)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.stack((sources, targets, starts + offsets))
