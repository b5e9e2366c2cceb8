"""Exchanges over shared memory: large slices, many receivers, repeated exchanges, no leaked resources."""

import multiprocessing
import os
import resource
import signal
import socket
import time
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
from realhf.system.transport.channel import deadline
from tests.conftest import TIMEOUT_S

CPU = torch.device("cpu")
WIDE = 3 * SLOT_BYTES // 2 // 4 // 1000  # elements; 1000 rows of twice this need several slots


def rings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "realhf-ring" in line]


def named_files() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "realhf" in name]


def columns(matrix: Tensor, rank: int) -> Tensor:
    return matrix[:, rank * WIDE : (rank + 2) * WIDE]


def exchange_columns(peers: SharedMemoryPeers, rank: int, world: int, verify: bool) -> bool:
    """Every rank sends columns of its matrix to all others; return True if all arrived unchanged."""
    sent = torch.arange(1000.0 * WIDE * (world + 1)).view(1000, -1) + rank
    received = {src: torch.zeros(1000, WIDE * (world + 1)) for src in range(world)}
    tensor_slice = TensorSlice(torch.float32, 1000 * 2 * WIDE)
    pairs = [(src, dst) for dst in range(world) for src in range(world) if src != dst]
    copies = [P2PCopy((src, dst), src, dst, tensor_slice, "columns") for src, dst in pairs]
    exchange(
        copies,
        rank,
        lambda what: columns(sent, what[0]),
        lambda what, flat: None,
        CPU,
        into=lambda what: columns(received[what[0]], what[0]),
        peers=peers,
        verify=verify,
    )
    return all(
        torch.equal(columns(received[src], src), columns(sent, src) - rank + src) for src in range(world) if src != rank
    )


def repeated_exchanges(rank: int, world: int) -> dict[str, Any]:
    peers = open_shared_memory_peers(rank, world, 60.0)
    first = [exchange_columns(peers, rank, world, verify=False)]
    before = len(rings()), len(os.listdir("/proc/self/fd"))
    again = [exchange_columns(peers, rank, world, verify) for verify in (False, True, False)]
    after = len(rings()), len(os.listdir("/proc/self/fd"))
    ranks, why_not, files = peers.ranks, peers.why_not, named_files()
    peers.close()
    return {
        "correct": first + again,
        "before": before,
        "after": after,
        "ranks": ranks,
        "why_not": why_not,
        "files": files,
        "left": len(rings()),
    }


@pytest.mark.dist
def test_repeated_exchanges_of_large_slices(on_ranks: Callable[..., list[Any]]) -> None:
    for rank, result in enumerate(on_ranks(3, repeated_exchanges)):
        assert result["correct"] == [True] * 4
        assert result["ranks"] == {0, 1, 2} - {rank} and result["why_not"] == ""
        assert result["before"] == result["after"] and result["before"][0] == 3  # no new memory or descriptors
        assert result["files"] == [] and result["left"] == 0


def exchange_without_memory(rank: int, world: int) -> tuple[frozenset[int], str, list[float]]:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    peers = open_shared_memory_peers(rank, world, 60.0, ("near", "near", "far"))
    target = torch.zeros(4)
    copies = [P2PCopy(dst, (dst + 1) % world, dst, TensorSlice(torch.float32, 4)) for dst in range(world)]
    exchange(
        copies, rank, lambda what: torch.full((4,), 1.0 + what), lambda what, flat: target.copy_(flat), CPU, peers=peers
    )
    return peers.ranks, peers.why_not, target.tolist()


@pytest.mark.dist
def test_without_shared_memory_the_network_is_used(on_ranks: Callable[..., list[Any]]) -> None:
    for rank, (ranks, why_not, target) in enumerate(on_ranks(3, exchange_without_memory)):
        assert ranks == frozenset() and target == [1.0 + rank] * 4
        assert ("rank 1: " in why_not) == (rank < 2)


def listeners_of_siblings() -> list[str]:
    """Return the names of the sockets on which the other ranks listen."""
    siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    links = [os.readlink(link) for pid in siblings for link in Path(f"/proc/{pid}/fd").glob("*") if link.is_symlink()]
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [words[7] for words in lines if words[3] == "00010000" and f"socket:[{words[6]}]" in links]


def connect_as_another_user(names: list[str]) -> None:
    """Connect in a child process of another user, which stays connected until this process exits."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        os.setuid(65534)
        kept = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in names]
        for sock, name in zip(kept, names, strict=True):
            sock.connect("\0" + name[1:])
        theirs.send(b"connected")
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    assert ours.recv(9) == b"connected"
    ours.detach()


def share_beside_another_user(rank: int, world: int) -> frozenset[int]:
    if rank == 2:  # the others open their sockets, and then wait for the address of this rank
        left = deadline(TIMEOUT_S)
        while len(names := listeners_of_siblings()) < 2 and left() > 0:
            time.sleep(0.01)
        connect_as_another_user(names)
    return open_shared_memory_peers(rank, world, 60.0).ranks


@pytest.mark.dist
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_processes_of_other_users_are_ignored(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(3, share_beside_another_user) == [{0, 1, 2} - {rank} for rank in range(3)]


def wait_until_timeout(rank: int, world: int) -> str:
    peers = open_shared_memory_peers(rank, world, 60.0)
    peers.timeout_s = 0.2
    copies = [P2PCopy("layers.0.wq", 1, 0, TensorSlice(torch.float32, 4))]
    text = ""
    if rank == 0:
        with pytest.raises(TimeoutError) as raised:
            exchange(copies, rank, lambda what: torch.zeros(4), lambda what, flat: None, CPU, peers=peers)
        text = str(raised.value)
    dist.barrier()
    return text


@pytest.mark.dist
def test_a_timeout_names_the_pending_packets(on_ranks: Callable[..., list[Any]]) -> None:
    text = on_ranks(2, wait_until_timeout)[0]
    assert "no progress for 0.2 s while rank 0 awaited layers.0.wq" in text and "from rank 1" in text


def different_copies(rank: int, world: int) -> str:
    peers = open_shared_memory_peers(rank, world, 60.0)
    copies = [P2PCopy("head", 1, 0, TensorSlice(torch.float32, 4 * (rank + 1)))]
    if rank == 1:
        exchange(copies, rank, lambda what: torch.zeros(8), lambda what, flat: None, CPU, peers=peers)
        return ""
    with pytest.raises(RuntimeError) as raised:
        exchange(copies, rank, lambda what: torch.zeros(4), lambda what, flat: None, CPU, peers=peers)
    return str(raised.value)


@pytest.mark.dist
def test_different_lists_of_copies_are_an_error(on_ranks: Callable[..., list[Any]]) -> None:
    assert "rank 1 sent 32 bytes where rank 0 expects 16" in on_ranks(2, different_copies)[0]


def exit_during_exchange(rank: int, port: int, reply: Connection) -> None:
    """Rank 1 is killed while it packs its second slice."""
    torch.set_num_threads(1)
    _store = init_process_group("127.0.0.1", port, rank, 2, "cpu", 60.0, None, bytes(32))
    peers = open_shared_memory_peers(rank, 2, 60.0)
    numel = 3 * SLOT_BYTES // 4 // 4

    def read(what: object) -> Tensor:
        if what == "second":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(numel)

    copies = [P2PCopy(what, 1, 0, TensorSlice(torch.float32, numel)) for what in ("first", "second")]
    try:
        exchange(copies, rank, read, lambda what, flat: None, CPU, peers=peers)
        reply.send_bytes(b"no error")
    except ConnectionError as error:
        reply.send_bytes(str(error).encode())
    finally:
        os._exit(0)  # skips the tear-down, which would wait for the killed peer


@pytest.mark.dist
def test_a_killed_worker_is_detected_immediately_and_leaks_nothing() -> None:
    processes = multiprocessing.get_context("spawn")
    store = open_rendezvous("127.0.0.1", 0, 60.0)
    own, theirs = processes.Pipe()
    ranks = [processes.Process(target=exit_during_exchange, args=(rank, store.port, theirs)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        assert own.poll(50)
        text = own.recv_bytes().decode()
        assert "a worker exited while rank 0 awaited second" in text and "from rank 1 (exited: [1])" in text
        ranks[1].join(10)
        assert ranks[1].exitcode == -signal.SIGKILL
        assert named_files() == []
    finally:
        for process in ranks:
            process.kill()
            process.join(10)
