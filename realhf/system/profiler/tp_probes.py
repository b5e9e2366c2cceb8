"""Cost of tensor-parallel collectives between computations, which differs from that of back-to-back collectives.

A shard runs once within its group and once alone with ``MockGroup``; the difference is the time of its collectives,
including late arrivals, cold caches and remote memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.comm.process_groups import Group
from realhf.plan.cost.speed import CollectiveKind
from realhf.plan.machines.profile import Counts, Point, message_counts
from realhf.system.profiler.model_probes import ProbeContext, decoding_probe, pass_probes, reduced_depths
from realhf.system.profiler.probes import Clock, Probe, agreement, sample

ACTIVATIONS = (32 << 10, 512 << 10, 5 << 19)
"""Bytes of the hidden states of a micro-batch, the message size of most collectives."""
DECODING = ((4, 16), (64, 64))
SENTINEL_COST = 100.0
"""Seconds, more than any probe takes."""

Price = Callable[[CollectiveKind, float], float]


class MockGroup(Group):
    """A tensor-parallel group without other members: collectives advance the clock by ``price(kind, bytes)``.

    The results of collectives are meaningless.
    """

    def __init__(self, size: int, clock: Clock, price: Price) -> None:
        super().__init__(tuple(range(size)), 0)
        self.clock, self.price = clock, price

    def _charge(self, kind: CollectiveKind, whole: Tensor, work: Callable[[], object] = lambda: None) -> None:
        self.clock.charge(work, self.price(kind, whole.nbytes))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._charge(CollectiveKind.ALL_REDUCE, tensor)
        return tensor

    def all_max(self, tensor: Tensor) -> Tensor:
        return self.all_reduce(tensor)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        self._charge(CollectiveKind.REDUCE_SCATTER, whole, lambda: output.copy_(whole[: len(output)]))

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        self._charge(CollectiveKind.ALL_GATHER, whole, lambda: whole.view(self.size, *part.shape).copy_(part))


def tp_counts(kind: CollectiveKind, nbytes: float) -> Counts:
    return {f"{kind.value} {name}": count for name, count in message_counts(nbytes).items()}


def free(kind: CollectiveKind, nbytes: float) -> float:
    return 0.0


def tp_points(
    together: ProbeContext, alone: ProbeContext, config: ModelConfig, core_share: float, seconds: float
) -> list[Point]:
    """Measure collectives within passes of a model. Collective over the group of ``together``.

    ``alone`` has a ``MockGroup`` of the same size; ``core_share`` is each worker's share of a core when all compute.
    Only as many workers as there are cores run alone.
    """
    group, mock = together.parallel.group("tp"), alone.parallel.group("tp")
    assert isinstance(mock, MockGroup)
    group_probes, alone_probes = list(_probes(together, config)), list(_probes(alone, config))
    collectives = [recorded_collectives(probe, mock) for probe in alone_probes]
    ready = torch.zeros(1, device=together.clock.device)
    if group.index >= core_share * group.size:
        alone_probes = [replace(probe, run=partial(list, (0.0,) * len(probe.works))) for probe in alone_probes]
    probes = [_renamed(probe, f"{i} alone", lambda: None) for i, probe in enumerate(alone_probes)]
    probes += [_renamed(probe, f"{i}", lambda: group.all_reduce(ready)) for i, probe in enumerate(group_probes)]
    samples = sample(probes, seconds, together.clock.now, agreement(group, together.clock.device))
    points = []
    for i, works in enumerate(collectives):
        for j, counts in enumerate(works):
            a, b = samples[f"{i}/{j}"][0].scaled(core_share), samples[f"{i} alone/{j}"][0]
            points.append(replace(a - b, counts=counts))
    return [point for point in points if point.low > 0]


def _probes(context: ProbeContext, config: ModelConfig) -> Iterator[Probe]:
    model, _ = reduced_depths(config, 1, 2)
    engine, length = context.engine(model), min(64, config.max_positions)
    for nbytes in ACTIVATIONS:
        rows = nbytes // (engine.params.data.itemsize * config.hidden * length)
        yield from pass_probes(context, engine, [length] * max(1, rows), half=False)
    for rows, cached in DECODING:
        yield decoding_probe(context, engine, rows, cached)


def _renamed(probe: Probe, name: str, before: Callable[[], object]) -> Probe:
    """Return a probe with works named ``name/0``, ..., that calls ``before`` outside the measured time."""

    def run() -> Sequence[float]:
        before()
        return probe.run()

    return Probe(tuple((f"{name}/{j}", counts) for j, (_, counts) in enumerate(probe.works)), run, probe.size)


def recorded_collectives(probe: Probe, group: MockGroup) -> list[Counts]:
    """Return the total counts of collectives in each work of a probe.

    Each collective costs ``SENTINEL_COST``, so a work's time gives its number of collectives. Works are consecutive,
    and the last repetition ends the run.
    """
    calls: list[Counts] = []

    def record(kind: CollectiveKind, nbytes: float) -> float:
        calls.append(tp_counts(kind, nbytes))
        return SENTINEL_COST

    group.price = record
    numbers = [round(value / SENTINEL_COST) for value in probe.run()]
    group.price = free
    group.clock.reset()
    last = iter(calls[len(calls) - sum(numbers) :])
    totals: list[Counts] = []
    for number in numbers:
        totals.append({})
        for counts in islice(last, number):
            for name, count in counts.items():
                if count:
                    totals[-1][name] = totals[-1].get(name, 0.0) + count
    return totals
