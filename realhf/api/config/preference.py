"""Options of preference learning: reward models, their ensembles, DPO and related algorithms."""

from dataclasses import dataclass
from enum import Enum

from realhf.api.config import StepSplitter
from realhf.api.config.option import FINITE, MODEL, NON_NEGATIVE, POSITIVE, Range, opt

KTO_KL_KEYS = {"kl_tokens": "tokens", "kl_prompt_mask": "prompt_mask"}
"""Keys of the mismatched prompt-response pairs of KTO's KL term, and their interface keys."""


class RewardModelType(Enum):
    pairs = "pairs"
    ranked = "ranked"
    outcome = "outcome"
    process = "process"


class Aggregate(Enum):
    """How step scores are combined into the score of a response."""

    min = "min"
    prod = "prod"
    last = "last"
    mean = "mean"


@dataclass
class RWConfig:
    """Reward-model training (sources in algorithms/reward_model/reward_model.py)."""

    type: RewardModelType = opt(RewardModelType.pairs, "type of the training data: pairs, ranked, outcome or process")
    score_l2_reg: float = opt(0.0, "L2 regularization of scores (pairs, ranked; Open-Assistant: 0.001)", NON_NEGATIVE)


@dataclass
class ScoreConfig:
    type: RewardModelType = opt(RewardModelType.pairs, "type of the reward model: pairs, ranked, outcome or process")
    aggregate: Aggregate = opt(Aggregate.min, "aggregation of step scores: min, prod, last or mean (process)")
    step_splitter: StepSplitter = opt(StepSplitter.line, "unit of a step: line or latex (process)")
    normalise: bool = opt(False, "normalize scores to mean 0 and std 1 on held-out rows, before bias and scaling")


class Objective(Enum):
    """How the scores of the members are combined: mean, worst-case or uncertainty-weighted optimization."""

    mean = "mean"
    WCO = "WCO"
    UWO = "UWO"


@dataclass
class EnsembleConfig:
    """Reward models that score the same responses (Coste et al. 2024, arXiv 2310.02743)."""

    members: list[str] = opt(list, "folders of the reward models; their other options are those of rew", MODEL)
    objective: Objective = opt(Objective.mean, "mean, WCO (minimum), or UWO (mean - uwo_weight * variance)")
    uwo_weight: float = opt(0.1, "weight of the variance over members (UWO)", NON_NEGATIVE)
    uwo_unbiased: bool = opt(False, "divide the variance by members - 1 instead of members")


class PreferenceLoss(Enum):
    sigmoid = "sigmoid"
    positive = "positive"
    ipo = "ipo"
    kto = "kto"
    orpo = "orpo"
    simpo = "simpo"

    @property
    def needs_ref(self) -> bool:
        return self not in (PreferenceLoss.orpo, PreferenceLoss.simpo)


@dataclass
class DPOConfig:
    """Preference learning without a reward model (formulas in algorithms/preference/preference_loss.py)."""

    loss: PreferenceLoss = opt(PreferenceLoss.sigmoid, "sigmoid (DPO), positive (DPO-Positive), ipo, kto, orpo, simpo")
    beta: float = opt(0.1, "scale of the implicit reward; tau of ipo; weight of the odds ratio of orpo", POSITIVE)
    label_smoothing: float = opt(0.0, "fraction of flipped labels (sigmoid, positive)", Range(0, 0.5, high_open=True))
    positive_lambda: float = opt(50.0, "penalty on chosen responses below the reference (positive)", NON_NEGATIVE)
    simpo_gamma: float = opt(1.0, "target reward margin (simpo)", FINITE)
    desirable_weight: float = opt(1.0, "loss weight of desirable responses (kto)", NON_NEGATIVE)
    undesirable_weight: float = opt(1.0, "loss weight of undesirable responses (kto)", NON_NEGATIVE)
    unpaired: bool = opt(False, "rows of the dataset are prompt, answer, label instead of pairs (kto)")
