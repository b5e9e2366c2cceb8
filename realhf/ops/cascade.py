"""Decoding attention that reads the common prefix of several rows once (cascade attention).

The queries of rows with one prefix attend to it together; every row attends to its own tokens; the two results are
averaged with the weights of their normalisers. Source: Juravsky et al., Hydragen, 2024, arXiv 2402.05099, section 3.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realhf.ops.varlen import VarlenKernel

IntArray = npt.NDArray[np.int64]
MAX_MEMBERS = 16
"""Rows of one batch of queries: with their heads they fill a kernel's tile."""


class GroupSizes(NamedTuple):
    """Batches of queries, rows of each, and slots; the shapes of ``PrefixGroups`` and of a captured graph."""

    groups: int
    members: int
    slots: int


@dataclass(frozen=True)
class PrefixGroups:
    """Up to ``members`` rows per group that share a prefix, in host memory.

    ``members`` ``[groups * members]`` are slots, 0 beyond the rows of a group; ``owners`` and ``lengths`` ``[groups]``
    the slot and length of a prefix; ``places`` ``[slots]`` the index of every slot in ``members``; ``starts``
    ``[slots]`` the first token of its own.
    """

    sizes: GroupSizes
    members: IntArray
    owners: IntArray
    lengths: IntArray
    places: IntArray
    starts: IntArray

    @property
    def packed(self) -> IntArray:
        return np.concatenate((self.members, self.owners, self.lengths, self.places, self.starts))


def group_prefixes(numbers: IntArray, starts: IntArray, owners: IntArray, n_slots: int) -> PrefixGroups | None:
    """Group rows by prefix number; None if no two rows share one.

    The arguments are by row: prefix number, its length, and the slot that stores it. Sizes are rounded up to powers
    of two, so that few graphs cover all steps.
    """
    _, group_of, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    if counts.max(initial=1) < 2:
        return None
    n_members = min(_round_up(int(counts.max())), MAX_MEMBERS)
    order = np.argsort(group_of, kind="stable")
    index = np.arange(len(numbers)) - np.repeat(counts.cumsum() - counts, counts)  # within its group
    firsts = np.concatenate(([0], (-(-counts // n_members)).cumsum()))
    batch = firsts[group_of[order]] + index // n_members
    sizes = GroupSizes(_round_up(int(firsts[-1])), n_members, n_slots)
    places, members = np.zeros(n_slots, np.int64), np.zeros(sizes.groups * n_members, np.int64)
    places[order] = batch * n_members + index % n_members
    members[places[order]] = order
    found = [np.zeros(n, np.int64) for n in (sizes.groups, sizes.groups, n_slots)]
    found[0][batch], found[1][batch], found[2][: len(starts)] = owners[order], starts[order], starts
    return PrefixGroups(sizes, members, found[0], found[1], places, found[2])


def _round_up(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class SharedPrefixes:
    """``PrefixGroups`` on a device."""

    sizes: GroupSizes
    members: Tensor
    owners: Tensor
    lengths: Tensor
    places: Tensor
    starts: Tensor

    @classmethod
    def of(cls, packed: Tensor, sizes: GroupSizes) -> "SharedPrefixes":
        """Return the parts of ``PrefixGroups.packed``, ``[P]`` int64 on the device."""
        groups, members, slots = sizes
        rows, owners, lengths, places, starts = packed.split((groups * members, groups, groups, slots, slots))
        return cls(sizes, rows, owners.int(), lengths.int(), places, starts.int())

    def attend(
        self, kernel: VarlenKernel, q: Tensor, k: Tensor, v: Tensor, used: Tensor, longest: int, scale: float,
        softcap: float,
    ) -> Tensor:  # fmt: skip
        """Attend from q ``[S, H, d]`` to the ``used`` keys of k, v ``[slots, max_len, K, d]``; return ``[S, H, d]``.

        A prefix is read for all query heads of a key head together: they are queries of one head. No row is longer
        than ``longest``.
        """
        (slots, heads, dim), n_kv = q.shape, k.shape[2]
        own, own_sums = kernel.attend_spans(q[:, None], k, v, None, self.starts, used, longest, scale, softcap)
        by_head = q.view(slots, n_kv, -1, dim).transpose(1, 2)[self.members]  # [groups * members, H / K, K, d]
        queries = by_head.reshape(self.sizes.groups, -1, n_kv, dim)
        first = torch.zeros_like(self.lengths)
        out, sums = kernel.attend_spans(queries, k, v, self.owners, first, self.lengths, longest, scale, softcap)
        out = out.reshape(by_head.shape)[self.places].transpose(1, 2).reshape(slots, heads, dim)
        sums = sums.reshape(by_head.shape[:-1])[self.places].transpose(1, 2).reshape(slots, heads)
        weight = torch.sigmoid(own_sums[:, 0] - sums).unsqueeze(-1)
        return torch.lerp(out, own[:, 0], weight.to(out.dtype))
