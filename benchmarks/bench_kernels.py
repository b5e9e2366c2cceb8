"""Times each compiled kernel against its baselines: python benchmarks/bench_kernels.py [--device cuda]

Each figure is the minimum of several interleaved rounds. On a shared machine only ratios are meaningful. Packed GAE is
in bench_gae.py. Memory is the growth of a fresh process's peak resident memory over forward and backward, without the
two gradients.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from realhf.ops import extension
from realhf.ops.gae import gae_2d_olp, gae_2d_reference
from realhf.ops.intervals import set_intervals, set_intervals_reference, slice_intervals, slice_intervals_reference
from realhf.ops.logprobs import (
    logit_slopes_,
    logit_slopes_reference_,
    logit_stats,
    logit_stats_reference,
    packed_logprobs,
)
from realhf.ops.sampling import sample, sample_reference, uniform, uniform_reference

Actions = dict[str, Callable[[], object]]


def best_seconds(actions: Actions, rounds: int, wait: Callable[[], object]) -> dict[str, float]:
    """Return the minimum time of each action; actions are interleaved, so that disturbances affect all equally."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            wait()
            begin = time.perf_counter()
            action()
            wait()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def show(title: str, actions: Actions, device: torch.device, rounds: int = 20) -> None:
    """Print the times of all actions, absolute and relative to the first."""
    seconds = best_seconds(actions, rounds, torch.cuda.synchronize if device.type == "cuda" else lambda: None)
    first = next(iter(seconds.values()))
    print(title)
    for name, taken in seconds.items():
        print(f"  {name:24} {1e3 * taken:9.3f} ms   {taken / first:8.2f} x")


def bench_intervals(device: torch.device) -> None:
    """Time every second interval of a tensor, 4 KiB to 64 KiB each, against a copy of the same size."""
    for dtype, run_bytes, total in ((torch.float32, 4096, 1 << 26), (torch.bfloat16, 4096, 1 << 22),
                                    (torch.bfloat16, 65536, 1 << 28)):  # fmt: skip
        run, count = run_bytes // dtype.itemsize, total // run_bytes
        spread = torch.ones(2 * run * count, dtype=dtype, device=device)
        packed, copied = torch.ones(run * count, dtype=dtype, device=device), torch.ones(run * count, dtype=dtype)
        copied = copied.to(device)
        begin = torch.arange(count) * 2 * run
        intervals = torch.stack([begin, begin + run], 1)
        arguments = (packed, spread, intervals)
        show(
            f"intervals: {count} runs of {run_bytes} bytes, {dtype}",
            {
                "copy": lambda a=packed, b=copied: b.copy_(a),
                "set_intervals": lambda x=arguments: set_intervals(*x),
                "  torch reference": lambda x=arguments: set_intervals_reference(*x),
                "copy to fresh memory": lambda a=packed: a.clone(),
                "slice_intervals": lambda x=spread, i=intervals: slice_intervals(x, i),
                "  torch reference ": lambda x=spread, i=intervals: slice_intervals_reference(x, i),
            },
            device,
        )


def bench_gae_2d(device: torch.device) -> None:
    rewards, values = torch.randn(256, 4096, device=device), torch.randn(256, 4097, device=device)
    dones = torch.rand(256, 4097, device=device) < 0.01
    truncates = dones & (torch.rand(256, 4097, device=device) < 0.5)
    args = (rewards, values, dones, truncates)
    show(
        "gae_2d: 256 slots of 4096 steps",
        {
            "copy of inputs": lambda: [x.clone() for x in args],
            "gae_2d_olp": lambda: gae_2d_olp(*args, 0.99, 0.95),
            "  torch reference": lambda: gae_2d_reference(*args, 0.99, 0.95, True),
        },
        device,
    )


def whole_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None])[:, 0]


def bench_softmax(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(256, 32000, device=device).to(dtype)
    scratch = [logits.clone() for _ in range(3)]  # overwritten by the kernels
    targets = torch.randint(32000, (256,), device=device)
    args = (targets, *torch.rand(3, 256, device=device), 0.1)
    show(
        f"softmax part of 256 x 32000 logits, {dtype}",
        {
            "logit_stats": lambda: logit_stats(logits, targets, 1.0),
            "  torch reference": lambda: logit_stats_reference(scratch[0], targets, 1.0),
            "  log_softmax, gather": lambda: logits.float().log_softmax(-1).gather(1, targets[:, None]),
            "logit_slopes_": lambda: logit_slopes_(scratch[1], *args),
            "  torch reference ": lambda: logit_slopes_reference_(scratch[2], *args),
        },
        device,
    )


def bench_logprobs(width: int, device: torch.device) -> None:
    """Time log-probabilities, forward alone and with both gradients; matrix products dominate."""
    hidden = torch.randn(2048, width, device=device, requires_grad=True)
    weight = (torch.randn(32000, width, device=device) / width**0.5).requires_grad_()
    targets = torch.randint(32000, (2048,), device=device)

    def forward(logprobs: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return logprobs(hidden, weight, targets)

    def backward(logprobs: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(logprobs(hidden, weight, targets).sum(), (hidden, weight))

    show(
        f"log-probabilities of 2048 tokens, hidden {width}, vocabulary 32000",
        {
            "packed, forward": lambda: forward(packed_logprobs),
            "  all logits": lambda: forward(whole_logprobs),
            "packed, with backward": lambda: backward(packed_logprobs),
            "  all logits ": lambda: backward(whole_logprobs),
        },
        device,
        rounds=5,
    )


def status(key: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def memory_of(packed: bool, width: int, given: bool) -> tuple[int, int]:
    """Return the growth of peak memory, and the bytes of new gradients, in a fresh process.

    ``given``: the gradient of the weight exists already and is accumulated into.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    few, hidden, weight = (torch.randn(rows, width).requires_grad_() for rows in (9, 2048, 32000))
    targets = torch.randint(32000, (2048,))
    add_to = torch.ones(32000, width) if given else None

    def work(x: Tensor, y: Tensor) -> None:
        logprobs = packed_logprobs(x, weight, y, add_to=add_to) if packed else whole_logprobs(x, weight, y)
        logprobs.sum().backward()

    work(few, targets[:9])  # libraries allocate their workspaces
    weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    work(hidden, targets)
    return status("VmHWM") - before, sum(x.grad.nbytes for x in (hidden, weight) if x.grad is not None)


def show_memory() -> None:
    """Print the memory of forward and backward relative to that of all logits in float32."""
    logits = 4 * 2048 * 32000
    print(f"memory, log-probabilities of 2048 tokens, vocabulary 32000: relative to all logits, {logits / 1e6:.0f} MB")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        for width in (64, 512, 2048):
            print(f"  hidden {width}")
            for name, given in (("packed", (True, width, False)), ("  accumulating", (True, width, True)),
                                ("  all logits", (False, width, False))):  # fmt: skip
                grown, gradients = fresh.apply(memory_of, given)
                print(
                    f"    {name:24} {(grown - gradients) / logits:6.3f} and {gradients / logits:.3f} for new gradients"
                )


def bench_sampling(device: torch.device) -> None:
    """Time sampling from logits like those of a language model: a few likely tokens, a long tail."""
    for rows in (1, 8, 64):
        generator = torch.Generator().manual_seed(0)
        logits = (torch.randn(rows, 32000, generator=generator) * 3).to(device)
        u = torch.rand(rows, generator=generator, dtype=torch.float64).to(device)
        counters = torch.arange(rows, device=device)
        actions: Actions = {
            "uniform": lambda c=counters: uniform(1, c, c, c),
            "  torch reference": lambda c=counters: uniform_reference(1, c, c, c),
        }
        for name, options in (("temperature", (0.7,)), ("top-k 50", (0.7, 50)), ("top-p 0.9", (0.7, 0, 0.9)),
                              ("top-k 50, top-p 0.9", (0.7, 50, 0.9)), ("greedy", (0.0,))):  # fmt: skip
            actions[name] = lambda x=logits, u=u, o=options: sample(x, u, *o)
            actions[f"  torch reference, {name}"] = lambda x=logits, u=u, o=options: sample_reference(x, u, *o)
        show(f"sampling {rows} tokens of 32000", actions, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    kernels = [name for name in extension.kernels() if name.endswith(device.type)]
    if not kernels:
        raise SystemExit(f"no compiled kernels for {device.type}: run python setup.py build_ext --inplace")
    print(f"{', '.join(kernels)}; {torch.get_num_threads()} threads")
    torch.manual_seed(0)
    bench_intervals(device)
    bench_gae_2d(device)
    for dtype in (torch.float32, torch.bfloat16):
        bench_softmax(dtype, device)
    for width in (64, 512):
        bench_logprobs(width, device)
    if device.type == "cpu" and Path("/proc/self/clear_refs").exists():
        show_memory()
    bench_sampling(device)


if __name__ == "__main__":
    main()
