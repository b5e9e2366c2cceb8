"""Generalised advantage estimation over packed rows (Schulman et al. 2016, arXiv 1506.02438, eq. 16)."""

from collections.abc import Sequence

import torch
from torch import Tensor


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

    The recurrence is a scan by doubling, about log2 of the longest row in steps, so a row's result never depends on
    the other rows. Raises ValueError for empty rows or lengths that do not add up to T.
    """
    if sum(lengths) != values.numel() or min(lengths, default=1) < 1:
        raise ValueError(f"rows of lengths {tuple(lengths)} do not make {values.numel()} values")
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
