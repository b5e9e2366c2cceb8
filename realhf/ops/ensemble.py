"""Combines the scores of several reward models into one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realhf.api.config.preference import EnsembleConfig, Objective

Floats = NDArray[np.float64]


def combine(scores: Floats, config: EnsembleConfig) -> Floats:
    """Return one score per response, ``[B]``, from the scores R of k members, ``[k, B]``; R itself for k = 1.

    mean is the mean over members, WCO is ``min R``, and UWO is ``mean R - uwo_weight * var R``
    (Coste et al. 2024, arXiv 2310.02743, sec. 3.2).
    """
    if len(scores) == 1:
        return scores[0]
    match config.objective:
        case Objective.mean:
            return scores.mean(axis=0)
        case Objective.WCO:
            return scores.min(axis=0)
        case Objective.UWO:
            return scores.mean(axis=0) - config.uwo_weight * variance(scores, config.uwo_unbiased)


def variance(scores: Floats, unbiased: bool = False) -> Floats:
    """Return the variance over members, ``[k, B]`` to ``[B]``, over k, or over k - 1 if ``unbiased``; 0 for k = 1."""
    return scores.var(axis=0, ddof=int(unbiased and len(scores) > 1))


def check_scores(scores: Floats, members: Sequence[str], rows: Sequence[object]) -> None:
    """Raise ValueError with member and row if any score of ``[k, B]`` is not finite."""
    if len(invalid := np.argwhere(~np.isfinite(scores))):
        member, row = invalid[0]
        raise ValueError(f"reward model {member} ({members[member]}) scores {rows[row]} with {scores[member, row]}")
