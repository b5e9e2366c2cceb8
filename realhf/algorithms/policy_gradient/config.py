"""Options of policy-gradient algorithms. Imports no torch: options are checked without it."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from realhf.algorithms.distillation.options import DistillConfig
from realhf.algorithms.policy_gradient.advantages import ADVANTAGES
from realhf.algorithms.policy_gradient.components import help_text, options_class
from realhf.algorithms.policy_gradient.length_penalties import LENGTH_PENALTIES
from realhf.algorithms.policy_gradient.losses.corrections import CORRECTIONS
from realhf.algorithms.policy_gradient.losses.policy_losses import POLICY_LOSSES
from realhf.api.config import GenerationConfig
from realhf.api.config.choices import (
    Delta,
    KLEstimator,
    KLPlace,
    LossAggregation,
    StepSplitter,
    ValueLossType,
    ValueNormType,
)
from realhf.api.config.option import CAP, COUNT, DECAY, FINITE, FRACTION, NATURAL, NON_NEGATIVE, POSITIVE, opt

if TYPE_CHECKING:  # type checkers cannot read members and fields from a dict

    class PolicyLoss(Enum): ...

    class Advantage(Enum): ...

    class Importance(Enum): ...

    class LengthPenalty(Enum): ...

    PolicyLossOptions = Any
    AdvantageOptions = Any
    CorrectionOptions = Any
    LengthPenaltyOptions = Any
else:
    PolicyLoss = Enum("PolicyLoss", {name: name for name in POLICY_LOSSES})
    Advantage = Enum("Advantage", {name: name for name in ADVANTAGES})
    Importance = Enum("Importance", {name: name for name in CORRECTIONS})
    LengthPenalty = Enum("LengthPenalty", {name: name for name in LENGTH_PENALTIES})
    LengthPenaltyOptions = options_class("LengthPenaltyOptions", LENGTH_PENALTIES)
    PolicyLossOptions = options_class("PolicyLossOptions", POLICY_LOSSES)
    AdvantageOptions = options_class("AdvantageOptions", ADVANTAGES)
    CorrectionOptions = options_class("CorrectionOptions", CORRECTIONS)


@dataclass
class PRMRewardConfig:
    """Step rewards from a process reward model (algorithms/policy_gradient/prm_rewards.py)."""

    alpha: float = opt(1.0, "weight of the step rewards relative to the outcome reward", FINITE)
    clip: bool = opt(False, "clip step rewards to min(q - eta, 0)")
    eta: float | None = opt(None, "threshold of clip (default: mean over all steps of the batch)", FINITE)
    delta: Delta = opt(Delta.none, "differences of step rewards: none, paper (q_k - q_k+1) or potential (q_k+1 - q_k)")
    step_splitter: StepSplitter = opt(StepSplitter.line, "unit of a step: line or latex")


@dataclass
class PPOConfig:
    """PPO and related algorithms (sources in docs and in algorithms/policy_gradient/ppo_formulas.py)."""

    gen: GenerationConfig = opt(GenerationConfig, "sampling")
    ppo_n_minibatches: int = opt(4, "number of optimizer steps per batch", COUNT)
    group_size: int = opt(1, "number of responses per prompt used for training", COUNT)
    generation_size: int | None = opt(None, "sampled responses per prompt; the best group_size are used", COUNT)
    kl_ctl: float = opt(0.1, "KL coefficient", NON_NEGATIVE)
    kl_in: KLPlace = opt(KLPlace.reward, "place of the KL penalty: reward, loss, or none (no reference model)")
    kl_reward_estimator: KLEstimator = opt(KLEstimator.k1, "KL estimator in the reward")
    kl_loss_estimator: KLEstimator = opt(KLEstimator.k3, "KL estimator in the loss")
    kl_loss_aggregation: LossAggregation | None = opt(None, "aggregation of the KL loss (default: loss_aggregation)")
    kl_loss_clip: float | None = opt(None, "the per-token KL loss is clamped to [0, this]", POSITIVE)
    kl_monitor: list[KLEstimator] = opt(list, "KL estimators reported as metrics, in addition to k1")
    use_adaptive_kl_ctl: bool = opt(False, "adapt the KL coefficient towards adaptive_kl_target")
    adaptive_kl_target: float = opt(6.0, "target KL per response in nats", POSITIVE)
    adaptive_kl_horizon: float = opt(10000.0, "horizon of the adaptive KL controller in responses", POSITIVE)
    discount: float = opt(1.0, "discount factor gamma of GAE", FRACTION)
    gae_lambda: float = opt(1.0, "lambda of GAE", FRACTION)
    critic_gae_lambda: float | None = opt(None, "lambda of the critic's targets (default: gae_lambda)", FRACTION)
    gae_lambda_alpha: float | None = opt(None, "lambda of the actor is 1 - 1 / (this * response length), as in VAPO",
                                         POSITIVE)  # fmt: skip
    value_pretrain_steps: int = opt(0, "number of first steps in which only the critic is trained (VC-PPO)", NATURAL)
    eps_clip: float = opt(0.2, "clip range of the policy ratio", CAP)
    eps_clip_high: float | None = opt(None, "upper clip range of the policy ratio (default: eps_clip)", CAP)
    policy_loss: PolicyLoss = opt(PolicyLoss["clip"], help_text(POLICY_LOSSES))
    losses: PolicyLossOptions = opt(PolicyLossOptions, "options of single policy losses")
    loss_aggregation: LossAggregation = opt(LossAggregation.token_mean, "token_mean, seq_mean, seq_sum, or constant")
    loss_length: float | None = opt(None, "divisor of loss_aggregation=constant (default: max_new_tokens)", POSITIVE)
    advantage: Advantage = opt(Advantage["gae"], help_text(ADVANTAGES))
    advantages: AdvantageOptions = opt(AdvantageOptions, "options of single advantage estimators")
    recompute_logprobs: bool = opt(False, "recompute old log-probs in the trainer, with importance weights")
    is_weight_cap: float = opt(2.0, "cap of the importance weights p_trainer / p_generator (recompute_logprobs)", CAP)
    importance: Importance = opt(Importance["tis"], f"with recompute_logprobs: {help_text(CORRECTIONS)}")
    corrections: CorrectionOptions = opt(CorrectionOptions, "options of single corrections")
    router_replay: bool = opt(False, "train the actor with the routed experts of the rollout (MoE)")
    dynamic_sampling: bool = opt(False, "replace prompts whose responses all have the same reward by further prompts")
    max_resamples: int = opt(8, "maximum number of resamples per step (dynamic_sampling)", NATURAL)
    length_penalty: LengthPenalty = opt(LengthPenalty["none"], help_text(LENGTH_PENALTIES))
    length_penalties: LengthPenaltyOptions = opt(LengthPenaltyOptions, "options of single length penalties")
    overlong_buffer: int = opt(0, "tokens before max_new_tokens over which the length penalty grows", NATURAL)
    overlong_penalty: float = opt(1.0, "penalty of a response of max_new_tokens (overlong_buffer)", NON_NEGATIVE)
    entropy_coef: float = opt(0.0, "weight of the entropy in the loss: positive for an entropy bonus", FINITE)
    distill: DistillConfig = opt(DistillConfig, "distillation from a teacher (teacher.path, or distill.prompt)")
    prm: PRMRewardConfig = opt(PRMRewardConfig, "step rewards of the process reward model (prm)")
    value_eps_clip: float = opt(0.2, "clip range of the values around the old values", CAP)
    value_loss_type: ValueLossType = opt(ValueLossType.mse, "value loss: mse or huber")
    max_reward_clip: float = opt(20.0, "clip range of the scaled reward", CAP)
    reward_output_scaling: float = opt(1.0, "scaling in reward = (score - bias) * scaling", FINITE)
    reward_output_bias: float = opt(0.0, "bias in reward = (score - bias) * scaling", FINITE)
    rm_output_scaling: float = opt(1.0, "scaling of a reward model's score that is added to the verifier's (rew.path "
                                        "with reward.fn)", FINITE)  # fmt: skip
    early_stop_imp_ratio: float | None = opt(5.0, "skip mini-batches whose mean ratio exceeds this", POSITIVE)
    early_stop_kl: float | None = opt(None, "skip mini-batches whose approximate KL exceeds this", POSITIVE)
    adv_norm: bool = opt(True, "normalize advantages over the batch")
    group_adv_norm: bool = opt(False, "normalize advantages over each prompt's group instead of the batch")
    adv_norm_unbiased: bool = opt(False, "adv_norm divides by sqrt(unbiased variance + 1e-8), as in VinePPO")
    value_norm: bool = opt(True, "train the critic on normalized returns")
    value_norm_type: ValueNormType = opt(ValueNormType.exp, "return statistics: exp (moving average) or ma (all steps)")
    value_norm_beta: float = opt(0.99995, "decay of value_norm_type=exp", DECAY)
    value_norm_eps: float = opt(1e-5, "epsilon of value normalization", POSITIVE)
    ref_ema_eta: float | None = opt(None, "EMA update of the reference: eta * actor + (1 - eta) * ref", FRACTION)
    actor_ema_eta: float | None = opt(None, "Polyak average that is evaluated and saved: eta * actor + (1 - eta) * "
                                            "average after each step", FRACTION)  # fmt: skip
    disable_value: bool = opt(False, "train without a critic: advantages from returns only")
    mask_no_eos_with_zero: bool = opt(False, "score truncated responses with 0")
    mask_too_long: bool = opt(False, "exclude truncated responses from training")


@dataclass
class VineConfig:
    """Monte Carlo value estimates of intermediate states (VinePPO)."""

    n_rollouts: int = opt(9, "number of rollouts per state", COUNT)
    step_splitter: StepSplitter = opt(StepSplitter.line, "unit of a step: line (GSM8K), or latex (MATH sentences)")
    max_states: int | None = opt(None, "maximum states per response; later ones get its reward", COUNT)
