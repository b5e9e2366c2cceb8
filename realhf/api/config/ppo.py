"""Options of generation and of policy-gradient algorithms."""

from dataclasses import dataclass

from realhf.api.config.choices import (
    Advantage,
    Delta,
    GroupStd,
    KLEstimator,
    KLPlace,
    LossAggregation,
    PolicyLoss,
    StepSplitter,
    ValueNormType,
)
from realhf.api.config.option import opt


@dataclass
class GenerationConfig:
    """How answers are sampled."""

    n: int = opt(1, "answers per prompt (gen only; PPO uses group_size)")
    max_new_tokens: int = opt(256, "longest answer, in tokens, its stop token included")
    min_new_tokens: int = opt(0, "no stop token is sampled before this many tokens")
    greedy: bool = opt(False, "take the most likely token")
    top_p: float = opt(1.0, "nucleus mass, in (0, 1]")
    top_k: int = opt(0, "only the k most likely tokens, 0 for all")
    temperature: float = opt(1.0, "divides the logits; 0 means greedy")
    stop_token_ids: list[int] = opt(list, "further tokens that end an answer, beside the tokenizer's EOS")
    max_num_seqs: int = opt(256, "rows decoded at a time; finished rows make room for the next prompts")


@dataclass
class PRMRewardConfig:
    """What the steps of an answer add to its reward, by a process reward model (algorithms/policy_gradient/prm_rewards.py)."""

    alpha: float = opt(1.0, "weight of step rewards beside the answer's own")
    clip: bool = opt(False, "step rewards become min(q - eta, 0): good steps earn nothing")
    eta: float | None = opt(None, "threshold of clip (default: the mean of all steps of the batch)")
    delta: Delta = opt(Delta.none, "none, paper (q_k - q_k+1) or potential (q_k+1 - q_k)")
    step_splitter: StepSplitter = opt(StepSplitter.line, "what a step is: line or latex")


@dataclass
class PPOConfig:
    """PPO with its tricks (sources in docs and in algorithms/policy_gradient/ppo_formulas.py)."""

    gen: GenerationConfig = opt(GenerationConfig, "sampling")
    ppo_n_minibatches: int = opt(4, "optimizer steps per batch")
    group_size: int = opt(1, "answers per prompt that are trained on")
    generation_size: int | None = opt(None, "answers drawn per prompt; the group_size best by (reward, length) stay")
    kl_ctl: float = opt(0.1, "KL coefficient")
    kl_in: KLPlace = opt(KLPlace.reward, "where the KL penalty goes: reward, loss, or none (no reference at all)")
    kl_reward_estimator: KLEstimator = opt(KLEstimator.k1, "estimate of the KL in the reward")
    kl_loss_estimator: KLEstimator = opt(KLEstimator.k3, "estimate of the KL in the loss")
    kl_loss_aggregation: LossAggregation | None = opt(
        None, "how the KL in the loss is averaged (default: as loss_aggregation)"
    )
    kl_loss_clip: float | None = opt(None, "the KL of a token in the loss is held within 0 and this")
    kl_monitor: list[KLEstimator] = opt(list, "estimates reported beside k1")
    use_adaptive_kl_ctl: bool = opt(False, "adapt the KL coefficient towards adaptive_kl_target")
    adaptive_kl_target: float = opt(6.0, "KL per answer that the controller aims at, in nats")
    adaptive_kl_horizon: float = opt(10000.0, "answers over which the controller acts")
    discount: float = opt(1.0, "gamma of GAE")
    gae_lambda: float = opt(1.0, "lambda of GAE")
    eps_clip: float = opt(0.2, "ratio clip of the actor")
    eps_clip_high: float | None = opt(None, "upper ratio clip (default: eps_clip)")
    policy_loss: PolicyLoss = opt(PolicyLoss.clip, "clip (PPO), sequence_clip (GSPO), cispo, or reinforce (no ratio)")
    loss_aggregation: LossAggregation = opt(
        LossAggregation.token_mean, "token_mean, seq_mean, seq_sum, or constant (over loss_length)"
    )
    loss_length: float | None = opt(
        None, "what loss_aggregation=constant divides sums by (default: gen.max_new_tokens)"
    )
    advantage: Advantage = opt(Advantage.gae, "gae, group (GRPO), rloo, baseline (ReMax), given, or process (steps)")
    group_std: GroupStd = opt(GroupStd.population, "of advantage=group: population, sample, or none (only centred)")
    recompute_logprobs: bool = opt(
        False, "the trainer computes old log-probs itself; the generator's are corrected for"
    )
    is_weight_cap: float = opt(2.0, "with recompute_logprobs: cap of the weights p_trainer / p_generator")
    dynamic_sampling: bool = opt(
        False, "prompts whose answers all have the same reward are not trained on; others are drawn in their place"
    )
    max_resamples: int = opt(8, "with dynamic_sampling: how often a step draws more prompts until its batch is full")
    overlong_buffer: int = opt(0, "answers lose reward over this many last tokens before max_new_tokens")
    overlong_penalty: float = opt(1.0, "what the longest answer loses, with overlong_buffer")
    prm: PRMRewardConfig = opt(PRMRewardConfig, "rewards of steps, where there is a process reward model (prm)")
    value_eps_clip: float = opt(0.2, "clip of the critic around its old values")
    value_loss_type: str = opt("mse", "mse or huber")
    max_reward_clip: float = opt(20.0, "clip of the scaled reward")
    reward_output_scaling: float = opt(1.0, "reward = (score - bias) * scaling")
    reward_output_bias: float = opt(0.0, "reward = (score - bias) * scaling")
    early_stop_imp_ratio: float | None = opt(5.0, "skip a mini-batch whose mean ratio exceeds this")
    early_stop_kl: float | None = opt(None, "skip a mini-batch whose approximate KL exceeds this")
    adv_norm: bool = opt(True, "normalise advantages over the whole batch")
    group_adv_norm: bool = opt(False, "normalise advantages over each prompt's group instead")
    adv_norm_unbiased: bool = opt(False, "adv_norm divides by sqrt(unbiased variance + 1e-8), as VinePPO does")
    value_norm: bool = opt(True, "the critic predicts normalised returns")
    value_norm_type: ValueNormType = opt(ValueNormType.exp, "exp (moving) or ma (all history)")
    value_norm_beta: float = opt(0.99995, "decay of the exp statistics")
    value_norm_eps: float = opt(1e-5, "guard of the statistics")
    ref_ema_eta: float | None = opt(None, "after each step the reference moves by this much towards the actor")
    disable_value: bool = opt(False, "no critic: advantages from returns alone")
    mask_no_eos_with_zero: bool = opt(False, "a truncated answer gets score 0")
    mask_too_long: bool = opt(False, "a truncated answer is not trained on")


@dataclass
class EvaluationConfig:
    """How held-out prompts are answered; lengths, stop tokens and slots are those of ppo.gen."""

    n: int = opt(1, "answers per held-out prompt")
    greedy: bool = opt(True, "take the most likely token")
    top_p: float = opt(1.0, "nucleus mass, in (0, 1]")
    top_k: int = opt(0, "only the k most likely tokens, 0 for all")
    temperature: float = opt(1.0, "divides the logits; 0 means greedy")


@dataclass
class VineConfig:
    """How states between an answer's steps are valued (VinePPO)."""

    n_rollouts: int = opt(9, "rollouts from every state")
    step_splitter: StepSplitter = opt(StepSplitter.line, "what a step is: line (GSM8K), or latex (sentences of MATH)")
    max_states: int | None = opt(None, "states of one answer at the most; later ones count as what it came to")
