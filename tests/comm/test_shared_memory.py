"""Workers of one host share memory: large pieces, many receivers, again and again; and nothing is left behind."""

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.process_groups import init_process_group, open_rendezvous
from realhf.comm.shared_memory import SLOT_BYTES, SharedMemoryPeers, open_shared_memory_peers

CPU = torch.device("cpu")
WIDE = 3 * SLOT_BYTES // 2 // 4 // 1000  # elements; 1000 rows of twice this need several slots


def rings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "realhf-ring" in line]


def named_files() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "realhf" in name]


def columns(of: Tensor, rank: int) -> Tensor:
    return of[:, rank * WIDE : (rank + 2) * WIDE]


def swap_large(links: SharedMemoryPeers, rank: int, world: int, verify: bool) -> bool:
    """Every rank sends some columns of its matrix to all others; tell whether all of them came."""
    sent = torch.arange(1000.0 * WIDE * (world + 1)).view(1000, -1) + rank
    received = {src: torch.zeros(1000, WIDE * (world + 1)) for src in range(world)}
    piece = TensorSlice(torch.float32, 1000 * 2 * WIDE)
    pairs = [(src, dst) for dst in range(world) for src in range(world) if src != dst]
    moves = [P2PCopy((src, dst), src, dst, piece, "columns") for src, dst in pairs]
    exchange(
        moves,
        rank,
        lambda what: columns(sent, what[0]),
        lambda what, flat: None,
        CPU,
        into=lambda what: columns(received[what[0]], what[0]),
        links=links,
        verify=verify,
    )
    return all(
        torch.equal(columns(received[src], src), columns(sent, src) - rank + src) for src in range(world) if src != rank
    )


def swap_again_and_again(rank: int, world: int) -> dict[str, Any]:
    links = open_shared_memory_peers(rank, world, 60.0)
    first = [swap_large(links, rank, world, verify=False)]
    before = len(rings()), len(os.listdir("/proc/self/fd"))
    again = [swap_large(links, rank, world, verify) for verify in (False, True, False)]
    after = len(rings()), len(os.listdir("/proc/self/fd"))
    peers, why_not, files = links.peers, links.why_not, named_files()
    links.close()
    return {
        "right": first + again,
        "before": before,
        "after": after,
        "peers": peers,
        "why_not": why_not,
        "files": files,
        "left": len(rings()),
    }


@pytest.mark.dist
def test_large_pieces_again_and_again(on_ranks: Callable[..., list[Any]]) -> None:
    for rank, got in enumerate(on_ranks(3, swap_again_and_again)):
        assert got["right"] == [True] * 4
        assert got["peers"] == {0, 1, 2} - {rank} and got["why_not"] == ""
        assert got["before"] == got["after"] and got["before"][0] == 3  # the same memory every time
        assert got["files"] == [] and got["left"] == 0


def without_memory(rank: int, world: int) -> tuple[frozenset[int], str, list[float]]:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    links = open_shared_memory_peers(rank, world, 60.0, ("near", "near", "far"))
    place = torch.zeros(4)
    moves = [P2PCopy(dst, (dst + 1) % world, dst, TensorSlice(torch.float32, 4)) for dst in range(world)]
    exchange(
        moves, rank, lambda what: torch.full((4,), 1.0 + what), lambda what, flat: place.copy_(flat), CPU, links=links
    )
    return links.peers, links.why_not, place.tolist()


@pytest.mark.dist
def test_where_memory_is_refused_the_network_is_used(on_ranks: Callable[..., list[Any]]) -> None:
    for rank, (peers, why_not, place) in enumerate(on_ranks(3, without_memory)):
        assert peers == frozenset() and place == [1.0 + rank] * 4
        assert ("rank 1: " in why_not) == (rank < 2)


def wait_in_vain(rank: int, world: int) -> str:
    links = open_shared_memory_peers(rank, world, 60.0)
    links.timeout_s = 0.2
    moves = [P2PCopy("layers.0.wq", 1, 0, TensorSlice(torch.float32, 4))]
    text = ""
    if rank == 0:
        with pytest.raises(TimeoutError) as raised:
            exchange(moves, rank, lambda what: torch.zeros(4), lambda what, flat: None, CPU, links=links)
        text = str(raised.value)
    dist.barrier()
    return text


@pytest.mark.dist
def test_a_wait_ends_and_names_what_was_awaited(on_ranks: Callable[..., list[Any]]) -> None:
    text = on_ranks(2, wait_in_vain)[0]
    assert "nothing happened for 0.2 s while rank 0 awaited layers.0.wq" in text and "from rank 1" in text


def different_moves(rank: int, world: int) -> str:
    links = open_shared_memory_peers(rank, world, 60.0)
    moves = [P2PCopy("head", 1, 0, TensorSlice(torch.float32, 4 * (rank + 1)))]
    if rank == 1:
        exchange(moves, rank, lambda what: torch.zeros(8), lambda what, flat: None, CPU, links=links)
        return ""
    with pytest.raises(RuntimeError) as raised:
        exchange(moves, rank, lambda what: torch.zeros(4), lambda what, flat: None, CPU, links=links)
    return str(raised.value)


@pytest.mark.dist
def test_different_lists_of_moves_are_an_error(on_ranks: Callable[..., list[Any]]) -> None:
    assert "rank 1 sent 32 bytes where rank 0 expects 16" in on_ranks(2, different_moves)[0]


def die_in_the_middle(rank: int, port: int, reply: Connection) -> None:
    """Rank 1 is killed while it packs its second piece."""
    torch.set_num_threads(1)
    init_process_group("127.0.0.1", port, rank, 2, "cpu", 60.0, None)
    links = open_shared_memory_peers(rank, 2, 60.0)
    numel = 3 * SLOT_BYTES // 4 // 4

    def read(what: object) -> Tensor:
        if what == "second":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(numel)

    moves = [P2PCopy(what, 1, 0, TensorSlice(torch.float32, numel)) for what in ("first", "second")]
    try:
        exchange(moves, rank, read, lambda what, flat: None, CPU, links=links)
        reply.send_bytes(b"no error")
    except ConnectionError as error:
        reply.send_bytes(str(error).encode())
    finally:
        os._exit(0)  # without a word to the peer that is no more


@pytest.mark.dist
def test_a_killed_worker_is_noticed_at_once_and_leaves_nothing() -> None:
    processes = multiprocessing.get_context("spawn")
    store = open_rendezvous("127.0.0.1", 0, 60.0)
    mine, theirs = processes.Pipe()
    ranks = [processes.Process(target=die_in_the_middle, args=(rank, store.port, theirs)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        assert mine.poll(50)
        text = mine.recv_bytes().decode()
        assert "a worker ended while rank 0 awaited second" in text and "from rank 1 (ended: [1])" in text
        ranks[1].join(10)
        assert ranks[1].exitcode == -signal.SIGKILL
        assert named_files() == []
    finally:
        for process in ranks:
            process.kill()
            process.join(10)
