"""What a reward model minimises, as pure functions of its scores: pairs, ranked lists, labelled answers and steps."""

import torch
from torch import Tensor
from torch.nn import functional

from realhf.algorithms.preference.pairs import Pairs
from realhf.algorithms.stats import Monitors
from realhf.data.protocols import Loss


def comparison_loss(scores: Tensor, pairs: Pairs, l2: float = 0.0) -> Loss:
    """Return the weighted sum of ``-logsigmoid(s_better - s_worse) + l2 / 2 (s_better^2 + s_worse^2)``.

    ``scores`` is ``[B]``, one score a row, in any unit. The sum is that of every prompt's mean over its pairs
    (Bradley-Terry; Ouyang et al. 2022, arXiv 2203.02155, eq. 1, for all pairs of a ranked list). Monitors: ``loss`` per
    prompt; ``accuracy`` (equal scores are wrong), ``margin``, ``chosen_score``, ``rejected_score`` per pair.
    """
    better, worse = scores[pairs.better], scores[pairs.worse]
    margin = better - worse
    terms = 0.5 * l2 * (better.square() + worse.square()) - functional.logsigmoid(margin)
    total = (terms * torch.tensor(pairs.weights, device=scores.device, dtype=scores.dtype)).sum()
    seen, count = margin.detach(), float(len(pairs))
    stats = {
        "loss": (total.detach(), float(sum(pairs.weights))),
        "accuracy": ((seen > 0).sum(), count),
        "margin": (seen.sum(), count),
        "chosen_score": (better.detach().sum(), count),
        "rejected_score": (worse.detach().sum(), count),
    }
    return Loss(total, stats)


def label_loss(logits: Tensor, labels: Tensor) -> Loss:
    """Return the sum of binary cross-entropies of ``logits`` with ``labels`` within [0, 1], where there is a label.

    Both are ``[N]``: rows (outcome), or tokens of which the last of every step has a label (process; Lightman et al.
    2023, arXiv 2305.20050; soft labels as in Wang et al. 2024, arXiv 2312.08935). Monitors, each per label: ``loss``;
    ``accuracy``, the share of logits on their label's side of 0, where 0 is on none; ``right_score`` and
    ``wrong_score``, mean probabilities where labels are above and below 1/2.
    """
    known = labels >= 0.0
    logits, labels = logits[known], labels[known].to(logits.dtype)
    total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    seen, count = logits.detach(), float(len(labels))
    right, wrong = labels > 0.5, labels < 0.5
    stats: Monitors = {
        "loss": (total.detach(), count),
        "accuracy": (((labels - 0.5) * seen > 0).sum(), count),
        "right_score": (seen.sigmoid()[right].sum(), right.sum()),
        "wrong_score": (seen.sigmoid()[wrong].sum(), wrong.sum()),
    }
    return Loss(total, stats)
