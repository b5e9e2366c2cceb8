"""Losses of reward models, as pure functions of scores: pairs, ranked lists, labelled responses and steps."""

import torch
from torch import Tensor
from torch.nn import functional

from realhf.algorithms.preference.pairs import Pairs
from realhf.algorithms.stats import Monitors
from realhf.data.protocols import Loss


def comparison_loss(scores: Tensor, pairs: Pairs, l2: float = 0.0) -> Loss:
    """Return the weighted sum of ``-logsigmoid(s_better - s_worse) + l2 / 2 (s_better^2 + s_worse^2)``.

    ``scores`` is ``[B]``. The result is the sum over prompts of the mean over their pairs (Bradley-Terry; Ouyang et al.
    2022, arXiv 2203.02155, eq. 1, for all pairs of a ranked list). Statistics: ``loss`` per prompt; ``accuracy`` (equal
    scores are wrong), ``margin``, ``chosen_score``, ``rejected_score`` per pair.
    """
    better, worse = scores[pairs.better], scores[pairs.worse]
    margin = better - worse
    terms = 0.5 * l2 * (better.square() + worse.square()) - functional.logsigmoid(margin)
    total = (terms * torch.tensor(pairs.weights, device=scores.device, dtype=scores.dtype)).sum()
    detached, count = margin.detach(), float(len(pairs))
    stats = {
        "loss": (total.detach(), float(sum(pairs.weights))),
        "accuracy": ((detached > 0).sum(), count),
        "margin": (detached.sum(), count),
        "chosen_score": (better.detach().sum(), count),
        "rejected_score": (worse.detach().sum(), count),
    }
    return Loss(total, stats)


def label_loss(logits: Tensor, labels: Tensor) -> Loss:
    """Return the sum of binary cross-entropies of ``logits`` with ``labels`` in [0, 1]; negative labels are ignored.

    Both are ``[N]``: rows (outcome), or tokens with labels at the last token of each step (process; Lightman et al.
    2023, arXiv 2305.20050; soft labels as in Wang et al. 2024, arXiv 2312.08935). Statistics per label: ``loss``;
    ``accuracy`` (a logit of 0 is wrong); ``right_score`` and ``wrong_score``, mean probabilities where labels are above
    and below 1/2.
    """
    known = labels >= 0.0
    logits, labels = logits[known], labels[known].to(logits.dtype)
    total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    detached, count = logits.detach(), float(len(labels))
    right, wrong = labels > 0.5, labels < 0.5
    stats: Monitors = {
        "loss": (total.detach(), count),
        "accuracy": (((labels - 0.5) * detached > 0).sum(), count),
        "right_score": (detached.sigmoid()[right].sum(), right.sum()),
        "wrong_score": (detached.sigmoid()[wrong].sum(), wrong.sum()),
    }
    return Loss(total, stats)
