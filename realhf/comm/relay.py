"""Broadcasts in two rounds: what several workers far from its sender need leaves it once, and they share it out.

Pure: from moves to moves. A thing is cut among its receivers, who then give each other their parts. However many they
are, this takes as long as sending it twice, and each of them receives every byte once, as before.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from realhf.comm.packets import ALIGN, P2PCopy, TensorSlice

MIN_RELAY_BYTES = 1 << 18
"""Less than this for each receiver is not worth a second round."""


def scatter_allgather_rounds(
    moves: Iterable[P2PCopy], hosts: Mapping[int, Hashable], least: int = MIN_RELAY_BYTES
) -> tuple[list[P2PCopy], list[P2PCopy]]:
    """Return moves to the same end, those of the second round to begin on each rank when its first one is over.

    Ranks that ``hosts`` maps to the same share memory, those that are not in it share none. Who takes part in a move
    must give all moves of its sender with an equal content. ``least`` is ``RELAYED_BYTES``.
    """
    first: list[P2PCopy] = []
    second: list[P2PCopy] = []
    far: dict[Hashable, list[P2PCopy]] = {}
    for move in moves:
        if move.dedup_key is None or move.src == move.dst or _host(move.src, hosts) == _host(move.dst, hosts):
            first.append(move)
        else:
            far.setdefault((move.src, move.dedup_key), []).append(move)
    for receivers in far.values():
        for team in _receiver_groups(receivers, hosts):
            if len(team) == 1 or team[0].piece.nbytes < least * len(team):
                first += team
            else:
                for part, copies in _parts(team):
                    first.append(part)
                    second += copies
    return first, second


def _host(rank: int, hosts: Mapping[int, Hashable]) -> Hashable:
    return hosts.get(rank, (rank,))


def _receiver_groups(receivers: Iterable[P2PCopy], hosts: Mapping[int, Hashable]) -> list[list[P2PCopy]]:
    """Sort receivers by host; those who are alone on theirs make a team too."""
    teams: dict[Hashable, list[P2PCopy]] = {}
    for move in receivers:
        teams.setdefault(_host(move.dst, hosts), []).append(move)
    lone = [team[0] for team in teams.values() if len(team) == 1]
    return [team for team in teams.values() if len(team) > 1] + ([lone] if lone else [])


def _parts(team: list[P2PCopy]) -> Iterator[tuple[P2PCopy, list[P2PCopy]]]:
    """Cut what a team needs: each member's part, and its copies for the others."""
    numel, dtype = team[0].piece.numel, team[0].piece.dtype
    cuts = [numel * i // len(team) // ALIGN * ALIGN for i in range(len(team))]  # aligned, whatever the type
    for mine, (start, stop) in zip(team, pairwise([*cuts, numel]), strict=True):
        part = replace(mine, piece=TensorSlice(dtype, stop - start), dedup_key=None, start=start)
        content = (mine.src, mine.dedup_key, start)
        copy = replace(part, src=mine.dst, dedup_key=content, relay_source=mine.what)
        yield part, [replace(copy, what=other.what, dst=other.dst) for other in team if other is not mine]
