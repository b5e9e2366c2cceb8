"""Fits the constants of GPUs in realhf/plan/machines to published times, and tests them on sources left out.

    python benchmarks/calibrate.py [FILE ...]

Two constants per kind of GPU are fitted: ``flops``, which large matrix products reach, and ``memory_bandwidth``, which
all other kernels reach. Everything else is from data sheets and papers, or is a trait of the engine behind a point
(published_engines.py). The fit minimizes the mean absolute logarithm of predicted / published, where every source
counts equally. ``left out`` is the error of a source under constants that were fitted to the others.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.bench_published import POINTS, Point, machine_of, points, ratio
from realhf.api.machine import Hardware

CONSTANTS = {"flops": "peak_flops", "memory_bandwidth": "peak_bandwidth"}  # and their limits
FIRST_STEP, LAST_STEP = 0.25, 0.01
KINDS = {"train": "training", "decode": "decoding", "generate": "decoding"}


def loss(chosen: Sequence[Point], hardware: Hardware) -> float:
    errors: dict[str, list[float]] = {}
    for point in chosen:
        errors.setdefault(point["source"], []).append(abs(math.log(ratio(point, hardware))))
    return sum(statistics.mean(found) for found in errors.values())


def fit(chosen: Sequence[Point], hardware: Hardware) -> Hardware:
    """Return the machine with the constants that fit best: coordinate descent with decreasing steps."""
    best, step = loss(chosen, hardware), FIRST_STEP
    while step > LAST_STEP:
        found = min(((loss(chosen, near), near) for near in _neighbours(hardware, step)), key=lambda pair: pair[0])
        if found[0] < best:
            best, hardware = found
        else:
            step /= 2
    return hardware


def _neighbours(hardware: Hardware, step: float) -> Iterator[Hardware]:
    for name, limit in CONSTANTS.items():
        for factor in (1 + step, 1 / (1 + step)):
            yield replace(hardware, **{name: min(getattr(hardware, name) * factor, getattr(hardware, limit))})


def left_out(chosen: Sequence[Point], hardware: Hardware) -> Iterator[tuple[Point, float]]:
    """Yield every point with predicted / published under constants fitted to the other sources."""
    for source in sorted({point["source"] for point in chosen}):
        fitted = fit([point for point in chosen if point["source"] != source], hardware)
        yield from ((point, ratio(point, fitted)) for point in chosen if point["source"] == source)


def summary(ratios: Sequence[float]) -> str:
    errors = sorted(abs(one - 1) for one in ratios)
    rms = math.sqrt(statistics.mean(math.log(one) ** 2 for one in ratios))
    return f"median {statistics.median(errors):.1%}, 90 % below {errors[math.ceil(0.9 * len(errors)) - 1]:.1%}, rms {rms:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    every = [point for point in points([POINTS, *parser.parse_args().files]) if point["kind"] in KINDS]
    errors: dict[str, list[float]] = {}
    for gpu in sorted({point["hardware"] for point in every}):
        chosen = [point for point in every if point["hardware"] == gpu]
        hardware = fit(chosen, machine_of(chosen[0]))
        shares = {name: getattr(hardware, name) / getattr(hardware, limit) for name, limit in CONSTANTS.items()}
        print(
            gpu, *(f"{name}: {getattr(hardware, name):.3g} ({share:.2f} of the peak)" for name, share in shares.items())
        )
        held = list(left_out(chosen, hardware))
        for source in sorted({point["source"] for point in chosen}):
            own = [ratio(point, hardware) for point in chosen if point["source"] == source]
            others = [found for point, found in held if point["source"] == source]
            print(f"  {source[:60]}: {len(own)} points")
            print(f"    fitted:   {summary(own)}\n    left out: {summary(others)}")
        for point, found in held:
            errors.setdefault(KINDS[point["kind"]], []).append(found)
    for kind, found in errors.items():
        print(f"left out, {kind}, {len(found)} points: {summary(found)}")


if __name__ == "__main__":
    main()
