"""Times packed GAE against its baselines: python benchmarks/bench_gae.py [--device cuda]

Each figure is the minimum of several interleaved rounds. On a shared machine only ratios are meaningful.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from realhf.ops import extension
from realhf.ops.gae import packed_gae, packed_gae_reference

GAMMA, LAM = 0.99, 0.95


def python_loop(rewards: list[float], values: list[float], lengths: list[int], cut: list[bool]) -> None:
    """Compute GAE by its definition, token by token, on lists of Python floats."""
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    start = 0
    for length, bootstrap in zip(lengths, cut, strict=True):
        later, after = 0.0, values[start + length - 1] if bootstrap else 0.0
        for t in range(start + length - 1, start, -1):
            later = rewards[t] + GAMMA * after - values[t - 1] + GAMMA * LAM * later
            advantages[t], returns[t], after = later, later + values[t - 1], values[t - 1]
        start += length


def row_lengths(n_tokens: int, mean: int) -> list[int]:
    """Return random lengths of 1 to 2*mean-1 tokens with sum ``n_tokens``."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * mean, (2 * n_tokens // mean + 10,), generator=generator)
    kept = lengths[lengths.cumsum(0) < n_tokens].tolist()
    return [*kept, n_tokens - sum(kept)]


def best_seconds(actions: dict[str, tuple[int, Callable[[], object]]], wait: Callable[[], object]) -> dict[str, float]:
    """Return the minimum time of each action; actions are interleaved, so that disturbances affect all equally."""
    best = dict.fromkeys(actions, float("inf"))
    for round_number in range(max(rounds for rounds, _ in actions.values())):
        for name, (rounds, action) in actions.items():
            if round_number >= rounds:
                continue
            wait()
            begin = time.perf_counter()
            action()
            wait()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def actions_on(rewards: Tensor, values: Tensor, lengths: list[int], cut: Tensor) -> dict:
    """Return the timed functions: the kernel, its wrapper, and three baselines."""
    lists = rewards.tolist(), values.tolist(), lengths, cut.tolist()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    kernel = extension.kernel("packed_gae", values.device.type)
    assert kernel is not None
    return {
        "kernel": (50, lambda: kernel(rewards, values, cu_seqlens, cut, GAMMA, LAM)),
        "packed_gae": (50, lambda: packed_gae(rewards, values, lengths, cut, GAMMA, LAM)),
        "copy of inputs": (50, lambda: (rewards.clone(), values.clone())),
        "torch reference": (10, lambda: packed_gae_reference(rewards, values, lengths, cut, GAMMA, LAM)),
        "Python loop": (3, lambda: python_loop(*lists)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--row", type=int, default=256, help="mean length of a row")
    options = parser.parse_args()
    device = torch.device(options.device)
    if extension.kernel("packed_gae", device.type) is None:
        raise SystemExit(f"no compiled packed_gae for {device.type}: run python setup.py build_ext --inplace")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    lengths = row_lengths(options.tokens, options.row)
    cut = (torch.arange(len(lengths)) % 3 == 0).to(device)
    print(f"{options.tokens} tokens, {len(lengths)} rows, {torch.get_num_threads()} threads, {device}")
    for dtype in (torch.float32, torch.float64):
        rewards, values = torch.randn(2, options.tokens, dtype=dtype).to(device)
        seconds = best_seconds(actions_on(rewards, values, lengths, cut), wait)
        print(f"{dtype}".removeprefix("torch."))
        copy = seconds["copy of inputs"]
        for name, taken in seconds.items():
            print(f"  {name:15} {1e3 * taken:9.3f} ms   {taken / copy:8.2f} x a copy of the inputs")


if __name__ == "__main__":
    main()
