"""Broadcasts to remote workers leave their sender once and reach every receiver completely."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.comm.exchange import exchange
from realhf.comm.packets import MIN_RELAY_BYTES, P2PCopy, TensorSlice, relayed
from realhf.comm.shared_memory import open_shared_memory_peers
from tests.scaling import examples

WORLD = 6


@st.composite
def broadcasts(draw: st.DrawFn) -> list[P2PCopy]:
    copies = []
    for number in range(draw(st.integers(0, 6))):
        src, content = draw(st.integers(0, WORLD - 1)), number if draw(st.booleans()) else None
        tensor_slice = TensorSlice(torch.float32, draw(st.integers(0, 60)))
        receivers = draw(st.sets(st.integers(0, WORLD - 1), min_size=1))
        copies += [
            P2PCopy((number, dst), src, dst, tensor_slice, content) for dst in draw(st.permutations(sorted(receivers)))
        ]
    return copies


hosts_of_ranks = st.dictionaries(st.integers(0, WORLD - 1), st.sampled_from("ab"))


@settings(max_examples=examples(200))
@given(broadcasts(), hosts_of_ranks, st.integers(1, 64))
def test_every_element_arrives_once_from_a_rank_that_has_it(
    copies: list[P2PCopy], hosts: dict[int, str], min_bytes: int
) -> None:
    first, second = relayed(copies, hosts, min_bytes)
    by_what = {copy.what: copy for copy in copies}
    received = Counter((copy.what, at) for round_ in (first, second) for copy in round_ for at in elements(copy))
    assert received == Counter((copy.what, at) for copy in copies for at in elements(copy))
    assert all(copy.relay_source is None and copy.src == by_what[copy.what].src for copy in first)
    in_first_round = {(copy.what, at) for copy in first for at in elements(copy)}
    for copy in second:
        assert by_what[copy.relay_source].dst == copy.src
        assert by_what[copy.relay_source].dedup_key == by_what[copy.what].dedup_key
        assert all((copy.relay_source, at) in in_first_round for at in elements(copy))


def elements(copy: P2PCopy) -> range:
    return range(copy.start, copy.start + copy.tensor_slice.numel)


@settings(max_examples=examples(100))
@given(broadcasts(), hosts_of_ranks, st.integers(0, WORLD - 1), st.integers(0, WORLD - 1))
def test_two_workers_agree_on_the_copies_between_them(
    copies: list[P2PCopy], hosts: dict[int, str], one: int, other: int
) -> None:
    def between(given_copies: list[P2PCopy]) -> list[list[P2PCopy]]:
        return [[m for m in round_ if {m.src, m.dst} == {one, other}] for round_ in relayed(given_copies, hosts, 16)]

    def known_to(rank: int) -> list[P2PCopy]:
        contents = {(m.src, m.what[0]) for m in copies if rank in (m.src, m.dst)}
        return [m for m in copies if (m.src, m.what[0]) in contents]

    assert between(known_to(one)) == between(known_to(other)) == between(copies)


def test_a_remote_sender_sends_once_for_any_number_of_receivers() -> None:
    numel = 8 * MIN_RELAY_BYTES // 4
    copies = [P2PCopy(dst, 0, dst, TensorSlice(torch.float32, numel), "head") for dst in range(1, WORLD)]
    for hosts, sent in (({}, 1), ({0: "a", 1: "a"}, 2), ({1: "b", 2: "b", 3: "b", 4: "c", 5: "c"}, 2)):
        first, second = relayed(copies, hosts)
        assert sum(copy.tensor_slice.numel for copy in first) == sent * numel
        assert all(copy.src != 0 for copy in second)
    small = [P2PCopy(dst, 0, dst, TensorSlice(torch.float32, 100), "norm") for dst in range(1, WORLD)]
    assert relayed(small, {}) == (small, [])


def all_to_all_columns(rank: int, world: int, hosts: tuple[str, ...] | None, verify: bool) -> list[str]:
    """Every rank sends columns of its matrix to all others; return the failures."""
    peers = open_shared_memory_peers(rank, world, 60.0, hosts) if hosts else None
    rows, columns = 500, 4 * MIN_RELAY_BYTES // 4 // 500
    matrices = [torch.arange(2.0 * rows * columns).view(rows, -1) + src for src in range(world)]
    targets = {src: torch.zeros(rows, 2 * columns) for src in range(world)}
    tensor_slice = TensorSlice(torch.float32, rows * columns)
    copies = [P2PCopy((s, d), s, d, tensor_slice, "columns") for d in range(world) for s in range(world) if s != d]

    def into(what: Any) -> Tensor:
        return targets[what[0]][:, columns // 2 : columns // 2 + columns]

    received = exchange(
        copies,
        rank,
        lambda what: matrices[what[0]][:, :columns],
        lambda what, flat: None,
        torch.device("cpu"),
        into=into,
        peers=peers,
        verify=verify,
    )
    if peers:
        peers.close()
    others = [src for src in range(world) if src != rank]
    failures = [f"from {src}" for src in others if not torch.equal(into((src, rank)), matrices[src][:, :columns])]
    return failures + ([] if received == (world - 1) * tensor_slice.nbytes else [f"{received} bytes"])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("hosts", "verify"),
    [(None, False), (("a", "b", "c", "d"), True), (("a", "b", "b", "b"), True), (("a", "a", "b", "b"), False)],
)
def test_columns_arrive_for_all_host_assignments(
    on_ranks: Callable[..., list[Any]], hosts: tuple[str, ...] | None, verify: bool
) -> None:
    assert on_ranks(4, all_to_all_columns, hosts, verify) == [[]] * 4
