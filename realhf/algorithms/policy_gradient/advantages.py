"""Advantages without a critic: an answer is compared with other answers to its prompt.

Scores are ``[B]``, one per answer; rows that share a number of ``group_of_row`` answer the same prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.api.config import GroupStd

GROUP_EPS = 1e-5


def group_sums(scores: Tensor, group_of_row: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the sum of every row's group and its size, ``[B]`` float64 each."""
    _, index = torch.tensor(group_of_row, dtype=torch.int64).unique(return_inverse=True)
    table = torch.zeros(2, len(group_of_row), dtype=torch.float64)
    # on the CPU, where the order of additions is fixed
    values = torch.stack([scores.double().cpu(), torch.ones(len(group_of_row), dtype=torch.float64)])
    sums, sizes = table.index_add(1, index, values)[:, index].to(scores.device)
    return sums, sizes


def group_advantages(scores: Tensor, group_of_row: Sequence[int], std: GroupStd) -> Tensor:
    """Return ``(score - mean of the group) / (std of the group + 1e-5)``, ``[B]`` in the dtype of ``scores``.

    GRPO (Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2). ``population`` divides squares by n, ``sample`` by n - 1;
    ``none`` only centres (Dr. GRPO, arXiv 2503.20783). 0 in groups whose scores are all equal, and in those of one.
    """
    sums, sizes = group_sums(scores, group_of_row)
    centred = scores.double() - sums / sizes
    same = equal_in_group(scores, group_of_row)
    if std is not GroupStd.none:
        squares, _ = group_sums(centred.square(), group_of_row)
        variance = squares / (sizes if std is GroupStd.population else (sizes - 1).clamp(min=1.0))
        centred = centred / (variance.sqrt() + GROUP_EPS)
    return centred.masked_fill(same, 0.0).to(scores.dtype)


def leave_one_out(scores: Tensor, group_of_row: Sequence[int]) -> Tensor:
    """Return the score minus the mean of the group's other scores, ``[B]``; 0 in groups of one.

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740, sec. 3.2).
    """
    sums, sizes = group_sums(scores, group_of_row)
    others = (sums - scores.double()) / (sizes - 1).clamp(min=1.0)
    return (scores.double() - others).masked_fill(sizes == 1, 0.0).to(scores.dtype)


def equal_in_group(scores: Tensor, group_of_row: Sequence[int]) -> Tensor:
    """Tell of every row whether all scores of its group are the same, ``[B]`` bool."""
    lowest: dict[int, float] = {}
    highest: dict[int, float] = {}
    for group, score in zip(group_of_row, scores.tolist(), strict=True):
        lowest[group] = min(score, lowest.get(group, score))
        highest[group] = max(score, highest.get(group, score))
    same = [lowest[group] == highest[group] for group in group_of_row]
    return torch.tensor(same, dtype=torch.bool, device=scores.device)


def process_advantages(
    step_rewards: Tensor, step_ends: Tensor, lengths: Sequence[int], group_of_row: Sequence[int]
) -> Tensor:
    """Return at every token the sum of the normalised rewards of the steps that end there or later, ``[T]``.

    ``step_rewards`` is ``[T]``, read where ``step_ends`` is nonzero. Rewards of all steps of a group are normalised
    together, by their population standard deviation (GRPO with process supervision, arXiv 2402.03300, sec. 4.1.3).
    """
    ends = step_ends.bool()
    normalised = torch.zeros(step_rewards.shape, dtype=torch.float64, device=step_rewards.device)
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    groups = torch.tensor(group_of_row, dtype=torch.int64)[number].to(step_rewards.device)
    for group in sorted(set(group_of_row)):
        where = ends & (groups == group)
        some = step_rewards[where].double()
        if len(some) and some.min() < some.max():
            normalised[where] = (some - some.mean()) / (some.std(correction=0) + GROUP_EPS)
    rows = [row.flip(0).cumsum(0).flip(0) for row in normalised.split(tuple(lengths))]
    return torch.cat(rows).to(step_rewards.dtype) if rows else step_rewards


def whiten(advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """Return ``(A - mean) / sqrt(var + 1e-8)`` with the unbiased variance, 0 where masked.

    As VinePPO has it (arXiv 2410.01679, its code). ``sums`` is that of ``masked_sums`` over all ranks.
    """
    total, squares, count = sums.tolist()
    mean = total / max(count, 1.0)
    variance = max(squares - count * mean**2, 0.0) / max(count - 1.0, 1.0)
    return ((advantages.double() - mean) / (variance + 1e-8) ** 0.5).masked_fill(~mask.bool(), 0.0).to(advantages.dtype)


def overlong_penalties(lengths: Tensor, longest: int, buffer: int, penalty: float) -> Tensor:
    """Return what answers of ``lengths`` tokens (``[B]``) lose: from 0 at ``longest - buffer`` to -penalty at the end.

    Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).
    """
    over = (lengths.float() - (longest - buffer)) / buffer
    return -penalty * over.clamp(0.0, 1.0)
