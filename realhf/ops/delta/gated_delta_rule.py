"""The gated delta rule over packed rows, and of one token per slot.

Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, equation 10): a head's state S is a map from keys to values. A token
with key k, value v, decay a and rate b changes it to ``a S + b k (v - a S^T k)^T``; its output is ``S^T q``. Queries
and keys are divided by their norms, queries also by the square root of their size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realhf.arch.decode_kernel import fits_delta
from realhf.ops import extension
from realhf.ops.delta.delta_rows import DeltaRows

NORM_EPS = 1e-6


def mixed_delta_rule(
    mixed: Tensor,
    decay: Tensor,
    rate: Tensor,
    sizes: tuple[int, int],
    rows: DeltaRows,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``gated_delta_rule`` of queries, keys and values that are beside each other in ``mixed``.

    ``mixed`` is ``[T, 2 * Hk * dk + Hv * dv]``, and ``sizes`` are dk and dv. The kernel computes token by token in
    float32; its backward pass computes states again, from one in 64 that it stores.
    """
    (key_dim, value_dim), n_values = sizes, decay.shape[1]
    fits = mixed.dtype in (torch.float32, torch.bfloat16) and fits_delta(key_dim, value_dim)
    if not fits or extension.kernel("delta_rule", mixed.device.type) is None:
        keys = (mixed.shape[1] - n_values * value_dim) // 2
        q, k, v = mixed.split((keys, keys, n_values * value_dim), 1)
        q, k, v = (x.unflatten(1, (-1, size)) for x, size in ((q, key_dim), (k, key_dim), (v, value_dim)))
        return gated_delta_rule(q, k, v, decay, rate, rows, states)
    if states is None:
        states = mixed.new_zeros(len(rows.lengths), n_values, key_dim, value_dim, dtype=torch.float32)
    return _DeltaRule.apply(mixed, decay.float(), rate.float(), rows.table, states.float())


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, decay: Tensor, rate: Tensor, table: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs, saves = (mixed.contiguous(), decay.contiguous(), rate.contiguous(), table), any(ctx.needs_input_grad)
        kernel = extension.required("delta_rule", mixed.device.type)
        outputs, ends, blocks = kernel(*inputs, states.contiguous(), saves)
        ctx.save_for_backward(*inputs, blocks)
        return outputs, ends

    @staticmethod
    def backward(ctx: Any, grad: Tensor, end_grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel = extension.required("delta_rule_backward", grad.device.type)
        *grads, of_states = kernel(grad.contiguous(), end_grad.contiguous(), *ctx.saved_tensors)
        return *grads, None, of_states


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, rows: DeltaRows, states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs of packed rows ``[T, Hv, dv]``, and the states behind the rows ``[B, Hv, dk, dv]``.

    ``q`` and ``k`` are ``[T, Hk, dk]``, ``v`` ``[T, Hv, dv]``, with Hv a multiple of Hk; ``decay`` ``[T, Hv]`` is the
    logarithm of a, ``rate`` ``[T, Hv]`` is b. ``states`` are those before rows without prefix, by default zero.
    Computed in float32, or float64 for such values, by chunks (section 3.3 of the paper): within a chunk that starts
    with state S, the changes ``b (v - a S^T k)`` of all tokens solve a triangular system, and are affine in S.
    """
    n_rows, (n_keys, key_dim), (n_values, value_dim) = len(rows.lengths), k.shape[1:], v.shape[1:]
    dtype = torch.promote_types(v.dtype, torch.float32)
    if states is None:
        states = v.new_zeros(n_rows, n_values, key_dim, value_dim, dtype=dtype)
    if not len(v):
        return v, states
    grouped = (n_keys, n_values // n_keys)
    q, k = (_in_chunks(x, rows) for x in _normalised(q.to(dtype), k.to(dtype)))  # [N, Hk, C, dk]
    v, decay, rate = (
        _in_chunks(x.to(dtype).unflatten(1, grouped), rows) for x in (v, decay[..., None], rate[..., None])
    )
    total = decay.squeeze(-1).cumsum(-1)  # [N, Hk, r, C]
    is_later = torch.ones(rows.chunk, rows.chunk, dtype=torch.bool, device=v.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    since_start, until_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    system = rate * (k @ k.mT).unsqueeze(2) * between
    right = torch.cat((rate * v, rate * since_start * k.unsqueeze(2)), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    parts = _Chunks(
        solved[..., :value_dim],
        solved[..., value_dim:],
        (q @ k.mT).unsqueeze(2) * between,
        q.unsqueeze(2) * since_start,
        k.unsqueeze(2) * until_end,
        since_start[..., -1:, :],
    )
    outputs, ends = parts.scan(rows, states.unflatten(1, grouped).to(dtype))
    packed = outputs.movedim(3, 1).flatten(0, 1).index_select(0, rows.places)
    return packed.flatten(1, 2), ends.flatten(1, 2)


def delta_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, states: Tensor) -> Tensor:
    """Return the outputs of one token per slot, ``[S, Hv, dv]``; ``states`` ``[S, Hv, dk, dv]`` change in place.

    The other arguments are as for ``gated_delta_rule``, with slots in place of tokens.
    """
    grouped, dtype = (k.shape[1], v.shape[1] // k.shape[1]), states.dtype
    q, k = (x[:, :, None, None] for x in _normalised(q.to(dtype), k.to(dtype)))  # [S, Hk, 1, 1, dk]
    state = states.unflatten(1, grouped)
    state.mul_(decay.to(dtype).exp().unflatten(1, grouped)[..., None, None])
    change = rate.to(dtype).unflatten(1, grouped)[..., None, None]
    change = change * (v.to(dtype).unflatten(1, grouped).unsqueeze(3) - k @ state)
    state.add_(k.mT * change)
    return (q @ state).squeeze(3).flatten(1, 2)


def _normalised(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _in_chunks(x: Tensor, rows: DeltaRows) -> Tensor:
    """Return ``x`` ``[T, ..., d]`` by chunks, ``[N, ..., chunk, d]``, with zeros behind the ends of rows."""
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return padded.index_select(0, rows.tokens.flatten()).unflatten(0, rows.tokens.shape).movedim(1, -2).contiguous()


@dataclass(frozen=True)
class _Chunks:
    """Of every chunk ``[N, Hk, r, ...]``: what the states between chunks, ``[B, Hk, r, dk, dv]``, are computed from.

    The changes of tokens are ``values - reads @ state``; ``scores`` are those of queries with keys.
    """

    values: Tensor
    reads: Tensor
    scores: Tensor
    queries: Tensor
    keys: Tensor
    decays: Tensor

    def scan(self, rows: DeltaRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[N, Hk, r, chunk, dv]``, and the states behind all rows in their order."""
        outputs: list[Tensor] = []
        (roots, children), (of_roots, of_parents, order) = rows.groups, rows.picks
        ends = self._scan(0, rows.step_sizes(roots), states.index_select(0, of_roots), outputs)
        if children:
            inherited, first = ends.index_select(0, of_parents), sum(rows.step_sizes(roots))
            ends = torch.cat((ends, self._scan(first, rows.step_sizes(children), inherited, outputs)))
        return torch.cat(outputs), ends.index_select(0, order)

    def _scan(self, first: int, sizes: list[int], state: Tensor, outputs: list[Tensor]) -> Tensor:
        """Append the outputs of a group's steps from chunk ``first`` on, and return its states behind the last ones."""
        ended: list[Tensor] = []
        for size in sizes:
            here = slice(first, first + size)
            ended.append(state[size:])
            state = state[:size]
            changes = self.values[here] - self.reads[here] @ state
            outputs.append(self.queries[here] @ state + self.scores[here] @ changes)
            state = self.decays[here] * state + self.keys[here].mT @ changes
            first += size
        return torch.cat((state, *reversed(ended)))
