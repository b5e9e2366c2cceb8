"""Generalised advantage estimation over packed rows (Schulman et al. 2016, arXiv 1506.02438, eq. 16)."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.ops import extension


def packed_gae(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], bootstrap: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return the advantage and the return of the action that produced each token, both ``[T]`` in the dtype of values.

    ``rewards[t]`` is the reward for producing token t. ``values[t]`` is the scalar head's output at token t: the value
    of the state AFTER token t, in which token t+1 is chosen. Hence
    ``delta[t] = rewards[t] + gamma * values[t] - values[t-1]``, ``A[t] = delta[t] + gamma * lam * A[t+1]`` and
    ``returns[t] = A[t] + values[t-1]``, the target of ``values[t-1]``. The value after a row's last token is
    ``values[last]`` where ``bootstrap`` (``[B]`` bool: the response is truncated) is true, else 0. No action produced a
    row's first token: both results are 0 there.

    Rows are independent bit for bit. Raises ValueError for empty rows, lengths that do not sum to T, and wrong shapes.
    """
    kernel = extension.kernel("packed_gae", values.device.type) if _kernel_fits(rewards, values) else None
    if kernel is None:
        return packed_gae_reference(rewards, values, lengths, bootstrap, gamma, lam)
    cu_seqlens = torch.frombuffer(array("q", [0, *lengths]), dtype=torch.int64).cumsum(0)  # faster than from a list
    try:
        return kernel(rewards, values, cu_seqlens, bootstrap, gamma, lam)
    except RuntimeError:  # the kernel checks faster, this check has the better message
        _check_rows(rewards, values, lengths, bootstrap)
        raise


def packed_gae_reference(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], bootstrap: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """The reference implementation of ``packed_gae``; differentiable. A scan by doubling computes the recurrence."""
    _check_rows(rewards, values, lengths, bootstrap)
    device = values.device
    length_B = torch.tensor(lengths, dtype=torch.int64, device=device)
    end_B = length_B.cumsum(0)
    last_B = end_B - 1
    is_first = torch.zeros(values.numel(), dtype=torch.bool, device=device).index_fill(0, end_B - length_B, True)
    next_values = values.index_copy(0, last_B, values[last_B].where(bootstrap, torch.zeros_like(values[last_B])))
    before = values.roll(1)
    advantages = rewards + gamma * next_values - before
    remaining = last_B.repeat_interleave(length_B) - torch.arange(values.numel(), device=device)
    span = 1
    while span < max(lengths, default=0):  # invariant: A[t] covers the next `span` deltas of its row
        later = advantages.roll(-span).masked_fill(remaining < span, 0.0)
        advantages = advantages + (gamma * lam) ** span * later
        span *= 2
    return advantages.masked_fill(is_first, 0.0), (advantages + before).masked_fill(is_first, 0.0)


def gae_1d_nolp_misalign(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], bootstrap: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of ``lengths`` actions per row, ``[T]``, from ``values`` of ``[T+B]`` states.

    Like ``packed_gae``, but indexed by action: a row's values are those BEFORE each action, then that after its last
    action, which is used where ``bootstrap`` is true. A row may have no actions.
    """
    if rewards.ndim != 1 or rewards.numel() != sum(lengths):
        raise ValueError(f"lengths {tuple(lengths)} do not sum to the size of rewards {list(rewards.shape)}")
    n_states = [length + 1 for length in lengths]
    counts = torch.tensor(n_states, dtype=torch.int64, device=values.device)
    has_action = torch.ones(sum(n_states), dtype=torch.bool, device=values.device)
    has_action[counts.cumsum(0) - counts] = False
    token_rewards = rewards.new_zeros(sum(n_states)).masked_scatter(has_action, rewards)
    advantages, returns = packed_gae(token_rewards, values, n_states, bootstrap, gamma, lam)
    return advantages[has_action], returns[has_action]


def gae_2d_olp(
    rewards: Tensor, values: Tensor, dones: Tensor, truncates: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, ``[B, T]``, for environments that reset within a slot without a final observation.

    ``rewards`` is ``[B, T]``; ``values``, ``dones`` and ``truncates`` (bool, a subset of ``dones``) are ``[B, T+1]``.
    If ``dones[t+1]``, step t ends a sequence and ``values[t+1]`` belongs to the next one: ``A[t]`` is 0 if
    ``truncates[t+1]``, since the final value is unknown, else ``rewards[t] - values[t]``. Otherwise
    ``A[t] = delta[t] + gamma * lam * A[t+1]`` with ``delta[t] = rewards[t] + gamma * values[t+1] - values[t]``. The
    return is ``A[t] + values[t]``. Raises ValueError for wrong shapes.
    """
    return _gae_2d(rewards, values, dones, truncates, gamma, lam, overlap=True)


def gae_2d_nolp(
    rewards: Tensor, values: Tensor, on_reset: Tensor, truncates: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, ``[B, T]``, for sequences that end with a final observation.

    Shapes are those of ``gae_2d_olp``. ``on_reset`` marks the first step of each sequence, ``truncates`` the final
    observation of a truncated one; a finished sequence must have reward and value 0 there.
    ``A[t] = rewards[t] + gamma * values[t+1] * !on_reset[t+1] - values[t] + gamma * lam * A[t+1]``, without the last
    term if ``on_reset[t+1]`` or ``truncates[t+1]``. Results at final observations are meaningless and must be masked.
    """
    return _gae_2d(rewards, values, on_reset, truncates, gamma, lam, overlap=False)


def gae_2d_reference(
    rewards: Tensor, values: Tensor, ends: Tensor, truncates: Tensor, gamma: float, lam: float, overlap: bool
) -> tuple[Tensor, Tensor]:
    """The reference implementation of ``gae_2d_olp`` (``overlap``) and ``gae_2d_nolp``; differentiable."""
    _check_slots(rewards, values, ends, truncates)
    before, after, ended, cut = values[:, :-1], values[:, 1:], ends[:, 1:], truncates[:, 1:]
    deltas = rewards + gamma * after.masked_fill(ended, 0.0) - before
    if overlap:
        deltas = deltas.masked_fill(cut, 0.0)
    links = torch.full_like(rewards, gamma * lam).masked_fill(ended | cut, 0.0)
    later = torch.zeros_like(values[:, 0])
    advantages = []
    for delta, link in zip(reversed(deltas.unbind(1)), reversed(links.unbind(1)), strict=True):
        later = delta + (link * later).masked_fill(link == 0, 0.0)  # a NaN stays in its sequence
        advantages.append(later)
    whole = torch.stack(advantages[::-1], 1) if advantages else torch.zeros_like(rewards)
    return whole, whole + before


def _gae_2d(
    rewards: Tensor, values: Tensor, ends: Tensor, truncates: Tensor, gamma: float, lam: float, overlap: bool
) -> tuple[Tensor, Tensor]:
    _check_slots(rewards, values, ends, truncates)
    kernel = extension.kernel("gae_2d", values.device.type) if _kernel_fits(rewards, values) else None
    if kernel is None:
        return gae_2d_reference(rewards, values, ends, truncates, gamma, lam, overlap)
    return kernel(rewards, values, ends, truncates, gamma, lam, overlap)


def _check_slots(rewards: Tensor, values: Tensor, ends: Tensor, truncates: Tensor) -> None:
    shape = [rewards.shape[0], rewards.shape[1] + 1] if rewards.ndim == 2 else []
    if not shape or any(list(x.shape) != shape for x in (values, ends, truncates)):
        raise ValueError(
            f"rewards {list(rewards.shape)} must be [B, T], values {list(values.shape)}, ends {list(ends.shape)} "
            f"and truncates {list(truncates.shape)} [B, T+1]"
        )
    if ends.dtype != torch.bool or truncates.dtype != torch.bool:
        raise ValueError(f"ends and truncates must be bool, got {ends.dtype} and {truncates.dtype}")


def _check_rows(rewards: Tensor, values: Tensor, lengths: Sequence[int], bootstrap: Tensor) -> None:
    if sum(lengths) != values.numel() or min(lengths, default=1) < 1:
        raise ValueError(f"lengths {tuple(lengths)} do not sum to the {values.numel()} values")
    if values.ndim != 1 or rewards.shape != values.shape or bootstrap.shape != (len(lengths),):
        raise ValueError(
            f"rewards {list(rewards.shape)} and values {list(values.shape)} must both be [T], "
            f"and bootstrap {list(bootstrap.shape)} must be [B] with {len(lengths)} rows"
        )


def _kernel_fits(rewards: Tensor, values: Tensor) -> bool:
    same = rewards.dtype == values.dtype and values.dtype in (torch.float32, torch.float64)
    return same and not (torch.is_grad_enabled() and (rewards.requires_grad or values.requires_grad))
