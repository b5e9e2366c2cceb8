"""Takes the profile of a machine: starts workers in growing numbers, has them time their probes, and fits the results.

What workers do together is measured on as many as there may be. Where they are more than cores, times are scaled by
cores over workers: a profile tells the seconds of a worker that has a core to itself, and whoever reads it lets workers
share cores. Models are measured on one worker alone, a shard of a tensor-parallel group too: its collectives take what
was measured before. Spells of a slower machine, longer than a model takes, are told by a piece of work that is always
the same, and evened out.
"""

import multiprocessing
import os
import platform
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch

from realhf.api.codec import from_json, to_json
from realhf.api.layout import ParallelStrategy
from realhf.api.messages import Done, Shutdown
from realhf.api.model_config import ModelConfig
from realhf.base.errors import RunFailed
from realhf.base.host_memory import give_back_heap
from realhf.comm.process_groups import destroy_process_group, init_process_group, make_groups, open_rendezvous
from realhf.comm.shared_memory import open_shared_memory_peers
from realhf.models.transformer import SINGLE_RANK_GROUP
from realhf.plan.compile.check import strategy_problems
from realhf.plan.cost.profile import Fit, Point, Profile, ProfiledMachine, fitted, message_counts, shape_of
from realhf.plan.cost.speed import CollectiveKind
from realhf.system.profiler.algorithm_probes import METHODS, algorithm_probes
from realhf.system.profiler.link_probes import (
    answer_calls,
    call_probes,
    collective_probes,
    exchange_probes,
    host_copy_probes,
    send_probes,
)
from realhf.system.profiler.model_probes import (
    BLOCKS,
    PACE,
    Bench,
    clock_speed_probe,
    cut_down,
    memory_points,
    model_probes,
    warm_up,
)
from realhf.system.profiler.probes import Clock, Probe, agreement, memory_now, sample
from realhf.system.profiler.tp_probes import MockGroup, Price, free, tp_counts, tp_points
from realhf.system.transport.auth import TAG_BYTES
from realhf.system.transport.channel import ZmqMaster

PATIENCE_S = 600.0
"""How long a worker may be silent."""
WHOLE, SHARD, SEAMS, ALGORITHMS, ELSE = 0.25, 0.08, 0.06, 0.07, 0.035
"""Shares of a model's time: its passes, those of each kind of shard, their seams, algorithms, each other subject."""

Points = dict[str, list[Point]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class ProfileJob:
    """What to measure. ``seconds`` is about how long each model takes. ``algorithms`` are METHODS, all by default.

    ``collectives`` is what is known already when models are measured.
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
        """Return the models, and the degrees of tensor parallelism that they allow."""
        return [
            (model, tp)
            for model in self.models
            for tp in numbers_of_workers(self.n_workers)
            if not strategy_problems(model, ParallelStrategy(tp=tp))
        ]

    def bench(self, clock: Clock, tp: int) -> Bench:
        """Return where a shard is measured by itself."""
        return Bench.of(MockGroup(tp, clock, self.price(tp)) if tp > 1 else SINGLE_RANK_GROUP, clock, self.bf16)

    def price(self, size: int) -> Price:
        """Return what collectives of ``size`` workers take: in the middle of a pass, or else one after the other."""
        seams = self.collectives.get(f"seams/{size}")

        def price(kind: CollectiveKind, nbytes: float) -> float:
            if seams and seams.knows(counts := tp_counts(kind, nbytes)):
                return seams(counts)
            return self.collectives[f"{kind.value}/{size}"](message_counts(nbytes))

        return price


@dataclass(frozen=True)
class ProfileMessage:
    """What a worker tells: what it is at, how it failed, or in the end what it found.

    ``resident`` is bytes that it takes without a model, or that it takes more for having joined others.
    """

    text: str = ""
    error: str = ""
    found: dict[str, tuple[Point, ...]] = field(default_factory=dict)
    resident: float = 0.0


def this_machine(device: str, threads: int) -> ProfiledMachine:
    """Describe this machine for whoever wants to know whether a profile is of it."""
    if device == "cuda":
        return ProfiledMachine(device, torch.cuda.get_device_name(0), 0, threads)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return ProfiledMachine(device, next(names, platform.processor() or platform.machine()), n_cores(), threads)


def n_gpus() -> int:
    return torch.cuda.device_count()


def n_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def numbers_of_workers(most: int) -> tuple[int, ...]:
    """Return how many workers are measured together: powers of two, and the most there may be."""
    return tuple(sorted({n for n in (1, 2, 4, 8, 16, 32) if n < most} | {most}))


def take_profile(job: ProfileJob, say: Say) -> Profile:
    """Measure on this machine; ``say`` hears of progress. RunFailed when a worker fails."""
    machine = this_machine(job.device, job.threads)
    fits: dict[str, Fit] = {}
    resident = 0.0
    for world in numbers_of_workers(job.n_workers):
        if world > 1:
            store = open_rendezvous("127.0.0.1", 0, PATIENCE_S)
            news, *_ = _ask(_together, [(rank, world, store.port, job) for rank in range(world)], say)
            fits |= {name: fitted(some) for name, some in news.found.items() if some}
            resident = max(resident, news.resident)
    # neighbours do the same on other cores: in a run they compute, too, and share caches and memory
    n_busy = 1 if job.device == "cuda" else max(1, min(job.n_workers, n_cores() // job.threads))
    job = replace(job, collectives=fits)
    news, *_ = _ask(_alone, [(job,)] * n_busy, say)
    points = {name: list(some) for name, some in news.found.items()}
    for part in _ask(_memory, [(seat, n_busy, job) for seat in range(n_busy)], say):
        for name, some in part.found.items():
            points.setdefault(name, []).extend(some)
    fits |= {name: fitted(some) for name, some in points.items() if min(p.median for p in some) > 0}
    say("calls of the master")
    fits |= {name: fitted(some) for name, some in _calls(job.seconds * ELSE).items()}
    return Profile(machine, resident + news.resident, fits)


def _ask(measure: Callable[..., ProfileMessage], seats: list[tuple], say: Say) -> list[ProfileMessage]:
    """Return what ``measure(say, *seat)`` finds out on every seat, each a worker process; the first one is heard."""
    with _processes(_worker, [(measure, seat) for seat in seats]) as ends:
        found: dict[Connection, ProfileMessage] = {}
        while ready := wait([end for end in ends if end not in found], PATIENCE_S):
            for end in ready:
                assert isinstance(end, Connection)
                try:
                    news = from_json(end.recv_bytes().decode(), ProfileMessage)
                except EOFError:
                    news = ProfileMessage(error="it ended without a word")
                if news.error:
                    raise RunFailed(f"worker {ends.index(end)} of {len(seats)} failed: {news.error}")
                if not news.text:
                    found[end] = news
                elif end is ends[0]:
                    say(news.text)
            if len(found) == len(ends):
                return [found[end] for end in ends]
        raise RunFailed(f"{len(seats)} workers said nothing for {PATIENCE_S:.0f} s")


@contextmanager
def _processes(target: Callable[..., None], arguments: Iterable[tuple]) -> Iterator[list[Any]]:
    """Run ``target(connection, *arguments)`` in processes of its own, which end with the block."""
    context = multiprocessing.get_context("spawn")
    started, ends = [], []
    try:
        for some in arguments:
            mine, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *some), daemon=True)
            process.start()
            theirs.close()
            started.append(process)
            ends.append(mine)
        yield ends
    finally:
        for process in started:
            process.kill()
            process.join()


def _worker(end: Connection, measure: Callable[..., ProfileMessage], seat: tuple) -> None:
    """Life of one worker: measure, tell, and wait for the end."""

    def tell(news: ProfileMessage) -> None:
        end.send_bytes(to_json(news).encode())

    try:
        tell(measure(lambda text: tell(ProfileMessage(text)), *seat))
    except BaseException:
        tell(ProfileMessage(error=traceback.format_exc()))
    end.poll(None)  # whoever leaves first breaks the others' connections


def _together(say: Say, rank: int, world: int, port: int, job: ProfileJob) -> ProfileMessage:
    """Measure what joined workers do together."""
    clock, before = _clock(job, rank, world), memory_now()
    init_process_group("127.0.0.1", port, rank, world, job.device, PATIENCE_S, None)
    everyone = make_groups([tuple(range(world))], rank)[tuple(range(world))]
    links = open_shared_memory_peers(rank, world, PATIENCE_S) if job.device == "cpu" else None
    resident = float(memory_now() - before)
    agree = agreement(everyone, clock.device)
    share = 1.0 if job.device == "cuda" else min(1.0, n_cores() / (world * job.threads))
    subjects: dict[str, Iterator[Probe]] = {"collectives": collective_probes(everyone, clock)}
    if world == 2:
        subjects |= {"sends": send_probes(rank, clock), "exchanges": exchange_probes(rank, 2, clock, links)}
    points: Points = {}
    for what, probes in subjects.items():
        say(f"{what} of {world} workers")
        for name, some in sample(list(probes), job.seconds * ELSE, clock.now, agree).items():
            points[name] = [point.scaled(share) for point in some]
    if cut := [model for model in job.models if not strategy_problems(model, ParallelStrategy(tp=world))]:
        say(f"seams of {world} workers")
        away = MockGroup(world, _clock(job, rank, 1), free)
        together, apart = Bench.of(everyone, clock, job.bf16), Bench.of(away, away.clock, job.bf16)
        cheapest = min(cut, key=lambda model: model.hidden)
        points[f"seams/{world}"] = tp_points(together, apart, cheapest, share, SEAMS * job.seconds)
    destroy_process_group()
    return ProfileMessage(found=_frozen(points), resident=resident)


def _alone(say: Say, job: ProfileJob) -> ProfileMessage:
    """Measure how long a worker takes for what it does by itself."""
    clock, points = _clock(job, 0, 1), Points()
    algorithms = list(algorithm_probes(clock, job.algorithms or tuple(METHODS)))
    warm_up(job.bench(clock, 1))
    give_back_heap()
    resident = float(memory_now())
    pace = clock_speed_probe(job.bench(clock, 1))
    spells: list[Points] = []
    for model, tp in job.shards():
        shape = shape_of(model, job.bf16)
        say(f"{shape} cut {tp} ways" if tp > 1 else shape)
        probes = [pace, *model_probes(job.bench(clock, tp), model)]
        found = sample(probes, job.seconds * (WHOLE if tp == 1 else SHARD), clock.now)
        spells.append({place(shape, tp, name): some for name, some in found.items()})
    say("algorithms")
    spells.append(sample([pace, *algorithms], job.seconds * ALGORITHMS, clock.now))
    for some in drift_corrected(spells):
        points |= some
    say("copies")
    shallow = [some for model in job.models for some in cut_down(model, *BLOCKS)]
    copies = [*host_copy_probes(shallow, clock)]
    if job.n_workers == 1:
        copies += exchange_probes(0, 1, clock, None)
    points |= sample(copies, job.seconds * ELSE, clock.now)
    return ProfileMessage(found=_frozen(points), resident=resident)


def _memory(say: Say, seat: int, n_seats: int, job: ProfileJob) -> ProfileMessage:
    """Measure the memory that shards of models take, a part of it on each seat."""
    clock, points = _clock(job, 0, 1), Points()
    warm_up(job.bench(clock, 1))
    say("memory")
    for model, tp in job.shards():
        for name, some in memory_points(job.bench(clock, tp), model, seat, n_seats).items():
            points[place(shape_of(model, job.bf16), tp, name)] = some
    return ProfileMessage(found=_frozen(points))


def place(shape: str, tp: int, name: str) -> str:
    """Return the name in a profile of what is measured of a model; an update depends on no more than its parameters."""
    return name if name == PACE else f"{shape}/{name}" if name == "optimizer" else f"{shape}/t{tp}/{name}"


def drift_corrected(spells: list[Points]) -> list[Points]:
    """Scale what was measured in each spell to the middle of their paces: what the same work took in each."""
    paces = [some[PACE][0].median for some in spells]
    return [
        {name: [point.scaled(median(paces) / pace) for point in some] for name, some in spell.items() if name != PACE}
        for spell, pace in zip(spells, paces, strict=True)
    ]


def _frozen(points: Points) -> dict[str, tuple[Point, ...]]:
    return {name: tuple(some) for name, some in points.items()}


def _clock(job: ProfileJob, rank: int, world: int) -> Clock:
    torch.set_num_threads(job.threads)
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    return Clock(device, job.threads, world)


def _calls(seconds: float) -> Points:
    """Measure calls between a master, which is this process, and a worker."""
    key = secrets.token_bytes(TAG_BYTES)
    master = ZmqMaster(key, 1)
    try:
        with _processes(_answer_calls, [(master.address, key)]):
            if not isinstance(master.receive(PATIENCE_S), Done):
                raise RunFailed("the worker that is to answer calls did not come up")
            points = sample(list(call_probes(master)), seconds, time.perf_counter)
            master.send((0,), Shutdown())
            return points
    finally:
        master.close()


def _answer_calls(end: Connection, address: str, key: bytes) -> None:
    answer_calls(address, key)
