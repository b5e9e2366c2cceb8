"""Decoding steps of models in float32 with matrices of float32, bfloat16 and int8, in turns.

    python benchmarks/bench_weight_types.py [--models small,135m] [--rows 1,4,12,32] [--rounds N]

Prints, by model and number of rows at position 40, milliseconds per step by type, and those of float32 over the others.
"""

import argparse
import statistics
import time

import torch
from bench_lookup import engine_of

from realhf.api.config.choices import WeightType
from realhf.models.transformer import Transformer

POSITION, STEPS = 40, 8


def seconds_per_step(model: Transformer, n_rows: int, dtype: WeightType) -> float:
    cache = model.new_cache(n_rows, POSITION + STEPS)
    tokens, positions = torch.zeros(n_rows, dtype=torch.int64), torch.full((n_rows,), POSITION)
    with torch.no_grad(), model.decoding(dtype):
        model.decode(tokens, positions, cache, longest=POSITION + STEPS)
        began = time.perf_counter()
        for _ in range(STEPS):
            model.decode(tokens, positions, cache, longest=POSITION + STEPS)
        return (time.perf_counter() - began) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,135m")
    parser.add_argument("--rows", default="1,4,12,32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in args.models.split(","):
        model = engine_of(name).model
        for n_rows in map(int, args.rows.split(",")):
            times: dict[WeightType, list[float]] = {dtype: [] for dtype in WeightType}
            for _ in range(args.rounds):
                for dtype, taken in times.items():
                    taken.append(seconds_per_step(model, n_rows, dtype))
            medians = {dtype: statistics.median(taken) for dtype, taken in times.items()}
            ratios = (
                f"{dtype.value} {1000 * s:.1f} ms ({medians[WeightType.auto] / s:.2f})" for dtype, s in medians.items()
            )
            print(f"{name}, {n_rows} rows: {', '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
