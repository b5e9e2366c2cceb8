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
from realhf.system.probes import Clock, Probe, agreement, sample

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


def seam_points(together: Bench, apart: Bench, config: ModelConfig, share: float, seconds: float) -> list[Point]:
    """Measure what collectives take inside of the passes of a model. Collective over the group.

    ``apart`` is the rehearsal of ``together``; ``share`` is how much of a core each worker has when all compute.
    """
    group, away = together.context.group("tp"), apart.context.group("tp")
    assert isinstance(away, Rehearsal)
    ours, theirs = list(_probes(together, config)), list(_probes(apart, config))
    asked = [_asked_of(probe, away) for probe in theirs]
    ready = torch.zeros(1, device=together.clock.device)
    probes = [_named(probe, f"{i} apart", lambda: None) for i, probe in enumerate(theirs)]
    probes += [_named(probe, f"{i}", lambda: group.all_reduce(ready)) for i, probe in enumerate(ours)]
    agree = agreement(group, together.clock.device)
    found = {name: points[0] for name, points in sample(probes, seconds, together.clock.now, agree).items()}
    points = [
        _difference(counts, found[f"{i}/{j}"].scaled(share), found[f"{i} apart/{j}"])
        for i, works in enumerate(asked)
        for j, counts in enumerate(works)
        if counts and f"{i}/{j}" in found and f"{i} apart/{j}" in found
    ]
    return [point for point in points if point.low > 0]


def _difference(counts: Counts, whole: Point, part: Point) -> Point:
    return Point(counts, whole.low - part.low, whole.median - part.median, whole.high - part.high, whole.repeats)


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
    group.price = lambda kind, nbytes: 0.0
    group.clock.forget()
    return counts
