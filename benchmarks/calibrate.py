"""Fits the constants of GPUs in realhf/plan/machines to published times, and tests them on sources left out.

    python -m benchmarks.calibrate [FILE ...]

Three constants per kind of GPU are fitted: ``flops``, which torch's large matrix products reach, ``memory_bandwidth``,
which all other kernels reach, and how much faster the products of engines are that tune them for each shape. Everything
else is from data sheets and papers, or is a trait of the engine behind a point (published_engines.py). The fit
minimizes the mean absolute logarithm of predicted / published, where every engine counts equally. ``left out`` is the
error of a source, or of all sources of an engine, under constants that were fitted to the others.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.bench_published import POINTS, TIMED, Point, machine_of, points, ratio, summary
from benchmarks.published_engines import engine_name

FIRST_STEP, LAST_STEP = 0.2, 0.01
KINDS = {"train": "training", "prefill": "prefill", "decode": "decoding", "generate": "decoding"}


@dataclass(frozen=True)
class Constants:
    """The fitted constants of a kind of GPU; the last is of engines with tuned products, relative to ``flops``."""

    flops: float
    memory_bandwidth: float
    tuned: float

    def ratio(self, point: Point) -> float:
        fitted = replace(machine_of(point), flops=self.flops, memory_bandwidth=self.memory_bandwidth)
        return ratio(point, fitted, self.tuned)

    def neighbours(self, step: float) -> Iterator["Constants"]:
        for name, value in vars(self).items():
            for factor in (1 + step, 1 / (1 + step)):
                yield replace(self, **{name: value * factor})


def family(point: Point) -> str:
    """Return the name under which all points of an engine are left out together."""
    return f"{engine_name(point)} {KINDS[point['kind']]}"


def source(point: Point) -> str:
    return f"{point['source']} {KINDS[point['kind']]}"


def is_usable(point: Point) -> bool:
    """Return whether a point has a time and is not marked as implausible."""
    return point["kind"] in TIMED and "faster than reading" not in point.get("note", "")


def loss(chosen: Sequence[Point], constants: Constants) -> float:
    errors: dict[str, list[float]] = {}
    for point in chosen:
        errors.setdefault(family(point), []).append(abs(math.log(constants.ratio(point))))
    return sum(statistics.mean(found) for found in errors.values())


def fit(chosen: Sequence[Point], constants: Constants) -> Constants:
    """Return the constants that fit best: coordinate descent with decreasing steps."""
    best, step = loss(chosen, constants), FIRST_STEP
    while step > LAST_STEP:
        nearest = min(constants.neighbours(step), key=lambda near: loss(chosen, near))
        if (found := loss(chosen, nearest)) < best:
            best, constants = found, nearest
        else:
            step /= 2
    return constants


def left_out(chosen: Sequence[Point], constants: Constants, group: Callable[[Point], str]) -> dict[str, list[float]]:
    """Return predicted / published of every group under constants fitted to the others."""
    found = {}
    for name in sorted({group(point) for point in chosen}):
        fitted = fit([point for point in chosen if group(point) != name], constants)
        found[name] = [fitted.ratio(point) for point in chosen if group(point) == name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    every = [point for point in points([POINTS, *parser.parse_args().files]) if is_usable(point)]
    totals: dict[tuple[str, str], list[float]] = {}
    for gpu in sorted({point["hardware"] for point in every}):
        chosen, machine = [point for point in every if point["hardware"] == gpu], machine_of({"hardware": gpu})
        constants = fit(chosen, Constants(machine.flops, machine.memory_bandwidth, 1.0))
        print(f"{gpu}: flops {constants.flops:.3g}, {constants.flops / machine.peak_flops:.2f} of the peak; "
              f"memory_bandwidth {constants.memory_bandwidth:.3g}, "
              f"{constants.memory_bandwidth / machine.peak_bandwidth:.2f} of the peak; "
              f"tuned products {constants.tuned:.2f}")  # fmt: skip
        for what, group in (("source", source), ("engine", family)):
            for name, ratios in left_out(chosen, constants, group).items():
                print(f"  {what} left out: {name[:70]}: {len(ratios)} points, {summary(ratios)}")
                totals.setdefault((what, name.split()[-1]), []).extend(ratios)
    for (what, kind), ratios in totals.items():
        print(f"{what} left out, {kind}: {len(ratios)} points, {summary(ratios)}")


if __name__ == "__main__":
    main()
