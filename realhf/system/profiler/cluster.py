"""Takes the profile of a cluster: workers of all nodes measure their links, then each node measures models.

The workers are processes of a launcher, ``job.n_workers`` on each node. The nodes must be alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist

from realhf.api.codec import from_json, to_json
from realhf.base.errors import RunFailed
from realhf.comm.process_groups import Group, destroy_process_group, init_process_group, make_groups
from realhf.comm.shared_memory import SharedMemoryPeers, open_shared_memory_peers
from realhf.plan.machines.processor import cores
from realhf.plan.machines.profile import CLUSTER, Fit, Profile, ProfiledMachine, fitted, numbers_of_workers
from realhf.system.profiler import link_probes
from realhf.system.profiler.probes import Clock, Probe, agreement, sample
from realhf.system.profiler.profiler import (
    OTHER,
    TIMEOUT_S,
    Log,
    Points,
    ProfileJob,
    group_points,
    make_clock,
    measure_calls,
    measure_memory,
    measure_single,
    this_machine,
)

Ranks = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerFacts:
    """What the workers of a node have in common, and the cores of one of them."""

    machine: ProfiledMachine
    cores: tuple[int, ...]


@dataclass(frozen=True)
class FitTable:
    fits: dict[str, Fit]


@dataclass(frozen=True)
class PointTable:
    points: Points


@dataclass(frozen=True)
class ClusterWorker:
    """Worker number ``rank`` of a job on ``n_nodes`` nodes with ``job.n_workers`` each."""

    job: ProfileJob
    n_nodes: int
    rank: int

    @property
    def per_node(self) -> int:
        return self.job.n_workers

    @property
    def world(self) -> int:
        return self.n_nodes * self.per_node

    @property
    def node(self) -> int:
        return self.rank // self.per_node

    def node_group(self, n_workers: int, node: int) -> Ranks:
        return tuple(range(node * self.per_node, node * self.per_node + n_workers))

    def node_groups(self) -> list[Ranks]:
        sizes = [n for n in numbers_of_workers(self.per_node) if n > 1]
        return [self.node_group(n, node) for n in sizes for node in range(self.n_nodes)]

    def groups_across(self) -> dict[str, Ranks]:
        """Return groups of the first workers of the first nodes, by size: ``2x4`` is four workers on each of two."""
        return {
            f"{n}x{workers}": tuple(rank for node in range(n) for rank in self.node_group(workers, node))
            for n in numbers_of_workers(self.n_nodes)
            for workers in numbers_of_workers(self.per_node)
            if n > 1
        }


def measure_cluster(worker: ClusterWorker, host: str, port: int, key: bytes, log: Log) -> Profile | None:
    """Measure as one worker of a cluster, whose rendezvous store is at ``host``; return the profile on rank 0.

    Collective over all workers. Raises RunFailed if the nodes are not alike.
    """
    job, is_first = worker.job, worker.rank == 0
    clock = make_clock(job, 0, worker.world)
    store = init_process_group(host, port, worker.rank, worker.world, job.device, TIMEOUT_S, None, key)
    machine = _common_machine(worker, store)
    hosts = tuple(str(rank // worker.per_node) for rank in range(worker.world))
    peers = open_shared_memory_peers(worker.rank, worker.world, TIMEOUT_S, hosts) if job.device == "cpu" else None
    across = worker.groups_across()
    groups = make_groups(dict.fromkeys([*worker.node_groups(), *across.values()]), worker.rank)
    points = _measure_nodes(worker, store, groups, clock, machine.cores, peers, log)
    if across:
        points |= _measure_across(worker, store, groups, clock, machine.cores, log)
    if is_first:
        _put(store, "fits", FitTable(_fits(points)))
    collectives = _take(store, "fits", FitTable).fits
    job = replace(job, collectives=collectives)
    single = measure_single(log, job)
    if worker.node == 0:
        memory = measure_memory(log, worker.rank, worker.per_node, job)
        _put(store, f"memory/{worker.rank}", PointTable(memory.points))
    profile = None
    if is_first:
        totals = single.points
        for rank in range(worker.per_node):
            for name, some in _take(store, f"memory/{rank}", PointTable).points.items():
                totals.setdefault(name, []).extend(some)
        log("calls of the master")
        totals |= measure_calls(job.seconds * OTHER)
        profile = Profile(machine, single.resident, collectives | _fits(totals))
    _wait_for(store, "end", [0], worker.rank)  # an early exit would break the connections of other workers
    destroy_process_group()
    return profile


def _put(store: dist.Store, name: str, value: object) -> None:
    store.set(name, to_json(value).encode())  # type: ignore[arg-type]  # torch accepts bytes


def _take(store: dist.Store, name: str, kind: type[T]) -> T:
    """Wait for a value of another worker and return it."""
    return from_json(store.get(name).decode(), kind)


def _fits(points: Points) -> dict[str, Fit]:
    return {name: fitted(some) for name, some in points.items() if some and min(p.median for p in some) > 0}


def _common_machine(worker: ClusterWorker, store: dist.Store) -> ProfiledMachine:
    """Return the machine of every node; its cores are those of all workers of a node."""
    own = WorkerFacts(this_machine(worker.job.device, worker.job.threads), tuple(sorted(cores())))
    _put(store, f"machine/{worker.rank}", own)
    facts = [_take(store, f"machine/{rank}", WorkerFacts) for rank in range(worker.world)]
    machines = []
    for node in range(worker.n_nodes):
        workers = [facts[rank] for rank in worker.node_group(worker.per_node, node)]
        n_cores = len(set().union(*(each.cores for each in workers))) if worker.job.device == "cpu" else 0
        machines.append(replace(workers[0].machine, cores=n_cores))
    for node, machine in enumerate(machines):
        if machine != machines[0]:
            raise RunFailed(f"the nodes are not alike: node 0 is {machines[0]}, node {node} is {machine}; profile "
                            "one kind of node at a time, with slurm.constraint or slurm.partition")  # fmt: skip
    return machines[0]


def _measure_nodes(
    worker: ClusterWorker,
    store: dist.Store,
    groups: dict[Ranks, Group],
    clock: Clock,
    n_cores: int,
    peers: SharedMemoryPeers | None,
    log: Log,
) -> Points:
    """Measure communication within each node, on all nodes at the same time."""
    points: Points = {}
    for n in numbers_of_workers(worker.per_node):
        if n > 1:
            group = groups[worker.node_group(n, worker.node)]
            if group.index >= 0:
                points |= group_points(log, group, clock, worker.job, n_cores, peers)
            leaders = [node * worker.per_node for node in range(worker.n_nodes)]
            _wait_for(store, f"node/{n}", leaders, worker.rank)
    return points


def _measure_across(
    worker: ClusterWorker, store: dist.Store, groups: dict[Ranks, Group], clock: Clock, n_cores: int, log: Log
) -> Points:
    """Measure communication between nodes, one group at a time."""
    points: Points = {}
    for size, ranks in worker.groups_across().items():
        group, workers = groups[ranks], int(size.partition("x")[2])
        if group.index >= 0:
            log(f"collectives between nodes, {size}")
            share = 1.0 if worker.job.device == "cuda" else min(1.0, n_cores / (workers * worker.job.threads))
            subjects: list[Iterator[Probe]] = [link_probes.collective_probes(group, clock, f"{CLUSTER}{{}}/{size}")]
            if size == "2x1":
                subjects.append(link_probes.send_probes(group, clock, f"{CLUSTER}send"))
                subjects.append(link_probes.exchange_probes(group, clock, None, f"{CLUSTER}exchange"))
            agree = agreement(group, clock.device)
            for probes in subjects:
                for name, some in sample(list(probes), worker.job.seconds * OTHER, clock.now, agree).items():
                    points[name] = [point.scaled(share) for point in some]
        _wait_for(store, f"across/{size}", [0], worker.rank)
    return points


def _wait_for(store: dist.Store, phase: str, leaders: list[int], rank: int) -> None:
    """Wait until the ``leaders`` have reached the end of a phase; unlike a barrier this takes no processor time."""
    if rank in leaders:
        store.set(f"{phase}/{rank}", b"1")  # type: ignore[arg-type]  # torch accepts bytes
    for leader in leaders:
        store.get(f"{phase}/{leader}")
