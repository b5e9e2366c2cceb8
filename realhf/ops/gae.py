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
    kernel = extension.kernel("packed_gae", values.device.type) if _kernel_fits(rewards, values) else None
    if kernel is None:
        return packed_gae_reference(rewards, values, lengths, bootstrap, gamma, lam)
    cu_seqlens = torch.frombuffer(array("q", [0, *lengths]), dtype=torch.int64).cumsum(0)  # faster than of a list
    try:
        return kernel(rewards, values, cu_seqlens, bootstrap, gamma, lam)
    except RuntimeError:  # the kernel checks, faster than we can; we say what is wrong
        _check_rows(rewards, values, lengths, bootstrap)
        raise


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


def gae_1d_nolp_misalign(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], bootstrap: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of ``lengths`` actions per row, ``[T]``, from one value more per row, ``[T+B]``.

    ``packed_gae`` in the layout of actions: ``values[t]`` is that of the state BEFORE action t, and each row's last
    one, of the state after its last action, counts where ``bootstrap`` says so. A row may have no action.
    """
    if rewards.ndim != 1 or rewards.numel() != sum(lengths):
        raise ValueError(f"rows of lengths {tuple(lengths)} do not make rewards {list(rewards.shape)}")
    longer = [length + 1 for length in lengths]
    ends = torch.tensor(longer, dtype=torch.int64, device=values.device).cumsum(0)
    has_action = torch.ones(sum(longer), dtype=torch.bool, device=values.device)
    has_action[ends - torch.tensor(longer, dtype=torch.int64, device=values.device)] = False
    of_tokens = rewards.new_zeros(sum(longer)).masked_scatter(has_action, rewards)
    advantages, returns = packed_gae(of_tokens, values, longer, bootstrap, gamma, lam)
    return advantages[has_action], returns[has_action]


def gae_2d_olp(
    rewards: Tensor, values: Tensor, dones: Tensor, truncates: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, ``[B, T]``, of slots whose sequences overlap, as environments reset themselves.

    ``rewards`` is ``[B, T]``, ``values``, ``dones`` and ``truncates`` (both bool, the second only where the first)
    are ``[B, T+1]``. Where ``dones[t+1]``, step t was a sequence's last and ``values[t+1]`` already belongs to the
    next: ``A[t] = rewards[t] - values[t]``, or, for want of a value to go on with, 0 if ``truncates[t+1]``. Elsewhere
    ``A[t] = delta[t] + gamma * lam * A[t+1]`` with ``delta[t] = rewards[t] + gamma * values[t+1] - values[t]``. The
    return is ``A[t] + values[t]``. Raises ValueError for other shapes.
    """
    return _gae_2d(rewards, values, dones, truncates, gamma, lam, overlap=True)


def gae_2d_nolp(
    rewards: Tensor, values: Tensor, on_reset: Tensor, truncates: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, ``[B, T]``, of slots whose sequences end with an observation of their own.

    Shapes are those of ``gae_2d_olp``. ``on_reset`` (bool) marks the first step of each sequence, ``truncates``
    (bool) the last one, which is observed but not acted in, of a sequence that was cut off; with both, nothing is
    propagated from there, but its value counts. Of a finished sequence that last step must have reward and value 0.
    ``A[t] = rewards[t] + gamma * values[t+1] * !on_reset[t+1] - values[t] + gamma * lam * A[t+1]``, the last term
    where neither ``on_reset[t+1]`` nor ``truncates[t+1]``. What is returned at last steps means nothing: mask it.
    """
    return _gae_2d(rewards, values, on_reset, truncates, gamma, lam, overlap=False)


def gae_2d_reference(
    rewards: Tensor, values: Tensor, ends: Tensor, truncates: Tensor, gamma: float, lam: float, overlap: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``gae_2d_olp`` (``overlap``) or ``gae_2d_nolp`` in plain torch, with gradients, one step at a time."""
    _check_slots(rewards, values, ends, truncates)
    before, after, ended, cut = values[:, :-1], values[:, 1:], ends[:, 1:], truncates[:, 1:]
    deltas = rewards + gamma * after.masked_fill(ended, 0.0) - before
    if overlap:
        deltas = deltas.masked_fill(cut, 0.0)
    links = torch.full_like(rewards, gamma * lam).masked_fill(ended | cut, 0.0)
    later = torch.zeros_like(values[:, 0])
    advantages = []
    for delta, link in zip(reversed(deltas.unbind(1)), reversed(links.unbind(1)), strict=True):
        later = delta + link * later
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
        raise ValueError(f"rows of lengths {tuple(lengths)} do not make {values.numel()} values")
    if values.ndim != 1 or rewards.shape != values.shape or bootstrap.shape != (len(lengths),):
        raise ValueError(
            f"rewards {list(rewards.shape)} and values {list(values.shape)} must both be [T], "
            f"and bootstrap {list(bootstrap.shape)} must be [B] with {len(lengths)} rows"
        )


def _kernel_fits(rewards: Tensor, values: Tensor) -> bool:
    same = rewards.dtype == values.dtype and values.dtype in (torch.float32, torch.float64)
    return same and not (torch.is_grad_enabled() and (rewards.requires_grad or values.requires_grad))
