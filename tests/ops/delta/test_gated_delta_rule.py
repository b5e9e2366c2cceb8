"""The gated delta rule and its convolution, against the recurrence in float64 and against transformers."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from realhf.ops.delta.convolution import causal_convolution, convolution_step
from realhf.ops.delta.delta_rows import DeltaRows
from realhf.ops.delta.gated_delta_rule import delta_step, gated_delta_rule
from tests.scaling import examples

CPU = torch.device("cpu")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs_of(n_tokens: int, heads: tuple[int, int, int, int], seed: int, dtype: torch.dtype) -> Inputs:
    """Return queries, keys, values, log-decays and rates for (key heads, values per key, key and value sizes)."""
    generator = torch.Generator().manual_seed(seed)
    n_keys, ratio, key_dim, value_dim = heads

    def new(*shape: int) -> Tensor:
        return torch.randn(n_tokens, *shape, generator=generator, dtype=dtype)

    decay = -new(n_keys * ratio).exp() * (0.1 + 3 * (seed % 3))
    q, k = new(n_keys, key_dim), new(n_keys, key_dim)
    return q, k, new(n_keys * ratio, value_dim), decay, new(n_keys * ratio).sigmoid()


def recurrence(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of one row and its last state, token by token and head by head, by definition."""
    q, k, v, decay, rate = inputs
    ratio, outputs = v.shape[1] // k.shape[1], []
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q / q.shape[-1] ** 0.5
    for t in range(len(v)):
        heads, new = [], []
        for h in range(v.shape[1]):
            key, old = k[t, h // ratio], state[h] * decay[t, h].exp()
            new.append(old + rate[t, h] * torch.outer(key, v[t, h] - old.T @ key))
            heads.append(new[-1].T @ q[t, h // ratio])
        state = torch.stack(new)
        outputs.append(torch.stack(heads))
    return torch.stack(outputs) if outputs else v, state


def by_row(
    inputs: Inputs, lengths: Sequence[int], parents: Sequence[int], states: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    rows = list(zip(*(x.split(list(lengths)) for x in inputs), strict=True))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: parents[row] >= 0):
        parent = parents[row]
        found[row] = recurrence(rows[row], states[row] if parent < 0 else found[parent][1])
    outputs, ends = zip(*(found[row] for row in range(len(lengths))), strict=True)
    return list(outputs), list(ends)


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return lengths and prefixes; a row that others continue has no prefix itself."""
    lengths = draw(st.lists(st.integers(0, 11), min_size=1, max_size=5).filter(any))
    if draw(st.booleans()):
        return tuple(lengths), ()
    is_root = [i == 0 or draw(st.booleans()) for i in range(len(lengths))]
    roots = [i for i, root in enumerate(is_root) if root]
    return tuple(lengths), tuple(-1 if root else draw(st.sampled_from(roots)) for root in is_root)


HEADS = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))


@settings(max_examples=examples(40), deadline=None)
@given(packed_rows(), HEADS, st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_chunks_equal_the_recurrence_with_gradients(
    rows: tuple[tuple[int, ...], tuple[int, ...]], heads: tuple[int, int, int, int], chunk: int, seed: int, starts: bool
) -> None:
    lengths, prefixes = rows
    inputs = [x.requires_grad_() for x in inputs_of(sum(lengths), heads, seed, torch.float64)]
    shape = len(lengths), heads[0] * heads[1], *heads[2:]
    states = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * float(starts)
    states.requires_grad_()
    layout = DeltaRows(lengths, prefixes, 4, CPU, chunk)
    outputs, ends = gated_delta_rule(*inputs, layout, states if starts else None)
    expected, last = by_row(tuple(inputs), lengths, prefixes or (-1,) * len(lengths), states)
    assert torch.allclose(outputs, torch.cat(expected), atol=1e-9)
    assert torch.allclose(ends, torch.stack(last), atol=1e-9)
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view_as(outputs)
    of = [*inputs, *([states] if starts else [])]
    ours = torch.autograd.grad((outputs * weights).sum() + ends.sin().sum(), of)
    theirs = torch.autograd.grad((torch.cat(expected) * weights).sum() + torch.stack(last).sin().sum(), of)
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, reference, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rule_equals_that_of_transformers(dtype: torch.dtype) -> None:
    lengths = (150, 1, 64, 65)
    inputs = inputs_of(sum(lengths), (2, 2, 16, 24), 1, dtype)
    inputs = (*inputs[:3], inputs[3].float(), inputs[4])
    outputs, ends = gated_delta_rule(*inputs, DeltaRows(lengths, (), 4, CPU))
    assert outputs.dtype == ends.dtype == torch.float32
    for row, output, end in zip(zip(*(x.split(lengths) for x in inputs), strict=True), outputs.split(lengths), ends,
                                strict=True):  # fmt: skip
        q, k, v, g, beta = (x[None] for x in row)
        expected, state = torch_chunk_gated_delta_rule(
            q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert torch.allclose(output.to(dtype), expected[0], atol=1e-5 if dtype == torch.float32 else 1e-2)
        assert state is not None and torch.allclose(end, state[0], atol=1e-4 if dtype == torch.float32 else 1e-2)


def test_long_rows_with_strong_and_no_decay_stay_finite() -> None:
    q, k, v, _, rate = inputs_of(300, (1, 2, 8, 8), 1, torch.float32)
    decay = torch.stack((torch.zeros(300), torch.full((300,), -80.0)), 1).requires_grad_()
    outputs, _ = gated_delta_rule(q, k, v, decay, rate, DeltaRows((300,), (), 4, CPU))
    (gradient,) = torch.autograd.grad(outputs.sum(), decay)
    assert outputs.isfinite().all() and gradient.isfinite().all()


@settings(max_examples=examples(25), deadline=None)
@given(packed_rows(), HEADS, st.integers(0, 99), st.integers(2, 5))
def test_steps_continue_packed_rows(
    rows: tuple[tuple[int, ...], tuple[int, ...]], heads: tuple[int, int, int, int], seed: int, kernel: int
) -> None:
    """A row in two passes equals the row in one, whether the second one is packed or goes token by token."""
    lengths, _ = rows
    longer = tuple(length + 3 for length in lengths)
    inputs = inputs_of(sum(longer), heads, seed, torch.float64)
    channels = torch.randn(sum(longer), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = torch.randn(3, 1, kernel, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    whole, ends = gated_delta_rule(*inputs, DeltaRows(longer, (), kernel, CPU, 4))
    convolved, _ = causal_convolution(channels, weight, DeltaRows(longer, (), kernel, CPU))

    def cut(x: Tensor, last: bool) -> Tensor:
        return torch.cat([row[-3:] if last else row[:-3] for row in x.split(longer)])

    first = DeltaRows(lengths, (), kernel, CPU, 4)
    zeros = channels.new_zeros(len(lengths), kernel - 1, 3)
    _, states = gated_delta_rule(*(cut(x, False) for x in inputs), first)
    _, tails = causal_convolution(cut(channels, False), weight, first, zeros)
    assert tails is not None
    second = DeltaRows((3,) * len(lengths), (), kernel, CPU, 4)
    outputs, found = gated_delta_rule(*(cut(x, True) for x in inputs), second, states)
    assert torch.allclose(outputs, cut(whole, True)) and torch.allclose(found, ends)
    y, _ = causal_convolution(cut(channels, True), weight, second, tails)
    assert torch.allclose(y, cut(convolved, True))
    for step in range(3):
        token = [x.unflatten(0, (-1, 3))[:, step] for x in (cut(x, True) for x in (*inputs, channels))]
        expected = cut(whole, True).unflatten(0, (-1, 3))[:, step]
        assert torch.allclose(delta_step(*token[:5], states), expected)
        expected = cut(convolved, True).unflatten(0, (-1, 3))[:, step]
        assert torch.allclose(convolution_step(token[5], weight, tails), expected, atol=1e-5)  # sums are float32
    assert torch.allclose(states, ends)


@settings(max_examples=examples(40), deadline=None)
@given(packed_rows(), st.integers(1, 5), st.integers(0, 99))
def test_the_convolution_sees_only_its_row_and_prefix(
    rows: tuple[tuple[int, ...], tuple[int, ...]], kernel: int, seed: int
) -> None:
    lengths, prefixes = rows
    x = torch.randn(sum(lengths), 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = torch.randn(2, 1, kernel, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    x.requires_grad_()
    y, _ = causal_convolution(x, weight, DeltaRows(lengths, prefixes, kernel, CPU))
    split, expected = x.split(list(lengths)), []
    for row, own in enumerate(split):
        before = split[prefixes[row]] if prefixes and prefixes[row] >= 0 else own[:0]
        padded = torch.cat((own.new_zeros(kernel - 1, 2), before, own))
        for t in range(len(own)):
            last = padded[len(before) + t : len(before) + t + kernel]
            expected.append((last * weight[:, 0].t()).sum(0))
    assert torch.allclose(y, torch.stack(expected))
    ours, theirs = (torch.autograd.grad(z.sin().sum(), x)[0] for z in (y, torch.stack(expected)))
    assert torch.allclose(ours, theirs)
