"""The layout for torch's variable-length attention, and the kernel if there is a GPU."""

from collections.abc import Callable
from inspect import signature

import pytest
import torch
from torch import Tensor

from realhf.ops import varlen
from realhf.ops.attention import ScoreParams, rotary_attention, rotary_attention_reference
from realhf.ops.norms import Rotary
from realhf.ops.rows import RowLayout

CPU = torch.device("cpu")
CASES = [
    ((5, 1, 3), ()),
    ((4, 3, 2, 6), (-1, 0, 0, -1)),
    ((2, 7, 3, 1), (1, -1, 1, 1)),  # a row may precede its prefix
    ((3, 0, 4), (-1, 0, 0)),
]


def by_row(q: Tensor, k: Tensor, v: Tensor, layout: tuple, scale: float, window: tuple[int, int]) -> Tensor:
    """Compute torch's documented semantics: each row by itself, its last query at its last key, windows to the left."""
    cu_q, cu_k, max_q, max_k = layout
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32) and window[1] == 0
    outs = []
    for row in range(len(cu_q) - 1):
        some_q, keys = q[cu_q[row] : cu_q[row + 1]], slice(int(cu_k[row]), int(cu_k[row + 1]))
        assert len(some_q) <= max_q and keys.stop - keys.start <= max_k
        groups = q.shape[1] // k.shape[1]
        some_k, some_v = (x[keys].repeat_interleave(groups, 1) for x in (k, v))
        at = torch.arange(len(some_q))[:, None] + len(some_k) - len(some_q)
        behind = at - torch.arange(len(some_k))
        hidden = behind < 0 if window[0] < 0 else (behind < 0) | (behind > window[0])
        scores = (torch.einsum("ihd,jhd->hij", some_q, some_k) * scale).masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), some_v))
    return torch.cat(outs)


def torch_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: object = None,
) -> Tensor:  # fmt: skip
    """The signature of torch 2.10."""
    assert is_causal and query.shape[1] == key.shape[1]
    return by_row(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), query.shape[-1] ** -0.5, (-1, 0))


def torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """The signature of torch 2.11."""
    assert scale is not None and query.shape[1] == key.shape[1]
    return by_row(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, window_size)


def torch_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """The signature of torch 2.12 and 2.13."""
    assert scale is not None and enable_gqa == (query.shape[1] != key.shape[1]) and seqused_k is None
    return by_row(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, window_size)


def kernel_of(function: Callable[..., Tensor]) -> varlen.VarlenKernel:
    return varlen.VarlenKernel(function.__name__, function, frozenset(signature(function).parameters))


@pytest.mark.parametrize("lengths, prefixes", CASES)
@pytest.mark.parametrize("function", [torch_2_10, torch_2_11, torch_2_12])
@pytest.mark.parametrize("scale", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_every_version_of_the_kernel_matches_the_reference(
    lengths: tuple[int, ...], prefixes: tuple[int, ...], function: Callable[..., Tensor], scale: float, window: int
) -> None:
    kernel = kernel_of(function)
    if not kernel.accepts(8, 0.0, window):
        assert function is torch_2_10 and window
        return
    torch.manual_seed(0)
    leaves = [torch.randn(sum(lengths), heads, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    rule = ScoreParams(scale, window)
    layout = RowLayout(lengths, prefixes, CPU)
    found = varlen.varlen_attention(kernel, *leaves, layout, rule.scale_for(8), rule.rule)
    expected = rotary_attention_reference(torch.cat(leaves, 1), 4, 2, lengths, rule, prefixes)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), leaves) for out in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("head_dim, fits", [(8, True), (12, False), (256, True), (264, False)])
def test_head_dimensions_of_flash_attention(head_dim: int, fits: bool) -> None:
    assert kernel_of(torch_2_12).accepts(head_dim, 0.0, 0) == fits


def test_the_installed_kernel_has_a_known_signature() -> None:
    kernel = varlen._load(*varlen.SOURCES[-1])
    if kernel is None:
        pytest.skip(f"torch {torch.__version__} has no varlen attention")
    known = (frozenset(signature(function).parameters) for function in (torch_2_10, torch_2_11, torch_2_12))
    assert any(parameters <= kernel.parameters for parameters in known)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lengths, prefixes", [((130, 7, 64), ()), *CASES[1:]])
@pytest.mark.parametrize("source", varlen.SOURCES, ids=lambda source: source[0])
@pytest.mark.parametrize("rule", [ScoreParams(), ScoreParams(window=3), ScoreParams(softcap=5.0)])
def test_the_kernel_matches_the_reference(
    lengths: tuple[int, ...], prefixes: tuple[int, ...], source: tuple, rule: ScoreParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    installed = [kernel for kernel in varlen.kernels() if kernel.module == source[0]]
    monkeypatch.setattr(varlen, "kernels", lambda: installed)
    if varlen.kernel_for(torch.device("cuda"), torch.bfloat16, 64, [rule.rule]) is None:
        pytest.skip(f"{source[0]} is not installed, or does not support {rule} on this GPU")
    torch.manual_seed(0)
    exact = torch.randn(sum(lengths), 8 + 2 + 2, 64, device="cuda")
    angles = Rotary(64, 1e4, {}, "cuda").table(256)
    found, expected = [], []
    for dtype, fn, into in ((torch.bfloat16, rotary_attention, found), (None, rotary_attention_reference, expected)):
        leaf = exact.to(dtype or torch.float32).requires_grad_()
        out = fn(leaf, 8, 2, lengths, rule, prefixes, angles)
        into += [out.float(), *torch.autograd.grad(out.float().square().sum(), [leaf])]
    for mine, other in zip(found, expected, strict=True):
        assert float((mine.float() - other).norm() / other.norm()) < 1e-2
