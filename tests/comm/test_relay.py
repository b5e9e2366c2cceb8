"""What several far workers need leaves its sender once, and reaches each of them whole."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.comm.exchange import exchange
from realhf.comm.packets import P2PCopy, TensorSlice
from realhf.comm.relay import MIN_RELAY_BYTES, scatter_allgather_rounds
from realhf.comm.shared_memory import open_shared_memory_peers

WORLD = 6


@st.composite
def broadcasts(draw: st.DrawFn) -> list[P2PCopy]:
    moves = []
    for number in range(draw(st.integers(0, 6))):
        src, content = draw(st.integers(0, WORLD - 1)), number if draw(st.booleans()) else None
        piece = TensorSlice(torch.float32, draw(st.integers(0, 60)))
        receivers = draw(st.sets(st.integers(0, WORLD - 1), min_size=1))
        moves += [P2PCopy((number, dst), src, dst, piece, content) for dst in draw(st.permutations(sorted(receivers)))]
    return moves


hosts_of_ranks = st.dictionaries(st.integers(0, WORLD - 1), st.sampled_from("ab"))


@settings(max_examples=200, deadline=None)
@given(broadcasts(), hosts_of_ranks, st.integers(1, 64))
def test_everything_arrives_once_from_who_has_it(moves: list[P2PCopy], hosts: dict[int, str], least: int) -> None:
    first, second = scatter_allgather_rounds(moves, hosts, least)
    of = {move.what: move for move in moves}
    got = Counter((move.what, at) for turn in (first, second) for move in turn for at in elements(move))
    assert got == Counter((move.what, at) for move in moves for at in elements(move))
    assert all(move.relay_source is None and move.src == of[move.what].src for move in first)
    brought = {(move.what, at) for move in first for at in elements(move)}
    for move in second:
        assert of[move.relay_source].dst == move.src and of[move.relay_source].dedup_key == of[move.what].dedup_key
        assert all((move.relay_source, at) in brought for at in elements(move))


def elements(move: P2PCopy) -> range:
    return range(move.start, move.start + move.piece.numel)


@settings(max_examples=100, deadline=None)
@given(broadcasts(), hosts_of_ranks, st.integers(0, WORLD - 1), st.integers(0, WORLD - 1))
def test_two_workers_agree_on_what_passes_between_them(
    moves: list[P2PCopy], hosts: dict[int, str], one: int, other: int
) -> None:
    def between(given_moves: list[P2PCopy]) -> list[list[P2PCopy]]:
        return [
            [m for m in turn if {m.src, m.dst} == {one, other}]
            for turn in scatter_allgather_rounds(given_moves, hosts, 16)
        ]

    def known_to(rank: int) -> list[P2PCopy]:
        contents = {(m.src, m.what[0]) for m in moves if rank in (m.src, m.dst)}
        return [m for m in moves if (m.src, m.what[0]) in contents]

    assert between(known_to(one)) == between(known_to(other)) == between(moves)


def test_a_sender_far_away_sends_once_whatever_the_number_of_receivers() -> None:
    numel = 8 * MIN_RELAY_BYTES // 4
    moves = [P2PCopy(dst, 0, dst, TensorSlice(torch.float32, numel), "head") for dst in range(1, WORLD)]
    for hosts, sent in (({}, 1), ({0: "a", 1: "a"}, 2), ({1: "b", 2: "b", 3: "b", 4: "c", 5: "c"}, 2)):
        first, second = scatter_allgather_rounds(moves, hosts)
        assert sum(move.piece.numel for move in first) == sent * numel
        assert all(move.src != 0 for move in second)
    small = [P2PCopy(dst, 0, dst, TensorSlice(torch.float32, 100), "norm") for dst in range(1, WORLD)]
    assert scatter_allgather_rounds(small, {}) == (small, [])


def everyone_to_all(rank: int, world: int, hosts: tuple[str, ...] | None, verify: bool) -> list[str]:
    """Every rank sends some columns of its matrix to all others; return which did not come as they were."""
    links = open_shared_memory_peers(rank, world, 60.0, hosts) if hosts else None
    rows, columns = 500, 4 * MIN_RELAY_BYTES // 4 // 500
    matrices = [torch.arange(2.0 * rows * columns).view(rows, -1) + src for src in range(world)]
    places = {src: torch.zeros(rows, 2 * columns) for src in range(world)}
    piece = TensorSlice(torch.float32, rows * columns)
    moves = [P2PCopy((s, d), s, d, piece, "columns") for d in range(world) for s in range(world) if s != d]

    def into(what: Any) -> Tensor:
        return places[what[0]][:, columns // 2 : columns // 2 + columns]

    received = exchange(
        moves,
        rank,
        lambda what: matrices[what[0]][:, :columns],
        lambda what, flat: None,
        torch.device("cpu"),
        into=into,
        links=links,
        verify=verify,
    )
    if links:
        links.close()
    others = [src for src in range(world) if src != rank]
    wrong = [f"from {src}" for src in others if not torch.equal(into((src, rank)), matrices[src][:, :columns])]
    return wrong + ([] if received == (world - 1) * piece.nbytes else [f"{received} bytes"])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("hosts", "verify"),
    [(None, False), (("a", "b", "c", "d"), True), (("a", "b", "b", "b"), True), (("a", "a", "b", "b"), False)],
)
def test_all_come_whole_over_any_hosts(
    on_ranks: Callable[..., list[Any]], hosts: tuple[str, ...] | None, verify: bool
) -> None:
    assert on_ranks(4, everyone_to_all, hosts, verify) == [[]] * 4
