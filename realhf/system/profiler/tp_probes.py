"""What tensor-parallel shards lose at their seams: collectives as they are between computations, not one after another.

A shard is computed among the others and by itself; the difference is what its group's collectives took: memory that is
elsewhere, members that arrive at different times, and caches that others used meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.comm.process_groups import Group
from realhf.plan.cost.profile import Counts, Point, message_counts
from realhf.plan.cost.speed import CollectiveKind
from realhf.system.profiler.model_probes import Bench, cut_down, decoding_probe, pass_probes
from realhf.system.profiler.probes import Clock, Probe, agreement, sample

KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
ACTIVATIONS = (32 << 10, 512 << 10, 5 << 19)
"""Bytes of the micro-batches' hidden states, which is what most collectives are about."""
DECODING = ((4, 16), (64, 64))
SENTINEL_COST = 100.0
"""Seconds that no pass of a probe takes."""

Price = Callable[[CollectiveKind, float], float]


class MockGroup(Group):
    """A tensor-parallel group whose other members are away: collectives take what ``price`` says.

    A shard computes as it would among them, undisturbed by who else uses the machine. Results mean nothing.
    """

    def __init__(self, size: int, clock: Clock, price: Price) -> None:
        super().__init__(tuple(range(size)), 0)
        self.clock, self.price = clock, price

    def _take(self, kind: CollectiveKind, whole: Tensor, work: Callable[[], object] = lambda: None) -> None:
        self.clock.pretend(work, self.price(kind, whole.nbytes))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._take(CollectiveKind.ALL_REDUCE, tensor)
        return tensor

    def all_max(self, tensor: Tensor) -> Tensor:
        return self.all_reduce(tensor)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        self._take(CollectiveKind.REDUCE_SCATTER, whole, lambda: output.copy_(whole[: len(output)]))

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        self._take(CollectiveKind.ALL_GATHER, whole, lambda: whole.view(self.size, *part.shape).copy_(part))


def tp_counts(kind: CollectiveKind, nbytes: float) -> Counts:
    """Return what a collective in the middle of a pass consists of."""
    return {f"{kind.value} {name}": count for name, count in message_counts(nbytes).items()}


def free(kind: CollectiveKind, nbytes: float) -> float:
    return 0.0


def tp_points(together: Bench, apart: Bench, config: ModelConfig, share: float, seconds: float) -> list[Point]:
    """Measure what collectives take inside of the passes of a model. Collective over the group.

    ``apart`` is the rehearsal of ``together``; ``share`` is how much of a core each worker has when all compute. As
    many rehearse at a time as have a core to themselves.
    """
    group, away = together.context.group("tp"), apart.context.group("tp")
    assert isinstance(away, MockGroup)
    ours, theirs = list(_probes(together, config)), list(_probes(apart, config))
    asked = [asked_of(probe, away) for probe in theirs]
    ready = torch.zeros(1, device=together.clock.device)
    idle = group.index >= share * group.size
    probes = [_named(_nothing(probe) if idle else probe, f"{i} apart", lambda: None) for i, probe in enumerate(theirs)]
    probes += [_named(probe, f"{i}", lambda: group.all_reduce(ready)) for i, probe in enumerate(ours)]
    found = sample(probes, seconds, together.clock.now, agreement(group, together.clock.device))
    points = [
        _difference(counts, found[f"{i}/{j}"][0].scaled(share), found[f"{i} apart/{j}"][0])
        for i, works in enumerate(asked)
        for j, counts in enumerate(works)
    ]
    return [point for point in points if point.low > 0]


def _probes(bench: Bench, config: ModelConfig) -> Iterator[Probe]:
    model, _ = cut_down(config, 1, 2)
    engine, length = bench.engine(model), min(64, config.max_positions)
    for nbytes in ACTIVATIONS:
        rows = nbytes // (engine.params.data.itemsize * config.hidden * length)
        yield from pass_probes(bench, engine, [length] * max(1, rows), half=False)
    for rows, context in DECODING:
        yield decoding_probe(bench, engine, rows, context)


def _named(probe: Probe, name: str, first: Callable[[], object]) -> Probe:
    """Return a probe by another name, which does something before the clock runs."""

    def run() -> Sequence[float]:
        first()
        return probe.run()

    return Probe(tuple((f"{name}/{j}", counts) for j, (_, counts) in enumerate(probe.works)), run, probe.size)


def _nothing(probe: Probe) -> Probe:
    return replace(probe, run=lambda: [0.0 for _ in probe.works])


def _difference(counts: Counts, whole: Point, part: Point) -> Point:
    return Point(counts, whole.low - part.low, whole.median - part.median, whole.high - part.high, whole.repeats)


def asked_of(probe: Probe, group: MockGroup) -> list[Counts]:
    """Return which collectives, and how many bytes of them, each work of a probe asks a group for.

    How many each asks for is told by letting one cost a fortune. Works follow one another, the last time at the end.
    """
    calls: list[Counts] = []

    def note(kind: CollectiveKind, nbytes: float) -> float:
        calls.append(tp_counts(kind, nbytes))
        return SENTINEL_COST

    group.price = note
    numbers = [round(value / SENTINEL_COST) for value in probe.run()]
    group.price = free
    group.clock.forget()
    last = iter(calls[len(calls) - sum(numbers) :])
    asked: list[Counts] = []
    for number in numbers:
        asked.append({})
        for counts in islice(last, number):
            for name, count in ((name, count) for name, count in counts.items() if count):
                asked[-1][name] = asked[-1].get(name, 0.0) + count
    return asked
