"""Collectives against sums over ranks; a group of one needs no other process."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.comm.process_groups import (
    LARGE_BYTES,
    Group,
    ParallelContext,
    all_gather_bytes,
    make_groups,
    open_rendezvous,
)

WIDTH = 5


def contribution(rank: int, world: int) -> Tensor:
    return torch.arange(float(WIDTH * world)) * (rank + 1)


def share_of_large(rank: int) -> Tensor:
    return (torch.arange(3.0 * LARGE_BYTES) % 1000).chunk(3)[rank]


def collectives(rank: int, world: int) -> dict[str, Any]:
    everyone = tuple(range(world))
    groups = make_groups([everyone, (0, 2), (2, 1)], rank)
    whole, own = groups[everyone], slice(rank * WIDTH, (rank + 1) * WIDTH)
    scattered = torch.empty(WIDTH)
    whole.reduce_scatter(scattered, contribution(rank, world))
    gathered = torch.empty(WIDTH * world)
    whole.all_gather(gathered, torch.full((WIDTH,), float(rank)))
    in_place = {}
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.full((WIDTH * world,), -1.0, dtype=dtype)
        flat[own] = rank + torch.arange(float(WIDTH)).to(dtype)
        whole.all_gather(flat, flat[own])  # the shard is a view of the whole, as in the sharded optimizer
        in_place[dtype] = flat
    large = (torch.arange(3.0 * LARGE_BYTES) % 1000) * (rank + 1)
    share = large.chunk(world)[rank]
    whole.reduce_scatter(share, large)  # in place, as for gradients in the optimizer
    reduced, gathered_large = share.clone(), torch.zeros_like(large)
    whole.all_gather(gathered_large, reduced)
    pair = groups[0, 2].all_reduce(torch.tensor([float(rank)])) if rank != 1 else None
    reversed_group = [0.0] * 3
    if rank != 0:
        part, both = torch.empty(1), torch.empty(2)
        groups[2, 1].reduce_scatter(part, torch.arange(2.0))
        groups[2, 1].all_gather(both, torch.tensor([float(groups[2, 1].index)]))
        reversed_group = [*part.tolist(), *both.tolist()]
    places = {ranks: group.index for ranks, group in groups.items()}
    layout = Layout(DeviceMesh(everyone), ParallelStrategy(dp=world))
    context = ParallelContext(layout, rank, groups=groups)
    return {
        "sum": whole.all_reduce(contribution(rank, world)),
        "scattered": scattered,
        "gathered": gathered,
        "in_place": in_place,
        "large": torch.equal(reduced, 6 * share_of_large(rank)),
        "gathered_large": torch.equal(gathered_large, 6 * (torch.arange(3.0 * LARGE_BYTES) % 1000)),
        "pair": pair,
        "reversed_group": reversed_group,
        "places": places,
        "dp": context.group("dp").ranks,
        "tp": context.group("tp").ranks,
    }


@pytest.mark.dist
def test_collectives_against_sums(on_ranks: Callable[..., list[Any]]) -> None:
    total = sum(contribution(rank, 3) for rank in range(3))
    for rank, result in enumerate(on_ranks(3, collectives)):
        assert torch.equal(result["sum"], total)
        assert torch.equal(result["scattered"], total[rank * WIDTH : (rank + 1) * WIDTH])
        assert torch.equal(result["gathered"], torch.arange(3.0).repeat_interleave(WIDTH))
        expected = torch.cat([r + torch.arange(float(WIDTH)) for r in range(3)])
        assert all(torch.equal(flat, expected.to(dtype)) for dtype, flat in result["in_place"].items())
        assert result["large"] and result["gathered_large"]
        assert result["pair"] is None if rank == 1 else result["pair"].tolist() == [2.0]
        assert result["places"] == {(0, 1, 2): rank, (0, 2): (0, -1, 1)[rank], (2, 1): rank - 1}
        assert (
            result["reversed_group"] == [[0.0] * 3, [0.0, 0.0, 1.0], [2.0, 0.0, 1.0]][rank]
        )  # members are numbered by rank
        assert result["dp"] == (0, 1, 2) and result["tp"] == (rank,)


def test_a_group_of_one_needs_no_process_group() -> None:
    group, x = Group((4,), 4), torch.arange(6.0)
    assert group.index == 0 and group.all_reduce(x) is x
    out = torch.zeros(6)
    group.reduce_scatter(out, x)
    assert torch.equal(out, x)
    group.all_gather(out, x + 1)
    assert torch.equal(out, x + 1)
    group.all_gather(x, x)
    group.reduce_scatter(x, x)
    assert torch.equal(x, torch.arange(6.0))


def test_a_single_worker_has_groups_of_one() -> None:
    context = ParallelContext(Layout(DeviceMesh((3,)), ParallelStrategy()), 3)
    assert [context.group(axis).size for axis in ("dp", "tp", "pp")] == [1, 1, 1]
    assert context.coord == (0, 0, 0)


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    store = open_rendezvous("127.0.0.1", 0, 5.0)
    with pytest.raises(ValueError, match=f"127.0.0.1:{store.port}"):
        open_rendezvous("127.0.0.1", store.port, 5.0)


def gathered_bytes(rank: int, world: int, seed: int) -> bool:
    generator = random.Random(seed)
    for _ in range(20):
        expected = [generator.randbytes(generator.choice((0, 1, 7, 300))) for _ in range(world)]
        if all_gather_bytes(expected[rank]) != expected:
            return False
    return True


@pytest.mark.dist
def test_bytes_of_different_lengths_are_gathered(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(3, gathered_bytes, 21) == [True] * 3
