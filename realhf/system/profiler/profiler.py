"""Takes the profile of a machine: starts worker processes, which time their probes, and fits the results.

Communication is measured on 2, 4, ... workers, models on one: a shard's collectives count with their measured time.
"""

import multiprocessing
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

import torch

from realhf.api.codec import from_json, to_json
from realhf.api.layout import ParallelStrategy
from realhf.api.messages import Done, Shutdown
from realhf.api.model_config import ModelConfig
from realhf.base.errors import RunFailed
from realhf.base.host_memory import resident_bytes, trim_heap
from realhf.comm.process_groups import Group, destroy_process_group, init_process_group, make_groups, open_rendezvous
from realhf.comm.shared_memory import SharedMemoryPeers, open_shared_memory_peers
from realhf.models.transformer import SINGLE_RANK_GROUP
from realhf.plan.compile.check import strategy_problems
from realhf.plan.cost.speed import CollectiveKind
from realhf.plan.machines.processor import cores, processor_name, torch_version
from realhf.plan.machines.profile import (
    DIFFERENCES,
    Fit,
    Point,
    Profile,
    ProfiledMachine,
    fitted,
    message_counts,
    numbers_of_workers,
    shape_of,
)
from realhf.system.profiler import link_probes
from realhf.system.profiler.algorithm_probes import METHODS, algorithm_probes
from realhf.system.profiler.model_probes import (
    BLOCKS,
    CLOCK_SPEED,
    ProbeContext,
    clock_speed_probe,
    memory_points,
    model_probes,
    reduced_depths,
    warm_up,
)
from realhf.system.profiler.probes import Clock, Probe, agreement, sample
from realhf.system.profiler.tp_probes import MockGroup, Price, free, tp_counts, tp_points
from realhf.system.transport.auth import TAG_BYTES
from realhf.system.transport.channel import ZmqMaster

TIMEOUT_S = 600.0
"""Longest time without a message from a worker."""
WHOLE, SHARD, TP_COLLECTIVES, ALGORITHMS, OTHER = 0.25, 0.08, 0.06, 0.07, 0.035
"""Fractions of ``ProfileJob.seconds``: whole models, each degree of tensor parallelism, its collectives, algorithms,
each other subject."""

Points = dict[str, list[Point]]
Log = Callable[[str], None]


@dataclass(frozen=True)
class ProfileJob:
    """What to measure. ``seconds`` is the approximate time per model; ``algorithms`` are METHODS (default: all).

    ``collectives`` are the fits of the communication phase, which precedes the measurements of models.
    """

    device: str
    n_workers: int
    threads: int
    bf16: bool
    models: tuple[ModelConfig, ...]
    seconds: float = 70.0
    algorithms: tuple[str, ...] = ()
    collectives: dict[str, Fit] = field(default_factory=dict)

    def shards(self) -> list[tuple[ModelConfig, int]]:
        return [
            (model, tp)
            for model in self.models
            for tp in numbers_of_workers(self.n_workers)
            if not strategy_problems(model, ParallelStrategy(tp=tp))
        ]

    def context(self, clock: Clock, tp: int) -> ProbeContext:
        return ProbeContext.of(MockGroup(tp, clock, self.price(tp)) if tp > 1 else SINGLE_RANK_GROUP, clock, self.bf16)

    def price(self, size: int) -> Price:
        """Return the cost of collectives of ``size`` workers: between computations if measured, else back-to-back."""
        fit = self.collectives.get(f"{DIFFERENCES}{size}")

        def price(kind: CollectiveKind, nbytes: float) -> float:
            if fit and fit.covers(counts := tp_counts(kind, nbytes)):
                return fit(counts)
            return self.collectives[f"{kind.value}/{size}"](message_counts(nbytes))

        return price


@dataclass(frozen=True)
class ProfileMessage:
    """A worker's message: progress (``text``), failure (``error``), or its results.

    ``resident`` is the bytes of a worker without a model, or the additional bytes of joining a process group.
    """

    text: str = ""
    error: str = ""
    points: Points = field(default_factory=dict)
    resident: float = 0.0


def this_machine(device: str, threads: int) -> ProfiledMachine:
    if device == "cuda":
        return ProfiledMachine(device, torch.cuda.get_device_name(0), 0, threads, torch_version())
    return ProfiledMachine(device, processor_name(device), len(cores()), threads, torch_version())


def n_gpus() -> int:
    return torch.cuda.device_count()


def take_profile(job: ProfileJob, log: Log) -> Profile:
    """Take the profile of this machine; ``log`` receives progress messages. Raises RunFailed if a worker fails."""
    machine = this_machine(job.device, job.threads)
    fits: dict[str, Fit] = {}
    resident = 0.0
    for world in numbers_of_workers(job.n_workers):
        if world > 1:
            store = open_rendezvous("127.0.0.1", 0, TIMEOUT_S)
            key = secrets.token_bytes(TAG_BYTES)
            arguments = [(rank, world, store.port, key, job) for rank in range(world)]
            result, *_ = _run_workers(_measure_group, arguments, log)
            fits |= {name: fitted(points) for name, points in result.points.items() if points}
            resident = max(resident, result.resident)
    # workers on other cores run the same probes: in a run they compute, too, and share caches and memory bandwidth
    n_busy = 1 if job.device == "cuda" else max(1, min(job.n_workers, len(cores()) // job.threads))
    job = replace(job, collectives=fits)
    single, *_ = _run_workers(measure_single, [(job,)] * n_busy, log)
    totals = single.points
    for memory in _run_workers(measure_memory, [(index, n_busy, job) for index in range(n_busy)], log):
        for name, points in memory.points.items():
            totals.setdefault(name, []).extend(points)
    fits |= {name: fitted(points) for name, points in totals.items() if min(p.median for p in points) > 0}
    log("calls of the master")
    fits |= {name: fitted(points) for name, points in measure_calls(job.seconds * OTHER).items()}
    return Profile(machine, resident + single.resident, fits)


def _run_workers(measure: Callable[..., ProfileMessage], arguments: list[tuple], log: Log) -> list[ProfileMessage]:
    """Return the results of ``measure(log, *args)`` of worker processes, one for each of ``arguments``.

    Only the first worker's progress is logged.
    """
    with _processes(_worker, [(measure, args) for args in arguments]) as connections:
        results: dict[Connection, ProfileMessage] = {}
        while ready := wait([end for end in connections if end not in results], TIMEOUT_S):
            for end in ready:
                assert isinstance(end, Connection)
                try:
                    message = from_json(end.recv_bytes().decode(), ProfileMessage)
                except EOFError:
                    message = ProfileMessage(error="the process ended without a message")
                if message.error:
                    raise RunFailed(f"worker {connections.index(end)} of {len(arguments)} failed: {message.error}")
                if not message.text:
                    results[end] = message
                elif end is connections[0]:
                    log(message.text)
            if len(results) == len(connections):
                return [results[end] for end in connections]
        raise RunFailed(f"no message from {len(arguments)} workers for {TIMEOUT_S:.0f} s")


@contextmanager
def _processes(target: Callable[..., None], arguments: Iterable[tuple]) -> Iterator[list[Any]]:
    """Run ``target(connection, *args)`` in processes that are killed at the end of the block."""
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        for args in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield connections
    finally:
        for process in processes:
            process.kill()
            process.join()


def _worker(connection: Connection, measure: Callable[..., ProfileMessage], args: tuple) -> None:
    def send(message: ProfileMessage) -> None:
        connection.send_bytes(to_json(message).encode())

    try:
        send(measure(lambda text: send(ProfileMessage(text)), *args))
    except BaseException:
        send(ProfileMessage(error=traceback.format_exc()))
    connection.poll(None)  # an early exit would break the connections of other workers


def _measure_group(log: Log, rank: int, world: int, port: int, key: bytes, job: ProfileJob) -> ProfileMessage:
    clock, (_, before) = make_clock(job, rank, world), resident_bytes()
    _store = init_process_group("127.0.0.1", port, rank, world, job.device, TIMEOUT_S, None, key)
    everyone = make_groups([tuple(range(world))], rank)[tuple(range(world))]
    peers = open_shared_memory_peers(rank, world, TIMEOUT_S) if job.device == "cpu" else None
    resident = float(resident_bytes()[1] - before)
    points = group_points(log, everyone, clock, job, len(cores()), peers)
    destroy_process_group()
    return ProfileMessage(points=points, resident=resident)


def group_points(
    log: Log, group: Group, clock: Clock, job: ProfileJob, n_cores: int, peers: SharedMemoryPeers | None
) -> Points:
    """Measure the communication of a group of workers on a node with ``n_cores``. Collective over the group."""
    world, agree = group.size, agreement(group, clock.device)
    # a profile holds the seconds of a worker with a core to itself
    core_share = 1.0 if job.device == "cuda" else min(1.0, n_cores / (world * job.threads))
    subjects: dict[str, Iterator[Probe]] = {"collectives": link_probes.collective_probes(group, clock)}
    if world == 2:
        subjects["sends"] = link_probes.send_probes(group, clock)
        subjects["exchanges"] = link_probes.exchange_probes(group, clock, peers)
    points: Points = {}
    for subject, probes in subjects.items():
        log(f"{subject} of {world} workers")
        for name, samples in sample(list(probes), job.seconds * OTHER, clock.now, agree).items():
            points[name] = [point.scaled(core_share) for point in samples]
    if valid := [model for model in job.models if not strategy_problems(model, ParallelStrategy(tp=world))]:
        log(f"tensor-parallel collectives of {world} workers")
        mock = MockGroup(world, make_clock(job, clock.device.index or 0, 1), free)
        together, alone = ProbeContext.of(group, clock, job.bf16), ProbeContext.of(mock, mock.clock, job.bf16)
        smallest = min(valid, key=lambda model: model.hidden)
        seconds = TP_COLLECTIVES * job.seconds
        points[f"{DIFFERENCES}{world}"] = tp_points(together, alone, smallest, core_share, seconds)
    return points


def measure_single(log: Log, job: ProfileJob) -> ProfileMessage:
    clock, points = make_clock(job, 0, 1), Points()
    warm_up(job.context(clock, 1))
    trim_heap()
    resident = float(resident_bytes()[1])
    algorithms = list(algorithm_probes(clock, job.algorithms or tuple(METHODS)))  # imports transformers
    clock_speed = clock_speed_probe(job.context(clock, 1))
    phases: list[Points] = []
    for model, tp in job.shards():
        shape = shape_of(model, job.bf16)
        log(f"{shape} with tensor-parallel size {tp}" if tp > 1 else shape)
        probes = [clock_speed, *model_probes(job.context(clock, tp), model)]
        samples = sample(probes, job.seconds * (WHOLE if tp == 1 else SHARD), clock.now)
        phases.append({fit_name(shape, tp, op): some for op, some in samples.items()})
    log("algorithms")
    phases.append(sample([clock_speed, *algorithms], job.seconds * ALGORITHMS, clock.now))
    for phase in drift_corrected(phases):
        points |= phase
    log("copies")
    shallow = [config for model in job.models for config in reduced_depths(model, *BLOCKS)]
    copies = [*link_probes.host_copy_probes(shallow, clock)]
    if job.n_workers == 1:
        copies += link_probes.exchange_probes(SINGLE_RANK_GROUP, clock, None)
    points |= sample(copies, job.seconds * OTHER, clock.now)
    return ProfileMessage(points=points, resident=resident)


def measure_memory(log: Log, index: int, n_workers: int, job: ProfileJob) -> ProfileMessage:
    """Measure the memory of every ``n_workers``-th case, starting with ``index``."""
    clock, points = make_clock(job, 0, 1), Points()
    warm_up(job.context(clock, 1))
    log("memory")
    for model, tp in job.shards():
        for op, some in memory_points(job.context(clock, tp), model, index, n_workers).items():
            points[fit_name(shape_of(model, job.bf16), tp, op)] = some
    return ProfileMessage(points=points)


def fit_name(shape: str, tp: int, op: str) -> str:
    """Return the name of a model's fit; that of the optimizer does not depend on tensor parallelism."""
    return op if op == CLOCK_SPEED else f"{shape}/{op}" if op == "optimizer" else f"{shape}/t{tp}/{op}"


def drift_corrected(phases: list[Points]) -> list[Points]:
    """Scale the times of each phase to the median clock speed: the machine's speed changes between phases."""
    speeds = [phase[CLOCK_SPEED][0].median for phase in phases]
    return [
        {name: [p.scaled(median(speeds) / speed) for p in some] for name, some in phase.items() if name != CLOCK_SPEED}
        for phase, speed in zip(phases, speeds, strict=True)
    ]


def make_clock(job: ProfileJob, rank: int, world: int) -> Clock:
    torch.set_num_threads(job.threads)
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    return Clock(device, job.threads, world)


def measure_calls(seconds: float) -> Points:
    key = secrets.token_bytes(TAG_BYTES)
    with closing(ZmqMaster(key, 1)) as master, _processes(link_probes.answer_calls, [(master.address, key)]):
        if not isinstance(master.receive(TIMEOUT_S), Done):
            raise RunFailed("the worker of the call probes did not start")
        points = sample(list(link_probes.call_probes(master)), seconds, time.perf_counter)
        master.send((0,), Shutdown())
        return points
