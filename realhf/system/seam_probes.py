"""What tensor-parallel shards lose at their seams: collectives as they are between computations, not one after another.

A shard is computed once with its group and once without; the difference is what the group's collectives took.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from realhf.api.model import ModelConfig
from realhf.comm.parallel import Group
from realhf.plan.profile import Counts, Point
from realhf.plan.speed import Collective
from realhf.system.model_probes import Bench, cut_down, decoding_probe, pass_probes, spread_lengths
from realhf.system.probes import Agree, Clock, Probe, sample

KINDS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
PASSES = ((2, 64, 64), (16, 64, 64), (8, 24, 384), (40, 64, 64))
DECODING = ((4, 16), (64, 64))
FORTUNE = 1e6
"""Seconds that nothing takes."""

Price = Callable[[Collective, int], float]


class Rehearsal(Group):
    """A tensor-parallel group whose other members are away: collectives take what ``price`` says.

    A shard computes as it would among them, undisturbed by who else uses the machine. Results mean nothing.
    """

    def __init__(self, size: int, clock: Clock, price: Price) -> None:
        super().__init__(tuple(range(size)), 0)
        self.clock, self.price = clock, price

    def _take(self, kind: Collective, whole: Tensor, work: Callable[[], object] = lambda: None) -> None:
        self.clock.pretend(work, self.price(kind, whole.nbytes))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._take(Collective.ALL_REDUCE, tensor)
        return tensor

    def all_max(self, tensor: Tensor) -> Tensor:
        return self.all_reduce(tensor)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        self._take(Collective.REDUCE_SCATTER, whole, lambda: output.copy_(whole[: len(output)]))

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        self._take(Collective.ALL_GATHER, whole, lambda: whole.view(self.size, *part.shape).copy_(part))


def seam_counts(kind: Collective, nbytes: float) -> Counts:
    return {kind.value: 1, f"{kind.value} byte": nbytes}


def seam_points(
    group: Group,
    clock: Clock,
    threads: int,
    config: ModelConfig,
    bf16: bool,
    scale: float,
    seconds: float,
    agree: Agree,
) -> list[Point]:
    """Measure what collectives take inside of the passes of a model, ``scale`` times. Collective over the group."""
    away = Rehearsal(group.size, Clock(clock.device, threads, 1), lambda kind, nbytes: 0.0)
    together = list(_probes(Bench.of(group, clock, bf16), config))
    alone = list(_probes(Bench.of(away, away.clock, bf16), config))
    asked = [_asked_of(probe, away) for probe in alone]
    away.price = lambda kind, nbytes: 0.0
    ready = torch.zeros(1, device=clock.device)
    pairs = [
        probe
        for i, both in enumerate(zip(together, alone, strict=True))
        for probe in (_named(both[0], f"{i}+", lambda: group.all_reduce(ready)), _named(both[1], f"{i}", lambda: None))
    ]
    found = sample(pairs, seconds, clock.now, agree)
    points = []
    for i, (probe, counts) in enumerate(zip(alone, asked, strict=True)):
        for j, asked_for in enumerate(counts):
            if (mine := f"{i}/{j}") in found and f"{i}+/{j}" in found and asked_for:
                lost = [scale * with_them - by_itself for with_them, by_itself in
                        zip(_quartiles(found[f"{i}+/{j}"][0]), _quartiles(found[mine][0]), strict=True)]  # fmt: skip
                points.append(Point(asked_for, *(max(t, 1e-6) for t in lost), found[mine][0].repeats))
    return points


def _quartiles(point: Point) -> tuple[float, float, float]:
    return point.low, point.median, point.high


def _named(probe: Probe, name: str, first: Callable[[], object]) -> Probe:
    """Return a probe by another name, which does something before the clock runs."""

    def run() -> Sequence[float]:
        first()
        return probe.run()

    return Probe(tuple((f"{name}/{j}", counts) for j, (_, counts) in enumerate(probe.works)), run, probe.size)


def _probes(bench: Bench, config: ModelConfig) -> Iterator[Probe]:
    model, _ = cut_down(config, 2, 3)
    engine = bench.engine(model)
    for sizes in PASSES:
        if sizes[2] <= config.max_positions:
            yield from pass_probes(bench, engine, spread_lengths(*sizes), half=False)
    for rows, context in DECODING:
        yield decoding_probe(bench, engine, rows, context)


def _asked_of(probe: Probe, group: Rehearsal) -> list[Counts]:
    """Return which collectives, and how many bytes of them, each work of a probe asks a group for.

    They are found by letting one after the other cost a fortune.
    """
    counts: list[Counts] = [{} for _ in probe.works]
    for kind in KINDS:
        for name in seam_counts(kind, 1):
            group.price = lambda asked, nbytes, kind=kind, name=name: (  # type: ignore[misc]
                FORTUNE * seam_counts(asked, nbytes)[name] if asked is kind else 0.0
            )
            for count, value in zip(counts, probe.run(), strict=True):
                if times := round(value / FORTUNE):
                    count[name] = times
    return counts
