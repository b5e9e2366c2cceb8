"""What a user can set about learning from judgements of answers: reward models and their scores, DPO and its kin."""

from dataclasses import dataclass
from enum import Enum

from realhf.api.config.choices import StepSplitter
from realhf.api.config.option import opt

KTO_KL_KEYS = {"kl_tokens": "tokens", "kl_prompt_mask": "prompt_mask"}
"""Keys of prompts with answers that belong to others, and what an interface calls them."""


class RewardModelType(Enum):
    """What a reward model learns from: pairs, lists from best to worst, labelled answers, or labelled steps."""

    pairs = "pairs"
    ranked = "ranked"
    outcome = "outcome"
    process = "process"


class Aggregate(Enum):
    """How the scores of an answer's steps become one."""

    min = "min"
    prod = "prod"
    last = "last"
    mean = "mean"


@dataclass
class RWConfig:
    """What a reward model learns (sources in algorithms/reward_model/reward_loss.py)."""

    type: RewardModelType = opt(RewardModelType.pairs, "what the data hold: pairs, ranked, outcome or process")
    score_l2_reg: float = opt(0.0, "pulls scores of pairs and ranked lists towards 0 (Open-Assistant: 0.001)")


@dataclass
class ScoreConfig:
    """How answers are scored with a reward model."""

    type: RewardModelType = opt(RewardModelType.pairs, "what the reward model learned: pairs, ranked, outcome, process")
    aggregate: Aggregate = opt(Aggregate.min, "how the steps' scores become the answer's (process)")
    step_splitter: StepSplitter = opt(StepSplitter.line, "what a step is: line or latex (process)")
    normalise: bool = opt(False, "scores of held-out answers get mean 0 and deviation 1, before bias and scaling")


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
    """Learning from preferences without a reward model (formulas in algorithms/preference/preference_loss.py)."""

    loss: PreferenceLoss = opt(PreferenceLoss.sigmoid, "sigmoid (DPO), positive (DPO-Positive), ipo, kto, orpo, simpo")
    beta: float = opt(0.1, "scale of implicit rewards; of ipo its tau, of orpo the weight of the odds ratio")
    label_smoothing: float = opt(0.0, "share of pairs that are taken to be the wrong way round (sigmoid, positive)")
    positive_lambda: float = opt(50.0, "weight of the drop of the chosen answer below the reference (positive)")
    simpo_gamma: float = opt(1.0, "margin that the chosen answer's reward must have (simpo)")
    desirable_weight: float = opt(1.0, "weight of good answers (kto)")
    undesirable_weight: float = opt(1.0, "weight of bad answers (kto)")
    unpaired: bool = opt(False, "the data are prompt, answer, label instead of pairs (kto)")
