"""Collectives by algorithm: the fastest is chosen, and topology limits their bandwidth."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.machine import Link
from realhf.plan.cost.speed import CollectiveKind
from realhf.plan.machines.collectives import collective_seconds, ring_link
from realhf.plan.machines.hardware import read_hardware
from tests.scaling import examples

H100 = read_hardware("h100")
REDUCE, GATHER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER


def test_large_reductions_of_a_node_use_its_switches() -> None:
    seconds = collective_seconds(H100, REDUCE, 1e9, range(8))
    assert seconds == pytest.approx(1e9 / 273e9, rel=0.01)
    ring = collective_seconds(replace(H100, nvls_bandwidth=0.0), REDUCE, 1e9, range(8))
    assert ring == pytest.approx(2 * 7 / 8 * 1e9 / 370e9, rel=0.01)
    assert collective_seconds(H100, REDUCE, 1e9, range(4)) == pytest.approx(1.5e9 / 370e9, rel=0.01)


def test_small_reductions_across_nodes_use_a_tree() -> None:
    ranks = range(0, 64 * 8, 8)
    assert collective_seconds(H100, REDUCE, 8, ranks) == pytest.approx(2 * 6 * 6e-6, rel=0.01)
    assert collective_seconds(H100, REDUCE, 8, range(16)) == pytest.approx(2 * (7 * 1.5e-6 + 6e-6), rel=0.01)
    large = collective_seconds(H100, REDUCE, 1e10, ranks)
    assert large == pytest.approx(2 * 63 / 64 * 1e10 / 42e9, rel=0.01)


def test_every_member_of_a_node_adds_a_port() -> None:
    assert ring_link(H100, range(0, 32, 8)) == Link(42e9, pytest.approx(6e-6))
    assert ring_link(H100, range(0, 32, 4)).bandwidth == 84e9
    assert ring_link(H100, range(32)).bandwidth == 336e9
    faster = replace(H100, cluster=Link(100e9, 6e-6))
    assert ring_link(faster, range(32)).bandwidth == 370e9  # limited inside the nodes


def test_an_exchange_uses_one_port_per_rank_between_nodes() -> None:
    """Of eight equal parts a rank keeps one; three or seven go over its link to the node, four over its own port."""
    exchange, nbytes = CollectiveKind.ALL_TO_ALL, 8e9
    near, far = H100.node, H100.network({0, 1})
    inside = 7 * (near.latency + 1e9 / near.bandwidth)
    assert collective_seconds(H100, exchange, nbytes, range(8)) == pytest.approx(inside)
    across = 3 * (near.latency + 1e9 / near.bandwidth) + 4 * (far.latency + 1e9 / far.bandwidth)
    assert collective_seconds(H100, exchange, nbytes, (0, 1, 2, 3, 8, 9, 10, 11)) == pytest.approx(across)
    assert collective_seconds(H100, exchange, nbytes, (0,)) == 0


def test_links_between_pods_are_oversubscribed() -> None:
    pods = replace(H100, pod_nodes=4, oversubscription=7.0)
    inside, across = range(0, 32, 8), range(24, 40, 8)
    assert ring_link(pods, inside).bandwidth == 42e9 and ring_link(pods, across).bandwidth == 6e9
    assert pods.link(31, 32).bandwidth == 6e9 and pods.link(0, 8).bandwidth == 42e9
    assert collective_seconds(pods, GATHER, 1e9, across) > collective_seconds(pods, GATHER, 1e9, inside)


@settings(max_examples=examples(100))
@given(
    n=st.integers(2, 64),
    stride=st.sampled_from([1, 2, 8]),
    nbytes=st.floats(1, 1e11),
    kind=st.sampled_from(list(CollectiveKind)),
    factor=st.floats(1.0, 10.0),
)
def test_faster_links_are_not_slower(n: int, stride: int, nbytes: float, kind: CollectiveKind, factor: float) -> None:
    ranks = range(0, n * stride, stride)
    seconds = collective_seconds(H100, kind, nbytes, ranks)
    for changed in ("node", "cluster"):
        link = getattr(H100, changed)
        better = replace(H100, **{changed: Link(link.bandwidth * factor, link.latency / factor)})
        assert collective_seconds(better, kind, nbytes, ranks) <= seconds * (1 + 1e-12)
    assert collective_seconds(H100, kind, nbytes * factor, ranks) >= seconds
