"""What a user can set about several reward models that score together."""

from dataclasses import dataclass
from enum import Enum

from realhf.api.config.option import opt


class Objective(Enum):
    """One score from those of all members: their mean, the worst case, or the mean less their variance."""

    mean = "mean"
    WCO = "WCO"
    UWO = "UWO"


@dataclass
class EnsembleConfig:
    """Reward models that score the same answers (Coste et al. 2024, arXiv 2310.02743)."""

    members: list[str] = opt(list, "Hugging Face folders of reward models; their other options are those of rew")
    objective: Objective = opt(Objective.mean, "mean, WCO (the lowest score), or UWO (mean - uwo_weight * variance)")
    uwo_weight: float = opt(0.1, "weight of the variance between members, 0 for the mean (UWO)")
    uwo_unbiased: bool = opt(False, "the variance is divided by members - 1 instead of members")
