"""Broadcasts in two rounds: what several workers far from its sender need leaves it once, and they share it out.

Pure: from moves to moves. A thing is cut among its receivers, who then give each other their parts. However many they
are, this takes as long as sending it twice, and each of them receives every byte once, as before.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from realhf.comm.packets import ALIGN, Move, Piece

RELAYED_BYTES = 1 << 18
"""Less than this for each receiver is not worth a second round."""


def in_rounds(
    moves: Iterable[Move], hosts: Mapping[int, Hashable], least: int = RELAYED_BYTES
) -> tuple[list[Move], list[Move]]:
    """Return moves to the same end, those of the second round to begin on each rank when its first one is over.

    Ranks that ``hosts`` maps to the same share memory, those that are not in it share none. Who takes part in a move
    must give all moves of its sender with an equal content. ``least`` is ``RELAYED_BYTES``.
    """
    first: list[Move] = []
    second: list[Move] = []
    far: dict[Hashable, list[Move]] = {}
    for move in moves:
        if move.content is None or move.src == move.dst or _host(move.src, hosts) == _host(move.dst, hosts):
            first.append(move)
        else:
            far.setdefault((move.src, move.content), []).append(move)
    for receivers in far.values():
        for team in _teams(receivers, hosts):
            if len(team) == 1 or team[0].piece.nbytes < least * len(team):
                first += team
            else:
                for part, copies in _parts(team):
                    first.append(part)
                    second += copies
    return first, second


def _host(rank: int, hosts: Mapping[int, Hashable]) -> Hashable:
    return hosts.get(rank, (rank,))


def _teams(receivers: Iterable[Move], hosts: Mapping[int, Hashable]) -> list[list[Move]]:
    """Sort receivers by host; those who are alone on theirs make a team too."""
    teams: dict[Hashable, list[Move]] = {}
    for move in receivers:
        teams.setdefault(_host(move.dst, hosts), []).append(move)
    lone = [team[0] for team in teams.values() if len(team) == 1]
    return [team for team in teams.values() if len(team) > 1] + ([lone] if lone else [])


def _parts(team: list[Move]) -> Iterator[tuple[Move, list[Move]]]:
    """Cut what a team needs: each member's part, and its copies for the others."""
    numel, dtype = team[0].piece.numel, team[0].piece.dtype
    cuts = [numel * i // len(team) // ALIGN * ALIGN for i in range(len(team))]  # aligned, whatever the type
    for mine, (start, stop) in zip(team, pairwise([*cuts, numel]), strict=True):
        part = replace(mine, piece=Piece(dtype, stop - start), content=None, start=start)
        content = (mine.src, mine.content, start)
        copy = replace(part, src=mine.dst, content=content, held_as=mine.what)
        yield part, [replace(copy, what=other.what, dst=other.dst) for other in team if other is not mine]
