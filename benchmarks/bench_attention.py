"""Times packed attention and AdamW against torch's implementations: python benchmarks/bench_attention.py

Forward and backward of attention: our kernel, its reference implementation in torch, ``scaled_dot_product_attention``
row by row and once over all rows with a block mask. Every 8 rows share a prompt, which the kernel can compute once.
``--threads 1 2`` runs everything with each number of threads. On a shared machine only ratios are meaningful.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from bench_kernels import show
from torch import Tensor

from realhf.ops import extension
from realhf.ops.adamw import AdamWStep, adamw_
from realhf.ops.attention import rotary_attention, rotary_attention_reference

CPU = torch.device("cpu")
SHAPES = ((4, 4, 32), (8, 2, 64))
"""Heads, key/value heads, head size: hidden 128 and hidden 512."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], prefixes: Sequence[int] = ()) -> Tensor:
    qkv = torch.cat((q, k, v), 1)
    return rotary_attention(qkv, q.shape[1], k.shape[1], lengths, prefixes=prefixes)


def packed_attention_reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    return rotary_attention_reference(torch.cat((q, k, v), 1), q.shape[1], k.shape[1], lengths)


def by_rows(lengths: list[int]) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True)
        gqa = q.shape[1] != k.shape[1]
        outs = [F.scaled_dot_product_attention(*(x[None] for x in row), is_causal=True, enable_gqa=gqa)
                for row in parts]  # fmt: skip
        return torch.cat(outs, 2)[0].transpose(0, 1)

    return attend


def by_mask(lengths: list[int]) -> Attention:
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = (row[:, None] == row) & torch.ones(len(row), len(row), dtype=torch.bool).tril()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])[0].transpose(
            0, 1
        )

    return attend


def action(attend: Attention, n_tokens: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that computes the output and the gradients of q, k and v."""
    heads, kv_heads, dim = shape
    fused = torch.randn(n_tokens, heads + 2 * kv_heads, dim).to(dtype).requires_grad_()
    slope = torch.randn(n_tokens, heads, dim).to(dtype)
    q, k, v = fused.split((heads, kv_heads, kv_heads), 1)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def run() -> object:
        return torch.autograd.grad(attend(*leaves), leaves, slope)

    return run


def bench_rows(title: str, lengths: list[int], prompts: list[int], dtype: torch.dtype) -> None:
    """Time all variants; ``prompts`` are the lengths of prompts shared by 8 rows each (empty: none are shared)."""
    for shape in SHAPES:
        total = sum(lengths)
        actions = {
            "packed_attention": action(lambda q, k, v: packed_attention(q, k, v, lengths), total, shape, dtype),
            "  torch reference": action(
                lambda q, k, v: packed_attention_reference(q, k, v, lengths), total, shape, dtype
            ),
            "SDPA row by row": action(by_rows(lengths), total, shape, dtype),
            "SDPA with a block mask": action(by_mask(lengths), total, shape, dtype),
        }
        if prompts:
            lengths_shared = [*prompts, *(length - prompts[i // 8] for i, length in enumerate(lengths))]
            prefixes = [-1] * len(prompts) + [i // 8 for i in range(len(lengths))]
            actions["prompts shared"] = action(
                lambda q, k, v, s=lengths_shared, p=prefixes: packed_attention(q, k, v, s, prefixes=p),
                sum(lengths_shared),
                shape,
                dtype,
            )
        show(f"{title}, {shape[0]} heads, {shape[1]} kv, size {shape[2]}, {dtype}", actions, CPU, rounds=12)


def bench_adamw(size: int) -> None:
    """Time a step on ``size`` parameters, alone and with clipping and bfloat16 weights."""
    state = [torch.randn(size) for _ in range(4)]
    state[3].abs_()
    weights = state[0].bfloat16()
    master, grad, first, second = state
    step = AdamWStep(3, 1e-4, 0.9, 0.95, 1e-8, 0.1, size)
    clipped = AdamWStep(3, 1e-4, 0.9, 0.95, 1e-8, 0.1, size, scale=1 - 1e-6)
    count = torch.tensor(3.0)

    def fused() -> None:
        torch._fused_adamw_(
            [master], [grad], [first], [second], [], [count],
            lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def clipped_and_rounded() -> None:
        grad.mul_(1 - 1e-6)
        fused()
        weights.copy_(master)

    show(
        f"AdamW, {size} parameters",
        {
            "torch's fused step": fused,
            "adamw_": lambda: adamw_(master, grad, first, second, step),
            "torch, clipped, rounded": clipped_and_rounded,
            "adamw_, clipped, rounded": lambda: adamw_(master, grad, first, second, clipped, weights),
        },
        CPU,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    threads = parser.parse_args().threads
    if extension.kernel("packed_attention", "cpu") is None:
        raise SystemExit("no compiled kernels: run python setup.py build_ext --inplace")
    torch.manual_seed(0)
    prompts = [31, 42]
    short = [prompts[i // 8] + 2 + 3 * i for i in range(16)]
    assert min(short) > 30 and max(accumulate(short, max)) <= 100
    for count in threads:
        torch.set_num_threads(count)
        print(f"--- {count} threads")
        for dtype in (torch.float32, torch.bfloat16):
            bench_rows("16 rows of 33-89 tokens", short, prompts, dtype)
            bench_rows("2 rows of 1024 tokens", [1024, 1024], [], dtype)
        for size in (1 << 20, 25_000_000):
            bench_adamw(size)


if __name__ == "__main__":
    main()
