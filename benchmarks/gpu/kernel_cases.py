"""Runs small cases of every kernel, for compute-sanitizer: python -m benchmarks.gpu.kernel_cases [--device cuda]

Sizes are around warps, blocks and the widths of vector loads. Every result is compared with the reference
implementation; a difference or a missing kernel ends the program with an error.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from realhf.ops import extension
from realhf.ops.activations import activate, activate_reference
from realhf.ops.gae import gae_2d_nolp, gae_2d_olp, gae_2d_reference, packed_gae, packed_gae_reference
from realhf.ops.intervals import set_intervals, set_intervals_reference, slice_intervals, slice_intervals_reference
from realhf.ops.logprobs import logit_slopes_, logit_slopes_reference_, logit_stats, logit_stats_reference
from realhf.ops.norms import Rotary, rotate, rotate_reference
from realhf.ops.sampling import sample, sample_reference, uniform, uniform_reference

KERNELS = ("packed_gae", "gae_2d", "slice_intervals", "set_intervals", "logit_stats", "logit_slopes_", "sample_tokens",
           "counter_uniform", "activate", "activate_backward")  # fmt: skip
GPU_KERNELS = ("rotate",)  # plain torch on a CPU
SIZES = (1, 31, 32, 33, 1024, 1025)


def gae_cases(device: torch.device) -> Iterator[str]:
    for lengths in ((1,), (1, 31, 33), (1025, 1, 64)):
        rewards, values = torch.randn(2, sum(lengths), device=device)
        bootstrap = torch.arange(len(lengths), device=device) % 2 == 0
        arguments = (rewards, values, lengths, bootstrap, 0.99, 0.95)
        torch.testing.assert_close(packed_gae(*arguments), packed_gae_reference(*arguments), rtol=1e-4, atol=1e-4)
        yield f"packed_gae of {lengths}"
    for rows, steps, overlap in product((1, 33), (1, 65), (True, False)):
        rewards, values = torch.randn(rows, steps, device=device), torch.randn(rows, steps + 1, device=device)
        ends = torch.rand(rows, steps + 1, device=device) < 0.2
        cut = ends & (torch.rand(rows, steps + 1, device=device) < 0.5)
        result = (gae_2d_olp if overlap else gae_2d_nolp)(rewards, values, ends, cut, 0.99, 0.95)
        expected = gae_2d_reference(rewards, values, ends, cut, 0.99, 0.95, overlap)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        yield f"gae_2d of {rows} x {steps}"


def interval_cases(device: torch.device) -> Iterator[str]:
    for dtype, size in product((torch.uint8, torch.bfloat16, torch.float32, torch.int64), SIZES):
        whole = torch.arange(3 * size + 5, device=device).to(dtype)
        intervals = torch.tensor([[0, size], [size + 1, size + 1], [size + 3, 2 * size + 2]])
        part = slice_intervals(whole, intervals)
        assert torch.equal(part, slice_intervals_reference(whole, intervals))
        target, expected = torch.zeros_like(whole), torch.zeros_like(whole)
        set_intervals(part, target, intervals)
        set_intervals_reference(part, expected, intervals)
        assert torch.equal(target, expected)
        yield f"intervals of {size} {dtype}"


def logit_cases(device: torch.device) -> Iterator[str]:
    for dtype, size in product((torch.float32, torch.bfloat16), SIZES):
        logits = torch.randn(3, size, device=device).to(dtype)
        targets = torch.tensor([0, size - 1, size], device=device)  # the last belongs to another shard
        expected = logit_stats_reference(logits.clone(), targets, 0.7)
        torch.testing.assert_close(logit_stats(logits.clone(), targets, 0.7), expected, rtol=1e-4, atol=1e-4)
        normalisers = expected[0] + expected[1].log()
        rest = (targets, normalisers, expected[2] - normalisers, torch.rand(3, device=device), 0.7)
        slopes = logit_slopes_(logits.clone(), *rest).float()
        reference = logit_slopes_reference_(logits.float(), *rest)
        torch.testing.assert_close(slopes, reference, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
        yield f"log-probabilities of {size} {dtype}"


def sampling_cases(device: torch.device) -> Iterator[str]:
    options = {
        "temperature": (0.7,),
        "top-k": (0.7, 5),
        "top-p": (0.7, 0, 0.9),
        "both": (0.7, 5, 0.9),
        "greedy": (0.0,),
    }
    for rows, size in product((1, 5), SIZES):
        counters = torch.arange(rows, device=device)
        u = uniform(1, counters, counters, counters)
        torch.testing.assert_close(u, uniform_reference(1, counters, counters, counters), rtol=0, atol=0)
        logits = torch.randn(rows, size, device=device) * 3
        for name, some in options.items():
            tokens, *_ = sample(logits, u, *some)
            reference, *_ = sample_reference(logits, u, *some)
            assert torch.equal(tokens, reference), (name, rows, size, tokens, reference)
            yield f"{name} sampling of {rows} x {size}"


def block_cases(device: torch.device) -> Iterator[str]:
    """Activations and rotations of a decoder block, with their gradients."""
    for dtype, size, gated in product((torch.float32, torch.bfloat16), SIZES, (True, False)):
        x = torch.randn(5, size * (1 + gated), device=device).to(dtype)
        options = {"activation": "silu", "gated": gated}
        compare(partial(activate, **options), partial(activate_reference, **options), x)
        yield f"silu of 5 x {size} {dtype}"
    for dtype, heads, dims in product((torch.float32, torch.bfloat16), (1, 33), ((32, 32), (24, 8))):
        angles, positions = Rotary(dims[1], 1e4, {}, device).table(9), torch.tensor([0, 8, 3], device=device)
        rows = angles[:, positions].unsqueeze(2)
        ours = partial(rotate, angles=angles, positions=positions, rows=partial(rows.to, dtype))
        x = torch.randn(3, heads, dims[0], device=device).to(dtype)
        compare(ours, partial(rotate_reference, cos=rows[0].double(), sin=rows[1].double()), x)
        yield f"rotation of {heads} heads {dtype}"


def compare(ours: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare results and gradients, the reference implementation's in float64."""
    found, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    results = ours(found), reference(exact)
    for result in results:
        result.backward(torch.ones_like(result))
    assert found.grad is not None and exact.grad is not None
    for mine, other in ((results[0], results[1]), (found.grad, exact.grad)):
        torch.testing.assert_close(mine.double(), other, rtol=2e-2, atol=2e-2 if x.dtype == torch.bfloat16 else 1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    kernels = KERNELS + (GPU_KERNELS if device.type == "cuda" else ())
    if missing := [name for name in kernels if extension.kernel(name, device.type) is None]:
        raise SystemExit(f"not compiled for {device.type}: {', '.join(missing)}; run make gpu-1 first")
    torch.manual_seed(0)
    groups = (gae_cases, interval_cases, logit_cases, sampling_cases, block_cases)
    n_cases = sum(1 for cases in groups for _ in cases(device))
    print(f"{n_cases} cases of {len(kernels)} kernels on {device}")


if __name__ == "__main__":
    main()
