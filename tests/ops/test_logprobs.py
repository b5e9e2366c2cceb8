"""Chunked log-probabilities against log_softmax over all logits."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realhf.ops import extension
from realhf.ops.logprobs import (
    KEPT_LOGITS,
    VocabShard,
    logit_slopes_,
    logit_slopes_reference_,
    logit_stats,
    logit_stats_reference,
    packed_logprobs,
)
from tests.scaling import examples


def problem(count: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(count * 31 + vocab)
    hidden = torch.randn(count, 6).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 6).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (count,))


def all_at_once(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, t: float, softcap: float = 0.0
) -> torch.Tensor:
    logits = (hidden @ weight.t()).float()
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    return torch.log_softmax(logits / t, -1).gather(1, targets[:, None])[:, 0]


@settings(max_examples=examples(40))
@given(
    st.integers(0, 20),
    st.integers(1, 30),
    st.tuples(st.integers(1, 8), st.integers(1, 31)),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0.0, 3.0]),
    st.integers(0, 20),
)
@example(14, 5, (2, 5), 0.5, 0.0, 0)  # a probability close to 1 whose recomputed logits differ in the last bits
def test_values_and_gradients_are_exact(
    count: int, vocab: int, tile: tuple[int, int], temperature: float, softcap: float, kept: int
) -> None:
    """Also where the logits of some tokens are ``kept`` for the backward pass, and others are computed again."""
    hidden, weight, targets = problem(count, vocab)
    slopes = torch.randn(count) * (torch.rand(count) < 0.6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KEPT_LOGITS, "cpu", kept * vocab)
        ours = packed_logprobs(hidden, weight, targets, temperature, softcap, tile=tile)
    theirs = all_at_once(hidden, weight, targets, temperature, softcap)
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, theirs, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad((ours * slopes).sum(), (hidden, weight)),
        torch.autograd.grad((theirs * slopes).sum(), (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = problem(4, 7)
    assert torch.allclose(
        packed_logprobs(hidden * 1e3, weight, targets), all_at_once(hidden * 1e3, weight, targets, 1.0), rtol=1e-5
    )


def test_only_required_gradients_are_computed() -> None:
    hidden, weight, targets = problem(5, 7)
    packed_logprobs(hidden, weight.detach(), targets).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    packed_logprobs(hidden.detach(), weight, targets).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weight_is_added_to_a_buffer(dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(12, 9, dtype)
    (expected,) = torch.autograd.grad(packed_logprobs(hidden, weight, targets).sum(), weight)
    total = torch.ones(weight.shape)
    packed_logprobs(hidden, weight, targets, tile=(5, 4), add_to=total).sum().backward()
    assert weight.grad is None and hidden.grad is not None
    assert torch.allclose(total - 1, expected.float(), atol=1e-5 if dtype == torch.float32 else 0.1)


def test_16_bit_inputs_have_16_bit_gradients() -> None:
    hidden, weight, targets = problem(12, 9, torch.bfloat16)
    ours = packed_logprobs(hidden, weight, targets, tile=(5, 4))
    theirs = all_at_once(hidden, weight, targets, 1.0)
    assert torch.allclose(ours, theirs, atol=1e-5)
    grads = torch.autograd.grad(ours.sum(), (hidden, weight))
    for a, b in zip(grads, torch.autograd.grad(theirs.sum(), (hidden, weight)), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.allclose(a, b, atol=0.1)


def test_a_temperature_of_zero_is_an_error() -> None:
    hidden, weight, targets = problem(2, 3)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        packed_logprobs(hidden, weight, targets, temperature=0)


def test_targets_outside_the_vocabulary_are_errors() -> None:
    hidden, weight, targets = problem(3, 5)
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=f"target {wrong} is outside the vocabulary of 5 tokens"):
            packed_logprobs(hidden, weight, targets.index_fill(0, torch.tensor([1]), wrong))


class TwoWorkers:
    """Two workers as threads, each with a vocabulary shard; reductions wait for both."""

    def __init__(self, widths: tuple[int, int]) -> None:
        self.widths, self.barrier = widths, threading.Barrier(2)
        self.given: dict[int, torch.Tensor] = {}

    def shard(self, rank: int) -> VocabShard:
        def reduce(x: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
            self.given[rank] = x.clone()
            self.barrier.wait()
            x.copy_(combine(self.given[0], self.given[1]))
            self.barrier.wait()
            return x

        start = sum(self.widths[:rank])
        return VocabShard(start, self.widths, lambda x: reduce(x, torch.add), lambda x: reduce(x, torch.maximum))

    def run(self, work: Callable[[int], tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        """Return the results of both workers."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, (0, 1), timeout=60))


@pytest.mark.parametrize("widths", [(5, 4), (1, 8)])
def test_vocabulary_shards_match_the_whole_vocabulary(widths: tuple[int, int]) -> None:
    hidden, weight, targets = problem(11, 9)
    slopes = torch.randn(11)
    parts = TwoWorkers(widths)

    def work(rank: int) -> tuple[torch.Tensor, ...]:
        x, w = hidden.detach().requires_grad_(), weight.detach().split(widths)[rank].requires_grad_()
        logps = packed_logprobs(x, w, targets, 0.7, tile=(4, 3), shard=parts.shard(rank))
        return logps.detach(), *torch.autograd.grad((logps * slopes).sum(), (x, w))

    results = parts.run(work)
    whole = all_at_once(hidden, weight, targets, 0.7)
    of_hidden, of_weight = torch.autograd.grad((whole * slopes).sum(), (hidden, weight))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][0], whole, atol=1e-5)
    assert torch.allclose(results[0][1] + results[1][1], of_hidden, atol=1e-5)
    assert torch.allclose(torch.cat([results[0][2], results[1][2]]), of_weight, atol=1e-5)


def peak_growth(width: int, statement: str) -> int:
    """Return the growth in bytes of a new process's peak memory in ``statement``, without new gradients."""
    setting = (
        "import torch\n"
        "from realhf.ops.logprobs import packed_logprobs\n"
        "torch.manual_seed(0)\n"
        f"few, hidden, weight = (torch.randn(rows, {width}, requires_grad=True) for rows in (9, 2048, 32000))\n"
        "targets = torch.randint(32000, (2048,))\n"
        "packed_logprobs(few, weight, targets[:9]).sum().backward()\n"
        "weight.grad = None\n"
        "peak = lambda: 1024 * int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # resets the peak
        "before = peak()\n"
    )
    made = "sum(x.grad.nbytes for x in (hidden, weight) if x.grad is not None)"
    command = [sys.executable, "-c", f"{setting}{statement}\nprint(peak() - before - {made})"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak memory of a process")
@pytest.mark.parametrize("width", [8, 512])
def test_memory_is_at_most_an_eighth_of_all_logits(width: int) -> None:
    all_logits = 2048 * 32000 * 4
    assert peak_growth(width, "(hidden @ weight.t()).sum()") >= 0.9 * all_logits  # validates the measurement
    assert peak_growth(width, "packed_logprobs(hidden, weight, targets).sum().backward()") <= all_logits / 8


def chunk(count: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return logits, targets (some of other shards), normalisers of a larger vocabulary, logprobs and gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(count, vocab, generator=generator) * 4).to(dtype)
    targets = torch.randint(-2, vocab + 2, (count,), generator=generator)
    normalisers = logits.float().logsumexp(-1) + torch.rand(count, generator=generator)
    logprobs, grads = torch.randn(2, count, generator=generator)
    return logits, targets, normalisers, -logprobs.abs(), grads


@settings(max_examples=examples(40))
@given(
    st.integers(0, 5),
    st.integers(1, 2100),
    st.sampled_from([0.25, 1.0]),
    st.sampled_from([(torch.float32, 1e-6), (torch.bfloat16, 4e-3)]),
    st.integers(0, 2**31),
)
def test_both_kernels_match_their_references(
    count: int, vocab: int, scale: float, precision: tuple[torch.dtype, float], seed: int
) -> None:
    dtype, tolerance = precision
    logits, *rest = chunk(count, vocab, dtype, seed)
    targets = rest[0]
    for a, b in zip(
        logit_stats(logits.clone(), targets, scale), logit_stats_reference(logits.clone(), targets, scale), strict=True
    ):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-6)
    result = logit_slopes_(logits.clone(), *rest, scale)
    expected = logit_slopes_reference_(logits.clone().float(), *rest, scale)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=max(tolerance, 3e-6), atol=1e-6)


def test_extreme_logits_are_exact_or_nan() -> None:
    infinity = float("inf")
    logits = torch.tensor([[-infinity, 0.0, -200.0, 3e38], [-infinity, 1.0, -80.0, 1.0], [0.0, float("nan"), 0.0, 0.0]])
    largest, sums, picked = logit_stats(logits, torch.tensor([0, 2, 0]), 1.0)
    assert largest[:2].tolist() == pytest.approx([3e38, 1.0]) and picked.tolist() == [-infinity, -80.0, 0.0]
    assert sums[:2].tolist() == [1.0, 2.0] and sums[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    logits, *rest = chunk(70, 1003, dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append((*logit_stats(logits.clone(), rest[0], 0.5), logit_slopes_(logits.clone(), *rest, 0.5)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_kernels_pass_opcheck_and_reject_invalid_arguments() -> None:
    stats, slopes = extension.kernel("logit_stats", "cpu"), extension.kernel("logit_slopes_", "cpu")
    if stats is None or slopes is None:
        pytest.skip("NATIVE KERNELS NOT BUILT")
    logits, targets, normalisers, logprobs, grads = chunk(3, 20, torch.float32)
    torch.library.opcheck(stats, (logits, targets, 0.5))
    torch.library.opcheck(slopes, (logits.clone(), targets, normalisers, logprobs, grads, 0.5))
    with pytest.raises(RuntimeError, match="must be float32 or bfloat16"):
        stats(logits.double(), targets, 1.0)
    with pytest.raises(RuntimeError, match=r"targets must be \[3\] int64"):
        stats(logits, targets[:2], 1.0)
    with pytest.raises(RuntimeError, match="contiguous"):
        slopes(logits.t(), targets, normalisers, logprobs, grads, 1.0)
    with pytest.raises(RuntimeError, match=r"must be \[3\] float32"):
        slopes(logits, targets, normalisers, logprobs.double(), grads, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_cuda_matches_the_cpu_reference(dtype: torch.dtype, tolerance: float) -> None:
    logits, *rest = chunk(9, 1501, dtype)
    targets = rest[0]
    result = logit_stats(logits.cuda(), targets.cuda(), 0.7)
    for a, b in zip(result, logit_stats_reference(logits.clone(), targets, 0.7), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
    slopes = logit_slopes_(logits.cuda(), *(x.cuda() for x in rest), 0.7)
    expected = logit_slopes_reference_(logits.clone().float(), *rest, 0.7)
    torch.testing.assert_close(slopes.cpu().float(), expected, rtol=tolerance, atol=1e-5)
