"""Times the reallocation of a 100M-parameter model between layouts against baselines, on CPU:

python benchmarks/bench_realloc.py [--rounds 7]

Each figure is a median over interleaved rounds. On a shared machine only ratios are meaningful. Baselines move the same
bytes between the same processes as single buffers: ``plain`` through shared memory, ``raw`` by one gloo send and
receive per pair; both copy local data once. ``once`` is a single copy of the received bytes, a lower bound. ``plain``
and ``once`` are relative to ``shared``, ``raw`` to ``gloo``: 1.00 is as fast. ``verify``: slowdown by checksums.
"""

import argparse
import mmap
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import box_numel, box_shape
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.process_groups import all_gather_bytes, destroy_process_group, init_process_group, open_rendezvous
from realhf.comm.shared_memory import SharedMemoryPeers, open_shared_memory_peers
from realhf.models.flat_params import FlatParams
from realhf.ops.strided_copy import copy_box
from realhf.plan.compile.realloc import BoxCopy, plan_realloc, route_copies, shard_boxes

CONFIG = ModelConfig("llama", 12, 768, 12, 12, 64, 2048, 32000, 1024, tied_embedding=True)
PAIRS = {
    2: ("d1@0 -> d1@1", "d2@0-1 -> t2@0-1", "d1@0 -> t2@0-1", "p2@0-1 -> t2@0-1"),
    4: ("d2@0-1 -> t2@2-3", "p2@0-1 -> t2@2-3", "d2@0-1 -> d2@2-3", "d1@0 -> d4@0-3", "d2t2@0-3 -> d2p2@0-3"),
}
HEADER = "            sent   kept   shared   GB/s  plain   once      gloo    raw gloo/shared  verify"
Methods = dict[str, Callable[[], object]]


def layout(text: str) -> Layout:
    strategy, mesh = text.split("@")
    return Layout(DeviceMesh.parse(mesh, 1, 4), ParallelStrategy.parse(strategy))


def shard(where: Layout, rank: int) -> FlatParams | None:
    """Return this worker's parameters in a layout, with touched memory."""
    if rank not in where.mesh.ranks:
        return None
    specs = param_specs(CONFIG)
    params = FlatParams(specs, shard_boxes(specs, stages, where, rank), torch.float32, "cpu")
    params.data.fill_(rank + 1.0)
    return params


def stages(pp: int, vpp: int) -> Sequence[frozenset[int]]:
    return stage_layers(CONFIG, pp, vpp)


@dataclass
class Baselines:
    """Copies of the same bytes as a plan between each pair of workers."""

    rank: int
    shared: dict[int, Tensor]  # by sender
    copies: Sequence[BoxCopy]

    def __post_init__(self) -> None:
        self.numel: dict[tuple[int, int], int] = {}
        content: dict[int, dict[object, int]] = {}
        for copy in self.copies:
            pair, size = (copy.src, copy.dst), box_numel(copy.box)
            self.numel[pair] = self.numel.get(pair, 0) + size
            if copy.src != copy.dst:
                content.setdefault(copy.src, {})[copy.name, copy.box] = size
        self.n_unique = sum(content.get(self.rank, {}).values())
        self.outgoing = torch.ones(max([self.n_unique, *(n for (src, _), n in self.numel.items() if src == self.rank)]))
        self.incoming = {src: torch.ones(n) for (src, dst), n in self.numel.items() if dst == self.rank}

    def plain(self) -> None:
        """Write outgoing data to shared memory once; after a barrier, copy the incoming data."""
        self.keep()
        self.shared[self.rank][: self.n_unique].copy_(self.outgoing[: self.n_unique])
        dist.barrier()
        for src, target in self.incoming.items():
            if src != self.rank:
                target.copy_(self.shared[src][: target.numel()])

    def raw(self) -> None:
        """Send and receive one tensor per pair of workers."""
        works = [dist.irecv(target, src) for src, target in self.incoming.items() if src != self.rank]
        for (src, dst), size in self.numel.items():
            if src == self.rank != dst:
                works.append(dist.isend(self.outgoing[:size], dst))
        self.keep()
        for work in works:
            work.wait()

    def once(self) -> None:
        """Copy the incoming bytes from this worker's own memory."""
        for target in self.incoming.values():
            target.copy_(self.shared[self.rank][: target.numel()])

    def keep(self) -> None:
        if self.rank in self.incoming:
            target = self.incoming[self.rank]
            target.copy_(self.outgoing[: target.numel()])


def methods_of(
    pair: str, rank: int, peers: SharedMemoryPeers, shared: dict[int, Tensor]
) -> tuple[Methods, Sequence[BoxCopy]]:
    """Return the timed functions for a pair of layouts, and the plan."""
    src, dst = map(layout, pair.split(" -> "))
    source, target = shard(src, rank), shard(dst, rank)
    copies = tuple(route_copies(plan_realloc(param_specs(CONFIG), stages, src, dst)))
    transfers = [
        P2PCopy(c, c.src, c.dst, TensorSlice(torch.float32, box_numel(c.box)), (c.name, c.box)) for c in copies
    ]

    def read(copy: object) -> Tensor:
        assert isinstance(copy, BoxCopy) and source is not None
        return source.read(copy.name, copy.box)

    def into(copy: object) -> Tensor:
        assert isinstance(copy, BoxCopy) and target is not None
        return target.read(copy.name, copy.box)

    def write(copy: object, flat: Tensor) -> None:
        assert isinstance(copy, BoxCopy) and target is not None
        target.write(copy.name, copy.box, flat.view(box_shape(copy.box)))

    def move(peers: SharedMemoryPeers | None, verify: bool = False) -> Callable[[], object]:
        cpu = torch.device("cpu")
        return lambda: exchange(transfers, rank, read, write, cpu, into=into, peers=peers, verify=verify, copy=copy_box)

    baselines = Baselines(rank, shared, copies)
    methods: Methods = {
        "shared": move(peers),
        "plain": baselines.plain,
        "gloo": move(None),
        "raw": baselines.raw,
        "once": baselines.once,
        "verified": move(peers, verify=True),
    }
    return methods, copies


def seconds_of(methods: Methods, rounds: int) -> dict[str, float]:
    """Return the median time of each method on the slowest worker, without the first round."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds + 1):
        for name, method in methods.items():
            dist.barrier()
            begin = time.perf_counter()
            method()
            last = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(last, dist.ReduceOp.MAX)
            times[name].append(last.item())
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def map_shared(path_of: dict[int, str], nbytes: int) -> dict[int, Tensor]:
    """Map the memory of the ``plain`` baseline: an anonymous file per worker, as large as the model."""
    shared = {}
    for rank, path in path_of.items():
        with open(path, "r+b") as file:
            shared[rank] = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.float32)
    return shared


def run_rank(rank: int, world: int, port: int, rounds: int) -> None:
    """Run one worker; rank 0 prints."""
    torch.set_num_threads(1)
    _store = init_process_group("127.0.0.1", port, rank, world, "cpu", 120.0, None, bytes(32))
    peers = open_shared_memory_peers(rank, world, 120.0)
    nbytes = 4 * sum(spec.numel for spec in param_specs(CONFIG))
    memory = os.memfd_create("plain")
    os.ftruncate(memory, nbytes)
    paths = [path.decode() for path in all_gather_bytes(f"/proc/{os.getpid()}/fd/{memory}".encode())]
    shared = map_shared(dict(enumerate(paths)), nbytes)
    shared[rank].fill_(1.0)
    for pair in PAIRS[world]:
        methods, copies = methods_of(pair, rank, peers, shared)
        seconds = seconds_of(methods, rounds)
        if rank == 0:
            print(line(pair, copies, seconds), flush=True)
    dist.barrier()
    peers.close()
    destroy_process_group()


def line(pair: str, copies: Sequence[BoxCopy], s: dict[str, float]) -> str:
    sent = 4 * sum(box_numel(c.box) for c in copies if c.src != c.dst)
    kept = 4 * sum(box_numel(c.box) for c in copies if c.src == c.dst)
    speed = (sent + kept) / s["shared"] / 1e9
    return (
        f"{pair:22} {sent / 1e6:6.0f} {kept / 1e6:6.0f} {s['shared']:8.3f} {speed:6.2f} "
        f"{s['plain'] / s['shared']:6.2f} {s['once'] / s['shared']:6.2f} {s['gloo']:9.3f} {s['raw'] / s['gloo']:6.2f} "
        f"{s['gloo'] / s['shared']:11.2f} {s['verified'] / s['shared']:7.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit("the plain baseline requires Linux")
    numel = sum(spec.numel for spec in param_specs(CONFIG))
    print(f"{numel / 1e6:.0f}M parameters, fp32; MB between workers and kept; seconds; ratios, 1.00 = the baseline")
    processes = multiprocessing.get_context("spawn")
    for world in PAIRS:
        store = open_rendezvous("127.0.0.1", 0, 120.0)
        print(f"\n{world} processes{HEADER}")
        ranks = [
            processes.Process(target=run_rank, args=(rank, world, store.port, options.rounds)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
