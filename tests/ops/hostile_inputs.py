"""Calls every CPU operator of a compiled library with random inputs, valid and invalid; run by test_sanitizers.py.

Prints, by operator, the numbers of accepted and refused calls and a digest of the results. Imports nothing of realhf:
its own library would register the same operators.
"""

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WIDTHS = (1, 3, 15, 16, 17, 33)
COUNTS = (0, 1, 2, 3, 7, 19)
ODD_FLOATS = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-45, 3e38, -3e38)
ODD_INTS = (-1, 0, 1, 2, 3, 40, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)


class Inputs:
    """Random arguments. Tensors start at any element of their storage, with NaN and infinity among their values."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(40))

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def placed(self, values: Tensor, dense: bool = True) -> Tensor:
        """Return a copy at a random offset; if not ``dense``, with gaps between the elements."""
        step, offset = (1 if dense else 2), self.pick(0, 1, 2, 3)
        storage = torch.zeros(offset + values.numel() * step, dtype=values.dtype)
        view = storage[offset:][::step].view(values.shape) if dense or values.dim() < 2 else None
        if view is None:
            view = storage[offset : offset + values.numel()].view(values.shape[::-1])
            view = view.permute(*reversed(range(values.dim())))
        return view.copy_(values)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.randn(shape, generator=self.generator)
        if values.numel() and self.random.random() < 0.4:
            for _ in range(self.pick(1, 3, 50)):
                values.view(-1)[self.random.randrange(values.numel())] = self.pick(*ODD_FLOATS)
        return self.placed(values.to(dtype))

    def ints(self, count: int, low: int, high: int) -> Tensor:
        """Return integers from ``low`` to ``high - 1``."""
        return self.placed(torch.tensor([self.random.randrange(low, high) for _ in range(count)], dtype=torch.int64))

    def bytes(self, *shape: int) -> Tensor:
        return self.placed(torch.randint(-128, 128, shape, generator=self.generator).to(torch.int8))

    def bools(self, *shape: int) -> Tensor:
        return self.placed(torch.rand(shape, generator=self.generator) < 0.5)

    def cuts(self, total: int, n: int) -> list[int]:
        return sorted(self.random.randrange(total + 1) for _ in range(n))

    def broken(self, value: Any) -> Any:
        """Return an argument that is probably invalid in place of ``value``."""
        match value:
            case Tensor():
                return self._broken_tensor(value)
            case bool():
                return not value
            case int():
                return self.pick(*ODD_INTS)
            case float():
                return self.pick(*ODD_FLOATS, 1e300)
            case list() if value and self.pick(True, False):
                index = self.random.randrange(len(value))
                return [*value[:index], self.broken(value[index]), *value[index + 1 :]]
            case list():
                return self.pick(value[:-1], value + value[-1:], [])
        return self.floats(3)

    def _broken_tensor(self, value: Tensor) -> Tensor:
        match self.random.randrange(6):
            case 0:
                return value.to(self.pick(*TYPES))
            case 1 if value.dim():
                dim = self.random.randrange(value.dim())
                return value.narrow(dim, 0, self.random.randrange(value.shape[dim] + 1))
            case 2:
                return self.pick(value.flatten(), value.unsqueeze(0), value.new_empty(0), value.sum())
            case 3 if value.numel():
                changed = value.clone(memory_format=torch.contiguous_format)
                odd = ODD_FLOATS if value.is_floating_point() else ODD_INTS if value.dtype == torch.int64 else (0, 1)
                changed.view(-1)[self.random.randrange(value.numel())] = self.pick(*odd)
                return changed
            case 4 if value.dim():
                return torch.cat((value, value), self.random.randrange(value.dim()))
        return self.placed(value, dense=False)


def activate(inputs: Inputs) -> list[Any]:
    gated = inputs.pick(True, False)
    dtype = inputs.pick(torch.float32, torch.bfloat16)
    return [inputs.floats(inputs.pick(*COUNTS), inputs.pick(*WIDTHS) * (1 + gated), dtype=dtype),
            inputs.pick(0, 1, 2), gated]  # fmt: skip


def activate_backward(inputs: Inputs) -> list[Any]:
    x, activation, gated = activate(inputs)
    return [inputs.floats(len(x), x.shape[1] // (1 + gated), dtype=x.dtype), x, activation, gated]


def adamw_(inputs: Inputs) -> list[Any]:
    n = inputs.pick(*COUNTS, *WIDTHS, 1025)
    rounded = inputs.pick(None, inputs.floats(n, dtype=torch.bfloat16))
    return [*(inputs.floats(n) for _ in range(4)), rounded, inputs.random.randrange(n + 1), 1e-3, 0.9, 0.95, 1e-8, 0.1,
            inputs.pick(1, 9), 0.5]  # fmt: skip


def rms_norm(inputs: Inputs) -> list[Any]:
    width = inputs.pick(*WIDTHS)
    return [inputs.floats(inputs.pick(*COUNTS, 300), width), inputs.floats(width), 1e-5]


def rms_norm_backward(inputs: Inputs) -> list[Any]:
    x, weight, eps = rms_norm(inputs)
    return [inputs.floats(*x.shape), x, weight, eps]


def attention_rows(inputs: Inputs) -> tuple[int, Tensor]:
    """Return the number of tokens, and lengths and prefixes of rows, ``[2, B]``."""
    n = inputs.pick(0, 1, 2, 5)
    lengths = [inputs.pick(0, 1, 2, 17, 65, 140) for _ in range(n)]
    prefixes = [-1 if i == 0 or inputs.pick(True, False) else 0 for i in range(n)]
    return sum(lengths), inputs.placed(torch.tensor([lengths, prefixes], dtype=torch.int64))


def packed_attention(inputs: Inputs) -> list[Any]:
    count, rows = attention_rows(inputs)
    dim, kv_heads, dtype = inputs.pick(*WIDTHS), inputs.pick(1, 2), inputs.pick(torch.float32, torch.bfloat16)
    heads = kv_heads * inputs.pick(1, 3, 70)
    qkv = inputs.floats(count, heads + 2 * kv_heads, dim, dtype=dtype)
    longest = max((length + rows[0, 0].item() for length in rows[0].tolist()), default=0)
    angles = inputs.pick(None, inputs.floats(2, longest + 1, dim // 2 * 2))
    return [*qkv.split((heads, kv_heads, kv_heads), 1), rows, angles, 0.3, inputs.pick(0, 0, 1, 5, 200),
            inputs.pick(0.0, 2.0)]  # fmt: skip


def packed_attention_backward(inputs: Inputs) -> list[Any]:
    q, k, v, *rest = packed_attention(inputs)
    out, normalisers = torch.ops.realhf.packed_attention(q, k, v, *rest)
    return [inputs.floats(*q.shape, dtype=q.dtype), q, k, v, out, normalisers, *rest]


def decode_blocks(inputs: Inputs) -> list[Any]:
    rows, max_len, dtype = (
        inputs.pick(0, 1, 2, 3, 40),
        inputs.pick(1, 9, 33),
        inputs.pick(torch.float32, torch.bfloat16),
    )
    sublayers = inputs.pick(0, 0, 1, 2)
    layers = inputs.pick(1, 2) if sublayers == 0 else 1
    dim, hidden, inner, kv_heads = (inputs.pick(16, 32), inputs.pick(16, 48), inputs.pick(16, 32), inputs.pick(1, 2))
    heads, gated = kv_heads * inputs.pick(1, 2, 5), inputs.pick(True, False)
    has_gates, wide_norms = inputs.pick(True, False), inputs.pick(True, False)
    make = lambda *shape: inputs.floats(*shape, dtype=dtype)
    maybe = lambda *shape: inputs.pick(make(0), make(*shape))
    matrix = lambda outs, depth: inputs.pick(
        make(outs, depth), inputs.floats(outs, depth, dtype=torch.bfloat16),
        inputs.bytes(outs // 16, (4 + depth) * 16),
    )  # fmt: skip
    routed = [inputs.pick(0, 1) for _ in range(layers)]
    routing = _routing(inputs) if any(routed) else []
    of_q, of_k = heads * dim, kv_heads * dim
    weights: list[Tensor] = []
    for is_routed in routed:
        if sublayers != 2:
            sizes = (of_q, of_k) if wide_norms else (dim, dim)
            head_norms = inputs.pick([make(0), make(0)], [make(size) for size in sizes])
            of_qkv = of_q * (1 + has_gates) + 2 * of_k
            weights += [maybe(hidden), maybe(hidden), matrix(of_qkv, hidden), maybe(of_qkv), *head_norms,
                        matrix(hidden, of_q), maybe(hidden), maybe(hidden), maybe(heads)]  # fmt: skip
        if sublayers != 1:
            weights += _mlp_weights(matrix, maybe, hidden, inner, 1 + gated, routing if is_routed else [])
    if sublayers == 0:
        weights += [maybe(hidden), maybe(hidden)]
    cache_type = inputs.pick(torch.float32, torch.bfloat16)
    k = inputs.floats(layers, rows + inputs.pick(0, 1), kv_heads, max_len, dim, dtype=cache_type)
    v = inputs.floats(*k.shape, dtype=cache_type)
    positions = inputs.ints(rows, 0, max_len)
    shared = [inputs.random.randrange(p + 1) for p in positions.tolist()]
    prefixes = torch.tensor([[i // 2 for i in range(rows)], shared, list(range(rows))], dtype=torch.int64)
    angles = [inputs.floats(2, max_len, inputs.pick(0, 2, dim)) for _ in range(inputs.pick(0, 1, 2))]
    tables = [inputs.pick(*range(-1, len(angles))) for _ in range(layers)]
    windows = [inputs.pick(0, 0, 3) for _ in range(layers)]
    n_recorded = sum(routed)
    chosen = inputs.pick(None, torch.zeros(n_recorded, rows, routing[3] if routing else 0, dtype=torch.int64))
    activation = inputs.pick(0, 1, 2, 3) if gated else inputs.pick(0, 1, 2)
    rows_of = inputs.pick((None, None), (prefixes, None), (None, torch.arange(rows)))
    return [make(rows, hidden), weights, k, v, positions, *rows_of, angles, tables, windows, routed,
            routing, chosen, sublayers, heads, inner, activation, gated, inputs.pick(True, False),
            inputs.pick(True, False), has_gates, wide_norms, 1e-5, 0.0, inputs.pick(1.0, 0.5), 0.3,
            inputs.pick(0.0, 2.0), *inputs.pick((0.0, 0), (0.5, 4)), inputs.pick(1.0, 2.5)]  # fmt: skip


def decode_steps(inputs: Inputs) -> list[Any]:
    while (given := decode_blocks(inputs))[13] != 0:  # whole blocks
        pass
    x, weights, k, v, positions, prefixes, _, *of_blocks = given[:12]
    hidden, max_len, n_rows, vocab, dtype = x.shape[1], k.shape[3], len(positions), inputs.pick(1, 17, 40), x.dtype
    limits = [inputs.random.randrange(max_len - position) + 1 for position in positions.tolist()]
    columns = [inputs.ints(n_rows, 0, vocab), positions, *(inputs.ints(n_rows, -9, 9) for _ in range(2)),
               torch.zeros(n_rows, dtype=torch.int64), torch.tensor(limits, dtype=torch.int64)]  # fmt: skip
    make = lambda *shape: inputs.floats(*shape, dtype=dtype)
    places = inputs.pick(None, make(max_len, hidden))
    head, stops = make(-(-vocab // 16), hidden, 16), inputs.ints(inputs.pick(0, 1, 3), 0, vocab)
    rule = inputs.pick(0.0, 1.0, 0.7), inputs.pick(0, 3, 99), inputs.pick(1.0, 0.8)
    return [torch.stack(columns), make(vocab, hidden), places, head, stops, inputs.random.randrange(max_len) + 1, vocab,
            inputs.random.getrandbits(60), inputs.pick(0, 2), *rule, inputs.pick(1.0, 4.0), inputs.pick(1.0, 0.5),
            inputs.pick(1.0, 0.5), weights, k, v, prefixes, *of_blocks, *given[14:]]  # fmt: skip


def _routing(inputs: Inputs) -> list[int]:
    """Return the numbers about experts: all, the first own one, own ones, chosen ones, groups, used ones, ..."""
    n_groups, size = inputs.pick(1, 1, 3), inputs.pick(2, 3, 17)
    n_used = inputs.random.randrange(n_groups) + 1
    first = inputs.random.randrange(n_groups * size)
    n_own = inputs.random.randrange(n_groups * size - first + 1)
    top_k = inputs.random.randrange(n_used * size) + 1
    flags = inputs.pick(0, 1), inputs.pick(0, 1)
    return [n_groups * size, first, n_own, top_k, n_groups, n_used, *flags, inputs.pick(16, 32), inputs.pick(0, 16)]


def _mlp_weights(
    matrix: Callable[..., Tensor], maybe: Callable[..., Tensor], hidden: int, inner: int, ways: int, routing: list[int]
) -> list[Tensor]:
    """Return the weights of a dense MLP, or of routed experts."""
    count = 1
    if routing:
        count, inner = routing[2], routing[8]
    up = [matrix(count * ways * inner, hidden), maybe(count * ways * inner)]
    down = [matrix(count * hidden, inner), maybe(count * hidden)]
    weights = [maybe(hidden), maybe(hidden), *up, *down, maybe(hidden)]
    if not routing:
        return weights
    shared, outs = routing[9], -(-routing[0] // 16) * 16
    router = [matrix(outs, hidden), maybe(outs), maybe(routing[0])]
    return [*weights, *router, matrix(ways * shared, hidden), matrix(hidden, shared), maybe(hidden)]


def delta_step(inputs: Inputs) -> list[Any]:
    rows, key_dim, value_dim, taps = inputs.pick(0, 1, 3), inputs.pick(8, 24), inputs.pick(8, 40), inputs.pick(1, 2, 4)
    n_keys, dtype = inputs.pick(1, 2), inputs.pick(torch.float32, torch.bfloat16)
    n_values = n_keys * inputs.pick(1, 3)
    make = lambda *shape: inputs.floats(*shape, dtype=dtype)
    channels = 2 * n_keys * key_dim + n_values * value_dim
    return [make(rows, channels + n_values * value_dim + 2 * n_values), make(channels, 1, taps), make(n_values),
            make(n_values), make(value_dim), make(rows, taps - 1, channels),
            inputs.floats(rows, n_values, key_dim, value_dim), 1e-6]  # fmt: skip


def delta_rule(inputs: Inputs) -> list[Any]:
    count, rows = attention_rows(inputs)
    n_keys, ratio, key_dim, value_dim = inputs.pick(1, 2), inputs.pick(1, 3), inputs.pick(8, 24), inputs.pick(8, 40)
    n_values, dtype = n_keys * ratio, inputs.pick(torch.float32, torch.bfloat16)
    return [inputs.floats(count, 2 * n_keys * key_dim + n_values * value_dim, dtype=dtype),
            inputs.floats(count, n_values), inputs.floats(count, n_values), rows,
            inputs.floats(rows.shape[1], n_values, key_dim, value_dim), inputs.pick(True, False)]  # fmt: skip


def delta_rule_backward(inputs: Inputs) -> list[Any]:
    mixed, decay, rate, rows, states, _ = delta_rule(inputs)
    n_blocks = sum(-(-length // 64) for length in rows[0].tolist())
    return [inputs.floats(len(mixed), states.shape[1], states.shape[3]), states, mixed, decay, rate, rows,
            inputs.floats(n_blocks, *states.shape[1:])]  # fmt: skip


def causal_conv_silu(inputs: Inputs) -> list[Any]:
    count, rows = attention_rows(inputs)
    channels, dtype = inputs.pick(8, 64, 72), inputs.pick(torch.float32, torch.bfloat16)
    weight = inputs.floats(channels, 1, inputs.pick(1, 2, 4, 16), dtype=dtype)
    return [inputs.floats(count, channels, dtype=dtype), weight, rows]


def causal_conv_silu_backward(inputs: Inputs) -> list[Any]:
    x, weight, rows = causal_conv_silu(inputs)
    return [inputs.floats(*x.shape, dtype=x.dtype), x, weight, rows]


def packed_gae(inputs: Inputs) -> list[Any]:
    lengths = [inputs.pick(*WIDTHS) for _ in range(inputs.pick(*COUNTS))]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(inputs.pick(torch.int64, torch.int32))
    dtype = inputs.pick(torch.float32, torch.float64)
    tokens = [inputs.floats(sum(lengths), dtype=dtype) for _ in range(2)]
    return [*tokens, inputs.placed(starts), inputs.bools(len(lengths)), 0.99, 0.95]


def gae_2d(inputs: Inputs) -> list[Any]:
    slots, steps, dtype = inputs.pick(*COUNTS), inputs.pick(0, *WIDTHS), inputs.pick(torch.float32, torch.float64)
    return [inputs.floats(slots, steps, dtype=dtype), inputs.floats(slots, steps + 1, dtype=dtype),
            *(inputs.bools(slots, steps + 1) for _ in range(2)), 0.99, 0.95, inputs.pick(True, False)]  # fmt: skip


def slice_intervals(inputs: Inputs) -> list[Any]:
    size = inputs.pick(0, *WIDTHS, 999)
    cuts = inputs.cuts(size, 2 * inputs.pick(*COUNTS))
    return [inputs.floats(size, dtype=inputs.pick(torch.float32, torch.bfloat16)),
            inputs.placed(torch.tensor(cuts, dtype=torch.int64).view(-1, 2))]  # fmt: skip


def set_intervals(inputs: Inputs) -> list[Any]:
    target, intervals = slice_intervals(inputs)
    return [inputs.floats(int((intervals[:, 1] - intervals[:, 0]).sum()), dtype=target.dtype), target, intervals]


def logit_stats(inputs: Inputs) -> list[Any]:
    rows, vocab = inputs.pick(*COUNTS), inputs.pick(0, *WIDTHS, 600)
    dtype = inputs.pick(torch.float32, torch.bfloat16)
    return [inputs.floats(rows, vocab, dtype=dtype), inputs.ints(rows, -5, vocab + 5), 0.7]


def logit_slopes_(inputs: Inputs) -> list[Any]:
    logits, targets, scale = logit_stats(inputs)
    return [logits, targets, *(inputs.floats(len(logits)) for _ in range(3)), scale]


def sample_tokens(inputs: Inputs) -> list[Any]:
    rows, vocab = inputs.pick(*COUNTS), inputs.pick(*WIDTHS, 65, 1000)
    forbid = inputs.pick(None, inputs.ints(inputs.pick(*COUNTS), 0, vocab))
    return [inputs.floats(rows, vocab), torch.rand(rows, generator=inputs.generator, dtype=torch.float64), forbid,
            inputs.pick(None, inputs.bools(rows)), inputs.pick(0.0, 0.5, 1.0), inputs.pick(0, 0, 1, 5, 2000),
            inputs.pick(1.0, 0.5, 0.01)]  # fmt: skip


def counter_uniform(inputs: Inputs) -> list[Any]:
    n = inputs.pick(*COUNTS)
    return [inputs.pick(*ODD_INTS), *(inputs.ints(n, -(2**63), 2**63) for _ in range(3))]


def copy_box_(inputs: Inputs) -> list[Any]:
    shape = [inputs.pick(0, 1, 3, 17, 70) for _ in range(inputs.pick(0, 1, 2, 3))]
    source = inputs.placed(inputs.floats(*shape), dense=inputs.pick(True, False))
    return [inputs.placed(torch.zeros(shape), dense=inputs.pick(True, False)), source, inputs.pick(True, False)]


def tiled_linear(inputs: Inputs) -> list[Any]:
    rows, depth, outs = inputs.pick(*COUNTS), inputs.pick(16, 32, 272), inputs.pick(*WIDTHS)
    dtype = inputs.pick(torch.float32, torch.bfloat16)
    return [inputs.floats(rows, depth, dtype=dtype), inputs.floats(-(-outs // 16), depth, 16, dtype=dtype), outs]


CASES: dict[str, Callable[[Inputs], list[Any]]] = {
    make.__name__: make
    for make in (activate, activate_backward, adamw_, rms_norm, rms_norm_backward, packed_attention, delta_step,
                 delta_rule, delta_rule_backward, causal_conv_silu, causal_conv_silu_backward,
                 packed_attention_backward, decode_blocks, decode_steps, packed_gae, gae_2d, slice_intervals,
                 set_intervals, logit_stats, logit_slopes_, sample_tokens, counter_uniform, copy_box_, tiled_linear)
}  # fmt: skip


def call_operator(name: str, n_calls: int, seed: int) -> dict[str, Any]:
    """Call an operator with valid arguments, then with one or two of them changed."""
    accepted = refused = 0
    digest = hashlib.blake2b()
    for number in range(n_calls):
        inputs = Inputs(f"{name} {seed} {number}")
        arguments = CASES[name](inputs)
        is_valid = number % 3 == 0
        for _ in range(0 if is_valid else inputs.pick(1, 1, 2)):
            index = inputs.random.randrange(len(arguments))
            arguments[index] = inputs.broken(arguments[index])
        print(name, seed, number, file=sys.stderr)
        try:
            results = getattr(torch.ops.realhf, name)(*arguments)
        except (RuntimeError, TypeError) as error:
            if is_valid:
                raise AssertionError(f"{name} refuses valid arguments of call {number}") from error
            refused += 1
            continue
        accepted += 1
        results = results if isinstance(results, tuple) else (results,)
        changed = [one for one in arguments if isinstance(one, Tensor)] if results == (None,) else results
        for tensor in changed:
            digest.update(repr(tensor.tolist()).encode())
    return {"accepted": accepted, "refused": refused, "digest": digest.hexdigest()}


def main(library: str, n_calls: int, seed: int) -> None:
    torch.ops.load_library(library)
    names = sorted(name.removeprefix("realhf::") for name in torch._C._dispatch_get_all_op_names()
                   if name.startswith("realhf::")
                   and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"))  # fmt: skip
    print(json.dumps({name: call_operator(name, n_calls, seed) if name in CASES else None for name in names}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
