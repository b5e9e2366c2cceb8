"""Options of reward-model ensembles."""

from dataclasses import dataclass
from enum import Enum

from realhf.api.config.option import opt


class Objective(Enum):
    """How the scores of the members are combined: mean, worst-case or uncertainty-weighted optimization."""

    mean = "mean"
    WCO = "WCO"
    UWO = "UWO"


@dataclass
class EnsembleConfig:
    """Reward models that score the same responses (Coste et al. 2024, arXiv 2310.02743)."""

    members: list[str] = opt(list, "Hugging Face folders of the reward models; their other options are those of rew")
    objective: Objective = opt(Objective.mean, "mean, WCO (minimum), or UWO (mean - uwo_weight * variance)")
    uwo_weight: float = opt(0.1, "weight of the variance over members (UWO)")
    uwo_unbiased: bool = opt(False, "divide the variance by members - 1 instead of members")
