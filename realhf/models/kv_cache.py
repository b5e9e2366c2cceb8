"""Cached keys and values, with one slot per row that is being generated."""

import torch
from torch import Tensor


class KVCache:
    """``k`` and ``v`` of shape ``[L, n_slots, K, max_len, head_dim]``, indexed by slot and token position.

    Both are slices of one tensor, so that one operation copies both. ``zeroed``: unwritten positions are zero, for
    kernels that read them with zero attention weight.
    """

    def __init__(
        self, n_layers: int, n_kv_heads: int, head_dim: int, n_slots: int, max_len: int, like: Tensor, zeroed: bool
    ) -> None:
        new = like.new_zeros if zeroed else like.new_empty
        self.both = new((2, n_layers, n_slots, n_kv_heads, max_len, head_dim))
        self.k, self.v = self.both
        self.max_len = max_len

    def indices(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the flat indices ``[T*K]`` of tokens ``(slot, position)``, which are the same in all layers."""
        heads = torch.arange(self.k.shape[2], device=slots.device)
        return ((slots[:, None] * len(heads) + heads) * self.max_len + positions[:, None]).view(-1)

    def write(self, layer: int, indices: Tensor, k: Tensor, v: Tensor) -> None:
        """Store new keys and values, ``[T, K, head_dim]``, of one layer."""
        for store, new in ((self.k, k), (self.v, v)):
            head_dim = store.shape[-1]
            store[layer].view(-1, head_dim).index_copy_(0, indices, new.detach().reshape(-1, head_dim))

    def copy_slot(self, src: int, dst: int, start: int, stop: int) -> None:
        """Copy tokens ``start`` to ``stop`` of a slot to another slot."""
        self.both[:, :, dst, :, start:stop] = self.both[:, :, src, :, start:stop]
