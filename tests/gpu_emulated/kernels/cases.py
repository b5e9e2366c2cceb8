"""One check of every CUDA kernel against its reference implementation, for all sizes and dtypes given."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.api.model_config import KERNEL_ACTIVATIONS
from realhf.ops.activations import ACTIVATION_IDS, activate_reference
from realhf.ops.gae import gae_2d_reference, packed_gae_reference
from realhf.ops.intervals import set_intervals_reference, slice_intervals_reference
from realhf.ops.logprobs import logit_slopes_reference_, logit_stats_reference
from realhf.ops.norms import Rotary, rotate_reference
from realhf.ops.sampling import NO_TOKEN, sample_reference, uniform_reference
from tests.gpu_emulated.kernels.library import EmulatedKernels
from tests.ops.test_sampling import reach

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.float16: 5.2e-4, torch.bfloat16: 4.2e-3}
"""Of one rounding of a float32 result, half a unit of the last place: 2 ** -11 and 2 ** -8."""


@dataclass(frozen=True)
class Sizes:
    """What the checks run on; every list has a size below, at and above the size of a warp or of a block."""

    rows: Sequence[Sequence[int]]  # lengths of packed rows
    slots: Sequence[tuple[int, int]]  # slots, steps
    vocabs: Sequence[int]
    sampled_vocabs: Sequence[int]
    spreads: Sequence[float]  # of logits
    copied: Sequence[int]  # elements of a tensor with intervals
    widths: Sequence[int]  # of an MLP
    heads: Sequence[tuple[int, int, int]]  # heads, their dimension, dimensions that rotate
    counters: Sequence[int]


QUICK = Sizes(
    rows=[[], [1], [1, 2, 31, 32, 33, 64, 65], [1025, 1]],
    slots=[(0, 5), (3, 0), (1, 1), (5, 31), (4, 33), (2, 65)],
    vocabs=[1, 31, 512, 513, 1025],
    sampled_vocabs=[1, 31, 1025],
    spreads=[3.0],
    copied=[0, 1, 1023, 40_003],
    widths=[1, 31, 264, 2056],
    heads=[(1, 2, 2), (3, 32, 32), (5, 24, 8), (40, 64, 64), (3, 12, 6), (25, 82, 82)],
    counters=[0, 1, 511, 512, 513, 1025],
)
TINY = Sizes(
    rows=[[1, 33]],
    slots=[(5, 33)],
    vocabs=[1025],
    sampled_vocabs=[1025],
    spreads=[3.0],
    copied=[1023],
    counters=[513],
    widths=[33, 264],
    heads=[(3, 32, 32), (5, 12, 6)],
)
"""For a sanitizer that makes everything a hundred times slower, and for planted errors."""
LARGE = Sizes(
    rows=[*QUICK.rows, [1023, 1024, 1025], [1] * 9, [5000, 3, 4097]],
    slots=[*QUICK.slots, (6, 32), (7, 1025)],
    vocabs=[*QUICK.vocabs, 2, 511, 1023, 1024, 5003, 32_000, 151_937],
    sampled_vocabs=[*QUICK.sampled_vocabs, 2, 511, 512, 513, 1024, 5003],
    spreads=[0.0, 3.0, 30.0],
    copied=[*QUICK.copied, 31, 32_768, 400_003],
    widths=[*QUICK.widths, 8, 255, 256, 257, 2047, 2048, 2049, 18_944],
    heads=[*QUICK.heads, (1, 256, 256), (256, 8, 2), (33, 128, 128), (7, 80, 32)],
    counters=[*QUICK.counters, 5000],
)


def check_packed_gae(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    for lengths in sizes.rows:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
            for gamma, lam in ((0.99, 0.95), (1.0, 1.0), (0.0, 0.5)):
                rewards, values = torch.randn(2, sum(lengths), generator=g, dtype=dtype)
                bootstrap = torch.rand(len(lengths), generator=g) < 0.5
                cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
                results = kernels["packed_gae"](rewards, values, cu_seqlens, bootstrap, gamma, lam)
                expected = packed_gae_reference(rewards.double(), values.double(), lengths, bootstrap, gamma, lam)
                assert_close(results, expected, dtype, tolerance)


def check_gae_2d(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    for n_slots, n_steps in sizes.slots:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
            for overlap in (True, False):
                rewards = torch.randn(n_slots, n_steps, generator=g, dtype=dtype)
                values = torch.randn(n_slots, n_steps + 1, generator=g, dtype=dtype)
                ends, cuts = torch.rand(2, n_slots, n_steps + 1, generator=g) < 0.1
                results = kernels["gae_2d"](rewards, values, ends, cuts, 0.99, 0.95, overlap)
                expected = gae_2d_reference(rewards.double(), values.double(), ends, cuts, 0.99, 0.95, overlap)
                assert_close(results, expected, dtype, tolerance)
    values, ends = torch.randn(1, 41, generator=g), torch.arange(41).expand(1, 41) == 20
    for position in (21, 40):
        changed = values.clone()
        changed[0, position] = torch.nan
        for kernel in (kernels["gae_2d"], gae_2d_reference):
            results, expected = (kernel(torch.ones(1, 40), x, ends, ends, 0.9, 0.9, True) for x in (changed, values))
            assert all(torch.equal(a[:, :20], b[:, :20]) for a, b in zip(results, expected, strict=True))
            assert results[0][:, 20:].isnan().any()


def assert_close(results: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype, tolerance: float) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == dtype and result.shape == wanted.shape
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)


def check_intervals(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    """Gather from and scatter to intervals, also where the tensor is not aligned for wide copies."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        for size in sizes.copied:
            for n_intervals, offset in ((0, 0), (1, 1), (5, 0), (300, 3)):
                whole = torch.randint(0, 100, (size + offset,), generator=g).to(dtype)[offset:]
                bounds = torch.randint(0, size + 1, (2 * n_intervals,), generator=g).sort().values.view(-1, 2)
                packed = slice_intervals_reference(whole, bounds)
                assert torch.equal(kernels["slice_intervals"](whole, bounds), packed)
                result, expected = torch.zeros_like(whole), torch.zeros_like(whole)
                kernels["set_intervals"](packed, result, bounds)
                set_intervals_reference(packed, expected, bounds)
                assert torch.equal(result, expected)


def some_logits(sizes: Sizes, g: torch.Generator) -> Sequence[tuple[Tensor, Tensor]]:
    """Return logits of all dtypes, and targets of which some are outside of the vocabulary."""
    shapes = [(0, 5), *((2, vocab) for vocab in sizes.vocabs)]
    made = []
    for n_rows, vocab in shapes:
        for dtype in FLOATS:
            logits = torch.randn(n_rows, vocab, generator=g) * 4
            logits[:1, :1] = 60.0
            made.append((logits.to(dtype), torch.randint(-2, vocab + 2, (n_rows,), generator=g)))
    last = torch.randn(1, 1025, generator=g).index_fill(1, torch.tensor(1024), 9.0)  # the largest is the last one
    masked = torch.full((1, 7), float("-inf"))
    masked[0, 3] = 2.0
    return [*made, (masked, torch.tensor([3])), (last, torch.tensor([1024]))]


def check_logit_stats(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    for logits, targets in some_logits(sizes, g):
        results = kernels["logit_stats"](logits, targets, 0.7)
        expected = logit_stats_reference(logits.clone(), targets, 0.7)
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=2e-5, atol=1e-5)


def check_logit_slopes(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    for logits, targets in some_logits(sizes, g):
        largest, sums, picked = logit_stats_reference(logits.clone(), targets, 0.7)
        normalisers, grads = largest + sums.log(), torch.randn(len(targets), generator=g)
        given = (targets, normalisers, picked - normalisers, grads, 0.7)
        result, expected = logits.clone(), logits.float()
        kernels["logit_slopes_"](result, *given)
        logit_slopes_reference_(expected, *given)
        rounding = ROUNDING[logits.dtype]
        torch.testing.assert_close(result.float(), expected, rtol=rounding, atol=1e-5)


def check_counter_uniform(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    for size in sizes.counters:
        counters = torch.randint(-(2**63), 2**63 - 1, (3, size), generator=g)
        assert torch.equal(kernels["counter_uniform"](-5, *counters), uniform_reference(-5, *counters))


OPTIONS = ((0.7, 0, 1.0), (1.0, 40, 1.0), (0.7, 0, 0.9123), (1.3, 300, 0.9991), (0.0, 0, 1.0))


def check_sample_tokens(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    for vocab in sizes.sampled_vocabs:
        for spread in sizes.spreads:
            logits = torch.randn(3, vocab, generator=g) * spread
            logits = logits.round() if spread > 10 else logits  # ties
            logits[1, -1] = 5 * spread  # the most likely one is the last one
            u = torch.rand(3, generator=g, dtype=torch.float64)
            for options in OPTIONS:
                check_samples(kernels, logits, u, options, torch.tensor([5, 9, 5]) if vocab > 9 else None)
    for value in (float("nan"), float("inf"), float("-inf")):
        tokens, *logprobs = kernels["sample_tokens"](torch.full((1, 40), value), u[:1], None, None, 1.0, 5, 0.5)
        assert tokens.tolist() == [NO_TOKEN] and all(x.isnan().all() for x in logprobs)
        last = torch.zeros(1, 1025).index_fill(1, torch.tensor(1024), value)
        tokens, *_ = kernels["sample_tokens"](last, u[:1], None, None, 1.0, 0, 1.0)
        assert (tokens.tolist() == [NO_TOKEN]) == (value != float("-inf"))
    certain = torch.zeros(1, 1025).index_fill(1, torch.tensor(1024), 50.0)  # its weight relative to others overflows
    tokens, *logprobs = kernels["sample_tokens"](certain, u[:1], None, None, 1.0, 0, 1.0)
    assert tokens.tolist() == [1024] and all(x.abs() < 1e-5 for x in logprobs)


def check_samples(
    kernels: EmulatedKernels, logits: Tensor, u: Tensor, options: tuple[float, int, float], forbid: Tensor | None
) -> None:
    """Compare samples with the reference, except where ``u`` is within rounding error of two tokens' boundary."""
    rows = torch.arange(len(u)) % 2 == 0
    tokens, logprobs, sampling = kernels["sample_tokens"](logits, u, forbid, rows, *options)
    expected = sample_reference(logits, u, *options, forbid=forbid, forbid_rows=rows)
    banned = torch.zeros_like(logits, dtype=torch.bool)
    if forbid is not None:
        banned[rows] = banned[rows].index_fill(1, forbid, True)
    begin, end = reach(logits, tokens, *options, banned)
    near = 1e-4 if options[2] < 1.0 else 2e-6
    same = tokens == expected[0]
    if options[0] == 0.0:
        assert bool(same.all())
    else:
        assert bool(((begin - near <= u) & (u <= end + near)).all())
        assert bool((same | ~((begin + near < u) & (u < end - near))).all())
    exact = (logits.double() / (options[0] or 1.0)).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sampling[same], expected[2][same], rtol=1e-5, atol=1e-3 if options[2] < 1 else 1e-5)


ACTIVATIONS = tuple((name, gated) for name in KERNEL_ACTIVATIONS for gated in (True, False))


def check_activate(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    for x, _, name, gated in some_activations(sizes, g):
        result = kernels["activate"](x, ACTIVATION_IDS[name], gated)
        expected = activate_reference(x.double(), name, gated)
        assert result.dtype == x.dtype and result.shape == expected.shape
        torch.testing.assert_close(result.double(), expected, rtol=ROUNDING[x.dtype], atol=1e-5)


def check_activate_backward(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    for x, grad, name, gated in some_activations(sizes, g):
        result = kernels["activate_backward"](grad, x, ACTIVATION_IDS[name], gated)
        leaf = x.double().requires_grad_()
        activate_reference(leaf, name, gated).backward(grad.double())
        assert leaf.grad is not None and result.dtype == x.dtype
        torch.testing.assert_close(result.double(), leaf.grad, rtol=ROUNDING[x.dtype], atol=1e-4)


def some_activations(sizes: Sizes, g: torch.Generator) -> Iterator[tuple[Tensor, Tensor, str, bool]]:
    """Yield inputs and gradients of all dtypes, some of them at addresses that are not aligned."""
    for n_rows, width in ((0, 8), *((3, width) for width in sizes.widths)):
        for number, (name, gated) in enumerate(ACTIVATIONS):
            dtype, across = FLOATS[number % len(FLOATS)], width * (1 + gated)
            flat = (torch.randn(n_rows * across + 1, generator=g) * 4).to(dtype)
            flat[:2] = torch.tensor([40.0, -40.0])[: len(flat)]
            x = flat[number // 3 % 2 :][: n_rows * across].view(n_rows, across)
            yield x, torch.randn(n_rows, width, generator=g).to(dtype), name, gated


def check_rotate(kernels: EmulatedKernels, sizes: Sizes, g: torch.Generator) -> None:
    """Also for a part of fused queries, keys and values; the inverse is the gradient."""
    for number, (heads, dim, rotary_dim) in enumerate(sizes.heads):
        for dtype in FLOATS:
            positions, table = torch.tensor([0, 7, 3, 3]), Rotary(rotary_dim, 100.0, {}, "cpu").table(8)
            x = torch.randn(4, heads + number % 2, dim + number % 3 * 4, generator=g).to(dtype)[:, :heads, :dim]
            rows = table[:, positions].double().unsqueeze(2)
            leaf = x.double().requires_grad_()
            expected = rotate_reference(leaf, *rows)
            result = kernels["rotate"](x, table, positions, False)
            assert result.dtype == dtype and result.is_contiguous()
            torch.testing.assert_close(result.double(), expected.detach(), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
            grad = torch.randn(4, heads, dim, generator=g).to(dtype)
            expected.backward(grad.double())
            assert leaf.grad is not None
            found = kernels["rotate"](grad, table, positions, True)
            torch.testing.assert_close(found.double(), leaf.grad, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    empty = kernels["rotate"](
        torch.empty(0, 2, 4), Rotary(4, 100.0, {}, "cpu").table(8), torch.tensor([]).long(), False
    )
    assert empty.shape == (0, 2, 4)


CASES: Mapping[str, Callable[[EmulatedKernels, Sizes, torch.Generator], None]] = {
    "packed_gae": check_packed_gae,
    "gae_2d": check_gae_2d,
    "slice_intervals": check_intervals,
    "set_intervals": check_intervals,
    "logit_stats": check_logit_stats,
    "logit_slopes_": check_logit_slopes,
    "sample_tokens": check_sample_tokens,
    "counter_uniform": check_counter_uniform,
    "activate": check_activate,
    "activate_backward": check_activate_backward,
    "rotate": check_rotate,
}
