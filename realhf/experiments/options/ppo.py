"""What options of PPO and its kin contradict, and which are known not to do what they seem to."""

from dataclasses import replace

from realhf.api.config import (
    Advantage,
    EvaluationConfig,
    GenerationConfig,
    KLEstimator,
    KLPlace,
    PolicyLoss,
    PPOConfig,
)
from realhf.experiments.options.sampling import sampling_problems


def ppo_problems(ppo: PPOConfig, batch: int) -> list[str]:
    """Return one line per option of ``ppo`` that cannot be, with ``batch`` prompts per step."""
    advantage, longest = ppo.advantage.value, ppo.gen.max_new_tokens
    has_ref = ppo.kl_in is not KLPlace.none
    grouped = ppo.advantage in (Advantage.group, Advantage.rloo)
    checks = [
        (ppo.group_size >= 1, f"ppo.group_size must be positive, got {ppo.group_size}"),
        (ppo.generation_size is None or ppo.generation_size >= ppo.group_size,
         f"ppo.generation_size={ppo.generation_size} is smaller than ppo.group_size={ppo.group_size}"),
        (not ppo.group_adv_norm or ppo.group_size > 1, "ppo.group_adv_norm needs ppo.group_size > 1"),
        (not grouped or ppo.group_size > 1, f"ppo.advantage={advantage} compares answers: it needs ppo.group_size > 1"),
        (ppo.advantage is Advantage.gae or ppo.disable_value,
         f"ppo.advantage={advantage} has no use for a critic: set ppo.disable_value=True"),
        (not ppo.dynamic_sampling or ppo.group_size > 1, "ppo.dynamic_sampling needs ppo.group_size > 1"),
        (ppo.max_resamples >= 0, f"ppo.max_resamples must not be negative, got {ppo.max_resamples}"),
        (1 <= ppo.ppo_n_minibatches <= batch,
         f"ppo.ppo_n_minibatches={ppo.ppo_n_minibatches} does not fit dataset.train_bs_n_seqs={batch}"),
        (0 <= ppo.discount <= 1, f"ppo.discount must be in [0, 1], got {ppo.discount}"),
        (0 <= ppo.gae_lambda <= 1, f"ppo.gae_lambda must be in [0, 1], got {ppo.gae_lambda}"),
        (ppo.ref_ema_eta is None or 0 <= ppo.ref_ema_eta <= 1,
         f"ppo.ref_ema_eta must be in [0, 1], got {ppo.ref_ema_eta}"),
        (has_ref or ppo.ref_ema_eta is None, "ppo.ref_ema_eta: with ppo.kl_in=none nothing follows"),
        (ppo.eps_clip > 0, f"ppo.eps_clip must be positive, got {ppo.eps_clip}"),
        (ppo.eps_clip_high is None or ppo.eps_clip_high > 0,
         f"ppo.eps_clip_high must be positive, got {ppo.eps_clip_high}"),
        (ppo.value_eps_clip > 0, f"ppo.value_eps_clip must be positive, got {ppo.value_eps_clip}"),
        (ppo.kl_ctl >= 0, f"ppo.kl_ctl must not be negative, got {ppo.kl_ctl}"),
        (ppo.kl_loss_clip is None or ppo.kl_loss_clip > 0,
         f"ppo.kl_loss_clip must be positive, got {ppo.kl_loss_clip}"),
        (has_ref or not ppo.kl_monitor, "ppo.kl_monitor: with ppo.kl_in=none there is no reference"),
        (ppo.is_weight_cap > 0, f"ppo.is_weight_cap must be positive, got {ppo.is_weight_cap}"),
        (ppo.loss_length is None or ppo.loss_length > 0, f"ppo.loss_length must be positive, got {ppo.loss_length}"),
        (0 <= ppo.overlong_buffer <= longest,
         f"ppo.overlong_buffer={ppo.overlong_buffer} must be between 0 and ppo.gen.max_new_tokens={longest}"),
        (ppo.value_loss_type in ("mse", "huber"),
         f"ppo.value_loss_type must be mse or huber, got {ppo.value_loss_type}"),
        (ppo.gen.n == 1, f"ppo.gen.n={ppo.gen.n} is for the experiment gen; set ppo.group_size"),
    ]  # fmt: skip
    return [line for holds, line in checks if not holds] + sampling_problems("ppo.gen", ppo.gen)


def eval_sampling(gen: GenerationConfig, evaluation: EvaluationConfig) -> GenerationConfig:
    """Return how held-out prompts are answered: as in rollout, but for what ``evaluation`` says."""
    return replace(gen, n=evaluation.n, greedy=evaluation.greedy, top_p=evaluation.top_p, top_k=evaluation.top_k,
                   temperature=evaluation.temperature)  # fmt: skip


def eval_problems(evaluation: EvaluationConfig, holds_out: bool) -> list[str]:
    """Return what the options of an evaluation contradict, one line each."""
    if evaluation == EvaluationConfig():
        return []
    if not holds_out:
        return ["evaluation has options, but no rows are held out: set dataset.eval_path or dataset.eval_fraction"]
    problems = sampling_problems("evaluation", eval_sampling(GenerationConfig(), evaluation))
    if evaluation.n > 1 and (evaluation.greedy or evaluation.temperature == 0):
        problems.append(f"evaluation.n={evaluation.n}: greedy answers are all the same; set evaluation.greedy=False "
                        "and a temperature")  # fmt: skip
    return problems


def ppo_warnings(ppo: PPOConfig, max_staleness: int) -> list[str]:
    """Return one line per choice that works and is known to be wrong, with the reason."""
    in_loss, in_reward = (ppo.kl_in is place and ppo.kl_ctl > 0 for place in (KLPlace.loss, KLPlace.reward))
    loss, reward = ppo.kl_loss_estimator, ppo.kl_reward_estimator
    stale = max_staleness > 0
    checks = [
        (in_loss and loss is KLEstimator.k1,
         "ppo.kl_loss_estimator=k1: its expected gradient is 0 on-policy, and off-policy pushes away from the old "
         "policy; k2 has the gradient of the KL"),
        (in_loss and loss is KLEstimator.k2 and stale,
         "ppo.kl_loss_estimator=k2 with max_staleness: biased on answers of an older policy; k4 is not"),
        (in_reward and reward in (KLEstimator.k2, KLEstimator.k3),
         f"ppo.kl_reward_estimator={reward.value}: in the reward only k1 has the gradient of the KL"),
        (stale and not ppo.recompute_logprobs and ppo.policy_loss is not PolicyLoss.reinforce,
         "max_staleness without ppo.recompute_logprobs: ratios are clipped around the old generator, not around the "
         "policy that training starts from"),
        (stale and ppo.policy_loss is PolicyLoss.reinforce and not ppo.recompute_logprobs,
         "max_staleness with ppo.policy_loss=reinforce: nothing corrects for answers of an older policy; "
         "set ppo.recompute_logprobs=True"),
    ]  # fmt: skip
    return [line for holds, line in checks if holds]
