"""The kernels of the gated delta rule over packed rows and of its convolution against torch's operations in float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.ops import extension
from realhf.ops.delta.convolution import activated_convolution, causal_convolution
from realhf.ops.delta.delta_rows import DeltaRows
from realhf.ops.delta.gated_delta_rule import gated_delta_rule, mixed_delta_rule
from tests.scaling import examples

pytestmark = pytest.mark.skipif(
    extension.kernel("delta_rule", "cpu") is None, reason="the compiled kernels are not built"
)
CPU = torch.device("cpu")
DTYPES = st.sampled_from((torch.float32, torch.bfloat16))
Rows = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def packed_rows(draw: st.DrawFn) -> Rows:
    """Return lengths, some of several blocks of 64 tokens, and prefixes; a prefix has no prefix itself."""
    lengths = draw(st.lists(st.sampled_from((0, 1, 2, 3, 7, 63, 64, 65, 130)), min_size=1, max_size=5).filter(any))
    is_root = [i == 0 or draw(st.booleans()) for i in range(len(lengths))]
    roots = [i for i, root in enumerate(is_root) if root]
    return tuple(lengths), tuple(-1 if root else draw(st.sampled_from(roots)) for root in is_root)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rule_inputs(rows: Rows, heads: tuple[int, int, int, int], seed: int) -> list[Tensor]:
    """Return mixed projections, log-decays, rates and states for (key heads, values per key, dk, dv)."""
    n_keys, ratio, key_dim, value_dim = heads
    n_tokens, n_values = sum(rows[0]), n_keys * ratio
    mixed = random(seed, n_tokens, 2 * n_keys * key_dim + n_values * value_dim)
    decay = -random(seed + 1, n_tokens, n_values).exp() * (0.02 + 2 * (seed % 3))
    states = random(seed + 3, len(rows[0]), n_values, key_dim, value_dim)
    return [mixed, decay, random(seed + 2, n_tokens, n_values).sigmoid(), states]


def close(mine: Tensor, reference: Tensor, dtype: torch.dtype, rounding: float = 0.0) -> bool:
    """Compare with the largest of the reference: single values of sums may cancel.

    If all values cancel, several times the ``rounding`` error of torch's operations is allowed.
    """
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    scale = max(float(reference.detach().abs().max()), 1e-3) if reference.numel() else 1.0
    return torch.allclose(mine.double(), reference, rtol=0.0, atol=max(tolerance * scale, 4 * rounding))


def rule_by_operations(
    inputs: list[Tensor], heads: tuple[int, int, int, int], layout: DeltaRows, seed: int, starts: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return outputs, last states and gradients of the rule, computed by torch's operations in the type of inputs."""
    n_keys, ratio, key_dim, value_dim = heads
    keys = n_keys * key_dim
    parts = inputs[0].split((keys, keys, n_keys * ratio * value_dim), 1)
    parts = [x.unflatten(1, (-1, size)) for x, size in zip(parts, (key_dim, key_dim, value_dim), strict=True)]
    outputs, ends = gated_delta_rule(*parts, *inputs[1:3], layout, inputs[3] if starts else None)
    return outputs, ends, rule_gradients(outputs, ends, inputs[: 4 if starts else 3], seed)


def rule_gradients(outputs: Tensor, ends: Tensor, inputs: list[Tensor], seed: int) -> tuple[Tensor, ...]:
    weights, of_ends = random(seed + 4, *outputs.shape), random(seed + 5, *ends.shape)
    return torch.autograd.grad((outputs * weights).sum() + (ends * of_ends).sum(), inputs)


@settings(max_examples=examples(40), deadline=None)
@given(packed_rows(), st.integers(1, 2), st.integers(1, 3), st.sampled_from((8, 24)), st.sampled_from((8, 32, 40)),
       st.integers(0, 99), st.booleans(), DTYPES)  # fmt: skip
@example(((1, 0), (-1, 0)), 1, 1, 8, 32, 57, False, torch.float32)  # the gradient of the only rate cancels
def test_the_rule_and_its_gradients_equal_operations(
    rows: Rows, n_keys: int, ratio: int, key_dim: int, value_dim: int, seed: int, starts: bool, dtype: torch.dtype
) -> None:
    heads, layout = (n_keys, ratio, key_dim, value_dim), DeltaRows(*rows, 4, CPU)
    mixed, *others = rule_inputs(rows, heads, seed)
    ours = [x.clone().requires_grad_() for x in (mixed.to(dtype), *others)]
    exact, rounded = ([x.detach().to(kind).requires_grad_() for x in ours] for kind in (torch.double, torch.float))
    outputs, ends = mixed_delta_rule(*ours[:3], (key_dim, value_dim), layout, ours[3] if starts else None)
    expected, last, references = rule_by_operations(exact, heads, layout, seed, starts)
    assert outputs.dtype == torch.float32 and close(outputs, expected, torch.float32)
    assert close(ends, last, torch.float32)
    mine = rule_gradients(outputs, ends, ours[: 4 if starts else 3], seed)
    *_, in_float32 = rule_by_operations(rounded, heads, layout, seed, starts)
    for number, (own, reference, other) in enumerate(zip(mine, references, in_float32, strict=True)):
        rounding = float((other.double() - reference).abs().max()) if other.numel() else 0.0
        assert own.dtype == ours[number].dtype and close(own, reference, own.dtype, rounding)


@settings(max_examples=examples(40), deadline=None)
@given(packed_rows(), st.integers(1, 5), st.sampled_from((8, 64, 72, 136)), st.integers(0, 99), DTYPES)
def test_the_convolution_and_its_gradients_equal_operations(
    rows: Rows, kernel: int, channels: int, seed: int, dtype: torch.dtype
) -> None:
    layout = DeltaRows(*rows, kernel, CPU)
    ours = [x.to(dtype).requires_grad_() for x in (random(seed, sum(rows[0]), channels),
                                                   random(seed + 1, channels, 1, kernel))]  # fmt: skip
    theirs = [x.detach().double().requires_grad_() for x in ours]
    y, tails = activated_convolution(*ours, "silu", layout)
    expected = torch.nn.functional.silu(causal_convolution(*theirs, layout)[0])
    assert tails is None and y.dtype == dtype and close(y, expected, dtype)
    weights = random(seed + 2, *y.shape)
    mine = torch.autograd.grad((y.float() * weights).sum(), ours)
    references = torch.autograd.grad((expected * weights).sum(), theirs)
    assert all(close(own, reference, dtype) for own, reference in zip(mine, references, strict=True))


def all_results(rows: Rows, mixed: Tensor, decay: Tensor, rate: Tensor, weight: Tensor) -> list[Tensor]:
    """Return outputs and gradients of the convolution with the rule behind it."""
    inputs = [x.detach().requires_grad_() for x in (mixed, decay, rate, weight)]
    layout = DeltaRows(*rows, weight.shape[2], CPU)
    y, _ = activated_convolution(inputs[0], inputs[3], "silu", layout)
    outputs, _ = mixed_delta_rule(y, *inputs[1:3], (16, 16), layout)
    return [outputs, *torch.autograd.grad(outputs.sin().sum(), inputs)]


def test_results_do_not_depend_on_threads_or_on_other_rows() -> None:
    rows = (130, 70, 1, 64), (-1, -1, -1, -1)
    mixed, decay, rate, _ = rule_inputs(rows, (2, 2, 16, 16), 5)
    weight = random(6, mixed.shape[1], 1, 4)
    one = all_results(rows, mixed, decay, rate, weight)
    n_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        three = all_results(rows, mixed, decay, rate, weight)
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    damaged = mixed.clone()
    damaged[:130] = torch.nan
    others = all_results(rows, damaged, decay, rate, weight)
    for before, after in zip(one[:4], others[:4], strict=True):  # the weight's gradient is a sum over rows
        assert torch.equal(before[130:], after[130:])


def test_rows_that_continue_a_prefix_equal_whole_rows() -> None:
    n_prefix, lengths = 67, (5, 70)
    mixed, decay, rate, _ = rule_inputs(((n_prefix + sum(lengths),), (-1,)), (1, 2, 16, 16), 7)
    weight, parts = random(8, mixed.shape[1], 1, 4), (n_prefix, *lengths)
    shared = all_results((parts, (-1, 0, 0)), mixed, decay, rate, weight)
    whole = []
    for row in (1, 2):
        pick = lambda x, row=row: torch.cat([x.split(parts)[0], x.split(parts)[row]])
        whole.append(all_results(((n_prefix + parts[row],), (-1,)), pick(mixed), pick(decay), pick(rate), weight))
    for row, results in zip((1, 2), whole, strict=True):
        assert torch.allclose(shared[0].split(parts)[row], results[0][n_prefix:], atol=1e-6)


def test_strong_and_no_decay_stay_finite() -> None:
    mixed, _, rate, _ = rule_inputs(((300,), (-1,)), (1, 2, 8, 8), 1)
    decay = torch.stack((torch.zeros(300), torch.full((300,), -500.0)), 1).requires_grad_()
    outputs, _ = mixed_delta_rule(mixed, decay, rate, (8, 8), DeltaRows((300,), (), 4, CPU))
    (gradient,) = torch.autograd.grad(outputs.sum(), decay)
    assert outputs.isfinite().all() and gradient.isfinite().all()


def test_the_kernels_pass_opcheck_and_refuse_wrong_arguments() -> None:
    rows = torch.tensor([[3, 2], [-1, 0]])
    mixed, decay, rate, states = rule_inputs(((3, 2), (-1, 0)), (1, 2, 8, 16), 1)
    rule, convolution = torch.ops.realhf.delta_rule, torch.ops.realhf.causal_conv_silu
    outputs, ends, blocks = rule(mixed, decay, rate, rows, states, True)
    weight = random(2, mixed.shape[1], 1, 4)
    calls = [
        (rule, (mixed, decay, rate, rows, states, False)),
        (torch.ops.realhf.delta_rule_backward, (outputs, ends, mixed, decay, rate, rows, blocks)),
        (convolution, (mixed, weight, rows)),
        (torch.ops.realhf.causal_conv_silu_backward, (mixed, mixed, weight, rows)),
    ]
    for operator, arguments in calls:
        found = torch.library.opcheck(operator.default, arguments)
        assert set(found.values()) == {"SUCCESS"}, found
    with pytest.raises(RuntimeError, match="row 1 continues 1"):
        rule(mixed, decay, rate, torch.tensor([[3, 2], [-1, 1]]), states, True)
    with pytest.raises(RuntimeError, match=r"mixed must be \[T, "):
        rule(mixed[:4], decay, rate, rows, states, True)
    with pytest.raises(RuntimeError, match=r"weight must be \[C, 1, kernel <= 16\]"):
        convolution(mixed, random(1, mixed.shape[1], 1, 17), rows)
