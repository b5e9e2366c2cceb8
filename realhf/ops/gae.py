"""Generalised advantage estimation over packed rows (Schulman et al. 2016, arXiv 1506.02438, eq. 16)."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from realhf.ops import native


def packed_gae(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], bootstrap: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return the advantage and the return of the action that produced each token, both ``[T]`` in the dtype of values.

    Rows of ``lengths`` tokens lie one after the other. ``rewards[t]`` is earned by producing token t. ``values[t]`` is
    the scalar head's output AT token t: the value of the state AFTER token t, in which token t+1 is chosen. Hence
    ``delta[t] = rewards[t] + gamma * values[t] - values[t-1]``, ``A[t] = delta[t] + gamma * lam * A[t+1]`` and
    ``returns[t] = A[t] + values[t-1]``, the target of ``values[t-1]``. After a row's last token the value is
    ``values[last]`` where ``bootstrap`` (``[B]`` bool: the answer was cut off) says so, else 0. A row's first token
    was produced by no action: both results are 0 there. No argument is changed.

    A row's result never depends on the other rows. The compiled kernel is used where there is one for the device and
    the dtype and no gradient is asked for, else ``packed_gae_reference``, the same in plain torch. Raises ValueError
    for empty rows, for lengths that do not add up to T and for arguments of another shape.
    """
    _check_rows(rewards, values, lengths, bootstrap)
    kernel = native.kernel("packed_gae", values.device.type) if _kernel_fits(rewards, values) else None
    if kernel is None:
        return packed_gae_reference(rewards, values, lengths, bootstrap, gamma, lam)
    cu_seqlens = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int64)
    return kernel(rewards, values, cu_seqlens, bootstrap, gamma, lam)


def packed_gae_reference(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], bootstrap: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute ``packed_gae`` in plain torch, with gradients: the definition that its kernel is tested against.

    The recurrence is a scan by doubling, about log2 of the longest row in steps.
    """
    _check_rows(rewards, values, lengths, bootstrap)
    device = values.device
    length_B = torch.tensor(lengths, dtype=torch.int64, device=device)
    end_B = length_B.cumsum(0)
    last_B = end_B - 1
    is_first = torch.zeros(values.numel(), dtype=torch.bool, device=device).index_fill(0, end_B - length_B, True)
    after = values.index_copy(0, last_B, values[last_B].where(bootstrap, torch.zeros_like(values[last_B])))
    before = values.roll(1)
    advantages = rewards + gamma * after - before
    followers = last_B.repeat_interleave(length_B) - torch.arange(values.numel(), device=device)
    span = 1
    while span < max(lengths, default=0):  # invariant: A[t] covers the next `span` deltas of its row
        later = advantages.roll(-span).masked_fill(followers < span, 0.0)
        advantages = advantages + (gamma * lam) ** span * later
        span *= 2
    return advantages.masked_fill(is_first, 0.0), (advantages + before).masked_fill(is_first, 0.0)


def _check_rows(rewards: Tensor, values: Tensor, lengths: Sequence[int], bootstrap: Tensor) -> None:
    if sum(lengths) != values.numel() or min(lengths, default=1) < 1:
        raise ValueError(f"rows of lengths {tuple(lengths)} do not make {values.numel()} values")
    if values.ndim != 1 or rewards.shape != values.shape or bootstrap.shape != (len(lengths),):
        raise ValueError(
            f"rewards {list(rewards.shape)} and values {list(values.shape)} must both be [T], "
            f"and bootstrap {list(bootstrap.shape)} must be [B] with {len(lengths)} rows"
        )


def _kernel_fits(rewards: Tensor, values: Tensor) -> bool:
    same = rewards.dtype == values.dtype and values.dtype in (torch.float32, torch.float64)
    return same and not (torch.is_grad_enabled() and (rewards.requires_grad or values.requires_grad))
