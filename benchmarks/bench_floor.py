"""A step of GRPO over the time that its matrix products need at the measured peak of the processor.

    python benchmarks/bench_floor.py [--models tiny,small,135m] [--rounds N] [--threads N]

The steps are those of bench_trl.py. Generation needs one pass over each prompt and each response token; training needs
three times as many operations, and nothing is predicted from the last token of a response. The peak is that of the
fastest of a few large float32 products, measured before and after every run, on as many threads. Attention counts as
for rows of mean length.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from bench_peer import N_RESPONSES
from bench_trl import n_prompts, our_metrics, prepare

from realhf.api.model_config import ModelConfig
from realhf.arch.flops import generate_flops
from realhf.arch.hf_config import read_hf_config

SHAPES = ((4096, 512, 1408), (4096, 128, 384), (2048, 1024, 1024), (1024, 4096, 1024))


def peak() -> float:
    """Return the operations per second of the fastest product of ``SHAPES``."""
    rates = []
    for rows, inner, columns in SHAPES:
        a, b, out = torch.randn(rows, inner), torch.randn(inner, columns), torch.empty(rows, columns)
        torch.mm(a, b, out=out)
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(8):
                torch.mm(a, b, out=out)
            rates.append(16 * rows * inner * columns / (time.perf_counter() - begin))
    return max(rates)


def step_flops(config: ModelConfig, line: dict[str, float], prompts: int) -> float:
    """Return the operations of a step with the lengths of a line of ``metrics.jsonl``."""
    prompt, response = round(line["actor_gen/prompt_length"]), round(line["actor_gen/response_length"])
    return 4 * generate_flops(config, [prompt] * prompts, [prompt + response] * (prompts * N_RESPONSES))


def measure(name: str, rounds: int, threads: int) -> None:
    ratios, floors, seconds, peaks = list[float](), list[float](), list[float](), [peak()]
    with tempfile.TemporaryDirectory() as scratch:
        prepare(name, Path(scratch))
        config = read_hf_config(Path(scratch) / "model", scalar_head=False)
        for number in range(rounds):
            run = our_metrics("grpo", name, Path(scratch), number, threads)
            peaks.append(peak())
            times = [line["time/step_s"] for line in run]
            least = [step_flops(config, line, n_prompts(name)) / max(peaks[-2:]) for line in run]
            seconds, floors = seconds + times, floors + least
            ratios += [time / floor for time, floor in zip(times, least, strict=True)]
    print(f"GRPO step {name:<6} {statistics.median(ratios):.2f} x the floor of its products   "
          f"({statistics.median(seconds):.3f} s of {statistics.median(floors):.3f} s; peak "
          f"{min(peaks) / 1e9:.0f}-{max(peaks) / 1e9:.0f} GFLOP/s)", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,small,135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.models.split(","):
        measure(name, options.rounds, options.threads)


if __name__ == "__main__":
    main()
