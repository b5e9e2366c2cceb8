"""Collectives against sums over ranks; a group of one needs no other process."""

import contextlib
import os
import pickle
import random
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistStoreError

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.comm.process_groups import (
    LARGE_BYTES,
    Group,
    ParallelContext,
    SignedStore,
    all_gather_bytes,
    make_groups,
    open_rendezvous,
    verify_peers,
)

WIDTH = 5
KEY = bytes(range(32))


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


def listening_addresses(port: int) -> set[str]:
    """Return the hexadecimal addresses of IPv4 and IPv6 sockets that listen on a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {words[1].split(":")[0] for words in lines if words[3] == "0A" and int(words[1].split(":")[1], 16) == port}


def listening_ports_of(pid: int) -> set[int]:
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").glob("*") if link.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {int(words[1].split(":")[1], 16) for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in links}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_the_store_listens_on_its_host_only(host: str) -> None:
    store = open_rendezvous(host, 0, 5.0)
    (address,) = listening_addresses(store.port)
    assert socket.inet_ntoa(bytes.fromhex(address)[::-1]) == host


def own_listeners(rank: int, world: int) -> list[str]:
    make_groups([(0, 1), (1, 2)], rank)
    return [address for port in listening_ports_of(os.getpid()) for address in listening_addresses(port)]


@pytest.mark.dist
def test_local_ranks_listen_on_loopback_only(on_ranks: Callable[..., list[Any]]) -> None:
    for addresses in on_ranks(3, own_listeners):
        assert addresses and set(addresses) == {"0100007F"}


@pytest.mark.parametrize("seed", range(6))
def test_entries_without_the_key_are_not_read(seed: int) -> None:
    """An outsider lists the names and replaces, exchanges and edits values, or writes its own entries."""
    generator = random.Random(seed)
    server = open_rendezvous("127.0.0.1", 0, 5.0)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    ours, other = SignedStore(server, KEY), SignedStore(client, bytes(32))
    entries = {f"0//cpu//0/{rank}": generator.randbytes(generator.randrange(60)) for rank in range(4)}
    for name, value in entries.items():
        other.set(name, b"forged")
        client.set(name, b"forged")
        ours.set(name, value)
    assert {name: ours.get(name) for name in entries} == entries
    names = [name for name in client.list_keys() if client.get(name) != b"forged"]
    values = {name: client.get(name) for name in names}
    for name in names:
        at = generator.randrange(len(values[name]))
        edited = values[name][:at] + bytes([values[name][at] ^ 1]) + values[name][at + 1 :]
        client.set(name, generator.choice([b"", b"x" * 40, edited, values[generator.choice(names)]]))
    for name, value in entries.items():
        try:
            assert ours.get(name) == value
        except ValueError as error:
            assert "not signed with the key of this run" in str(error)
    with pytest.raises(DistStoreError):
        ours.wait(["0//cpu//0/9"], timedelta(seconds=0.2))


def verify(rank: int, world: int, wrong: int) -> str:
    own = expected = torch.full((world, 32), 7, dtype=torch.uint8)
    if rank == wrong:
        own = own + 1
    try:
        verify_peers(own, expected, None)
    except ConnectionError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_members_without_the_numbers_of_the_default_group_are_an_error(on_ranks: Callable[..., list[Any]]) -> None:
    for wrong, answers in ((-1, on_ranks(3, verify, -1)), (1, on_ranks(3, verify, 1))):
        assert all((f"members [{wrong}]" in answer) == (wrong >= 0) for answer in answers)


def garbage(generator: random.Random) -> bytes:
    return generator.choice([
        pickle.dumps(Path("bomb")), b"", b"GET / HTTP/1.1\r\n\r\n", generator.randbytes(64), bytes(8), bytes(range(20)),
        bytes([1]) + (2**40).to_bytes(8, "little"), generator.randrange(2**63, 2**64).to_bytes(8, "little") * 3,
    ])  # fmt: skip


def work_under_attack(rank: int, world: int) -> list[float]:
    """Connect to all listeners of the ranks and of the store between collectives."""
    generator, sums, kept = random.Random(rank), [], []
    parent = os.getppid()
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ports = set().union(*(listening_ports_of(int(pid)) for pid in pids), listening_ports_of(grandparent(parent)))
    assert len(ports) > world
    for _ in range(10):
        for port in sorted(ports):
            with contextlib.suppress(OSError):
                kept.append(socket.create_connection(("127.0.0.1", port), 1.0))
                kept[-1].sendall(garbage(generator))
            if generator.random() < 0.5 and kept:
                kept.pop().close()
        group = make_groups([tuple(range(world))], rank)[tuple(range(world))]
        sums.append(float(group.all_reduce(torch.tensor([rank + 1.0]))))
    return sums


def grandparent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.dist
def test_hostile_peers_do_not_change_results(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(3, work_under_attack) == [[6.0] * 10] * 3


def late_member(rank: int, world: int) -> str:
    """Rank 1 never calls the collective of rank 0."""
    group = make_groups([(0, 1)], rank, timeout_s=1.0)[0, 1]
    try:
        if rank == 0:
            group.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_the_deadline_of_a_group_names_its_collective(on_ranks: Callable[..., list[Any]]) -> None:
    message, _ = on_ranks(2, late_member)
    assert message.startswith("all_reduce of 12 bytes among ranks 0, 1 failed: ")
