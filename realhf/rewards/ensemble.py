"""One score from those of several reward models, and what makes their scores comparable. No model is involved."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from realhf.api.ensemble import EnsembleConfig, Objective
from realhf.base.errors import UserError
from realhf.base.paths import EVALUATION

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of a reward model's scores."""

    mean: float = 0.0
    std: float = 1.0


def combine(scores: Floats, config: EnsembleConfig) -> Floats:
    """Return one score per answer, ``[B]``, from those of k members, ``[k, B]``; one member alone is its own score.

    With R the scores and mu their mean over members, the mean is mu, WCO is min R, UWO is ``mu - uwo_weight * var R``
    with the variance over all k members, or k - 1 with ``uwo_unbiased``. ValueError that names member and answer for a
    score that is not finite. (Coste et al. 2024, arXiv 2310.02743, sec. 3.2.)
    """
    if len(broken := np.argwhere(~np.isfinite(scores))):
        member, row = broken[0]
        raise ValueError(f"reward model {member} of the ensemble scores answer {row} with {scores[member, row]}")
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
    """Return the variance between members, ``[k, B]`` to ``[B]``; 0 where there is one member."""
    return scores.var(axis=0, ddof=int(unbiased and len(scores) > 1))


def rescaled(scores: Floats, scales: Sequence[Scale]) -> Floats:
    """Return every member's scores, ``[k, B]``, with their usual mean taken off, over their usual deviation."""
    means, stds = (np.array([[vars(scale)[name]] for scale in scales]) for name in ("mean", "std"))
    return (scores - means) / stds


def read_scale(folder: str | Path) -> Scale:
    """Return what a reward model's scores were on the held-out rows of its training: their unbiased deviation.

    UserError where the folder does not say, or all scores were equal.
    """
    path = Path(folder) / EVALUATION
    advice = "train it with dataset.eval_share or dataset.eval_path, or set ensemble.normalise=False"
    try:
        found = json.loads(path.read_text())
        mean, square = (found["metrics"][f"rw_eval/{name}"] for name in ("score", "score_sq"))
        count = found["counts"]["rw_eval/score"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} does not say how the model's scores are spread; {advice}") from None
    spread = max(0.0, square - mean**2) * count / max(1.0, count - 1)
    if not (math.isfinite(mean) and spread > 0):
        raise UserError(f"{path}: mean {mean} and variance {spread} of scores cannot be brought to 0 and 1; {advice}")
    return Scale(mean, math.sqrt(spread))
