"""Times packed GAE against its yardsticks, all in one run: python benchmarks/bench_gae.py [--device cuda]

Ratios hold on a shared machine, seconds do not. Each figure is the best of several rounds, taken in turn.
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
    """The definition, one token at a time, on Python floats: the time of lists in, lists out."""
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    start = 0
    for length, bootstrap in zip(lengths, cut, strict=True):
        later, after = 0.0, values[start + length - 1] if bootstrap else 0.0
        for t in range(start + length - 1, start, -1):
            later = rewards[t] + GAMMA * after - values[t - 1] + GAMMA * LAM * later
            advantages[t], returns[t], after = later, later + values[t - 1], values[t - 1]
        start += length


def row_lengths(n_tokens: int, mean: int) -> list[int]:
    """Draw lengths of 1 to 2*mean-1 tokens that add up to ``n_tokens``."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, 2 * mean, (2 * n_tokens // mean + 10,), generator=generator)
    lengths = drawn[drawn.cumsum(0) < n_tokens].tolist()
    return [*lengths, n_tokens - sum(lengths)]


def best_seconds(actions: dict[str, tuple[int, Callable[[], object]]], wait: Callable[[], object]) -> dict[str, float]:
    """Return each action's shortest time; the actions take turns, so that a busy moment hits all alike."""
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
    """Return what is timed: the kernel, the function around it, and the three yardsticks."""
    lists = rewards.tolist(), values.tolist(), lengths, cut.tolist()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    kernel = extension.kernel("packed_gae", values.device.type)
    assert kernel is not None
    return {
        "kernel": (50, lambda: kernel(rewards, values, cu_seqlens, cut, GAMMA, LAM)),
        "packed_gae": (50, lambda: packed_gae(rewards, values, lengths, cut, GAMMA, LAM)),
        "copy of inputs": (50, lambda: (rewards.clone(), values.clone())),
        "torch twin": (10, lambda: packed_gae_reference(rewards, values, lengths, cut, GAMMA, LAM)),
        "Python loop": (3, lambda: python_loop(*lists)),
    }


def main() -> None:
    """Print one table per dtype."""
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
