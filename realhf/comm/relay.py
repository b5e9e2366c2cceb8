"""Turns broadcasts to remote receivers into a scatter followed by an all-gather among the receivers.

Pure: from copies to copies. The sender sends every byte once, for any number of receivers, and the broadcast takes
as long as two sends; each receiver gets every byte once, as in the direct broadcast.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from realhf.comm.packets import ALIGN, P2PCopy, TensorSlice

MIN_RELAY_BYTES = 1 << 18
"""Bytes per receiver below which a second round costs more than it saves."""


def scatter_allgather_rounds(
    copies: Iterable[P2PCopy], hosts: Mapping[int, Hashable], min_bytes: int = MIN_RELAY_BYTES
) -> tuple[list[P2PCopy], list[P2PCopy]]:
    """Return equivalent copies in two rounds; a rank starts the second round when it has completed its first.

    Ranks that ``hosts`` maps to the same value share memory; ranks missing from it share none. A rank that takes part
    in a copy must pass all copies of that sender with an equal ``dedup_key``.
    """
    first: list[P2PCopy] = []
    second: list[P2PCopy] = []
    remote: dict[Hashable, list[P2PCopy]] = {}
    for copy in copies:
        if copy.dedup_key is None or copy.src == copy.dst or _host(copy.src, hosts) == _host(copy.dst, hosts):
            first.append(copy)
        else:
            remote.setdefault((copy.src, copy.dedup_key), []).append(copy)
    for broadcast in remote.values():
        for receivers in _receiver_groups(broadcast, hosts):
            if len(receivers) == 1 or receivers[0].tensor_slice.nbytes < min_bytes * len(receivers):
                first += receivers
            else:
                for scatter, gathers in _scatter_allgather(receivers):
                    first.append(scatter)
                    second += gathers
    return first, second


def _host(rank: int, hosts: Mapping[int, Hashable]) -> Hashable:
    return hosts.get(rank, (rank,))


def _receiver_groups(broadcast: Iterable[P2PCopy], hosts: Mapping[int, Hashable]) -> list[list[P2PCopy]]:
    """Group receivers by host; receivers without others on their host form one group together."""
    groups: dict[Hashable, list[P2PCopy]] = {}
    for copy in broadcast:
        groups.setdefault(_host(copy.dst, hosts), []).append(copy)
    single = [group[0] for group in groups.values() if len(group) == 1]
    return [group for group in groups.values() if len(group) > 1] + ([single] if single else [])


def _scatter_allgather(receivers: list[P2PCopy]) -> Iterator[tuple[P2PCopy, list[P2PCopy]]]:
    """Yield each receiver's share, and the copies of that share to the other receivers."""
    numel, dtype = receivers[0].tensor_slice.numel, receivers[0].tensor_slice.dtype
    bounds = [numel * i // len(receivers) // ALIGN * ALIGN for i in range(len(receivers))]  # aligned for any dtype
    for own, (start, stop) in zip(receivers, pairwise([*bounds, numel]), strict=True):
        scatter = replace(own, tensor_slice=TensorSlice(dtype, stop - start), dedup_key=None, start=start)
        key = (own.src, own.dedup_key, start)
        gather = replace(scatter, src=own.dst, dedup_key=key, relay_source=own.what)
        yield scatter, [replace(gather, what=other.what, dst=other.dst) for other in receivers if other is not own]
