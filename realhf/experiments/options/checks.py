"""Checks of options, one line per problem."""

import os
from collections.abc import Sequence
from math import inf

from realhf.algorithms.policy_gradient.advantages import ADVANTAGES
from realhf.algorithms.policy_gradient.config import PolicyLoss, PPOConfig
from realhf.algorithms.policy_gradient.length_penalties import LENGTH_PENALTIES
from realhf.algorithms.policy_gradient.losses.corrections import CORRECTIONS
from realhf.algorithms.policy_gradient.losses.policy_losses import POLICY_LOSSES
from realhf.api.config import (
    CurriculumConfig,
    DatasetConfig,
    EnvConfig,
    EvaluationConfig,
    GenerationConfig,
    KLEstimator,
    KLPlace,
    LLMJudgeConfig,
    RewardConfig,
)
from realhf.environments.loading import check_class
from realhf.environments.tool_calls import TOOL_CALL_PARSERS
from realhf.rewards.group.presets import GROUP_PRESETS, asks_model, check_group_fn, compares
from realhf.rewards.llm_judge.option_checks import judge_problems
from realhf.rewards.registry import (
    FORMAT,
    VERIFIERS,
    builtin_verifier,
    check_fn,
    fns_of,
    is_remote,
    names_of,
    weights_of,
)


def unmet(checks: Sequence[tuple[object, str]]) -> list[str]:
    """Return the messages of the conditions that do not hold."""
    return [message for holds, message in checks if not holds]


def sampling_problems(name: str, gen: GenerationConfig, n_responses: int | None = None) -> list[str]:
    """Return the invalid options of ``gen``, whose option group is ``name``; default: ``gen.n`` responses."""
    n = n_responses or gen.n
    return unmet([
        (gen.keep_first is None or gen.keep_first <= n,
         f"{name}.keep_first={gen.keep_first} is larger than the number of responses per prompt, {n}"),
        (gen.min_new_tokens <= gen.max_new_tokens,
         f"{name}.min_new_tokens={gen.min_new_tokens} is larger than {name}.max_new_tokens={gen.max_new_tokens}"),
    ])  # fmt: skip


def reward_problems(reward: RewardConfig, n_responses: int) -> list[str]:
    """Return the problems of the reward options, one line each, without running files or contacting services.

    ``n_responses`` is the number of responses to a prompt that are judged together.
    """
    fns = fns_of(reward)
    names = names_of([*fns, *([reward.group_fn] if reward.group_fn else [])])
    remote = any(map(is_remote, fns))
    problems = unmet([
        (not reward.fns or reward.fn in VERIFIERS,
         f"reward.fn={reward.fn} and reward.fns={reward.fns}: set only one of them"),
        (len(set(names)) == len(names),
         f"reward.fns{' and group_fn' if reward.group_fn else ''}: the names {', '.join(names)} must differ"),
        (not reward.weights or len(reward.weights) == len(fns),
         f"reward.weights has {len(reward.weights)} numbers, but there are {len(fns)} rewards (reward.fns)"),
        (not reward.format_reward or any(map(builtin_verifier, fns)),
         f"reward.format_reward needs one of the verifiers {', '.join(VERIFIERS)}; "
         f"with other functions use reward.fns=[...,'{FORMAT}REGEX']"),
        (not reward.token_env or remote, "reward.token_env is for services (reward.fn=http://host:port/path)"),
        (not (reward.token_env and remote) or bool(os.environ.get(reward.token_env)),
         f"reward.token_env={reward.token_env}: this environment variable is not set or empty"),
    ])  # fmt: skip
    patterns = [f"{FORMAT}{reward.format_reward}"] if reward.format_reward else []
    problems += [line for fn in [*fns, *patterns] for line in check_fn(fn)]
    return problems + group_problems(reward, n_responses)


def group_problems(reward: RewardConfig, n_responses: int) -> list[str]:
    """Return the problems of ``reward.group_fn`` and of the options of a language model."""
    group_fn = reward.group_fn
    if not group_fn:
        return unmet([
            (reward.judge == LLMJudgeConfig(), "reward.judge has options, but no reward.group_fn asks it"),
            (reward.group_weight == 1, "reward.group_weight has no effect without reward.group_fn"),
        ])  # fmt: skip
    if problems := check_group_fn(group_fn):
        return problems
    problems = unmet([
        (asks_model(group_fn) or reward.judge == LLMJudgeConfig(),
         f"reward.judge has options, but reward.group_fn={group_fn} asks no language model"),
        (n_responses > 1 or not compares(group_fn),
         f"reward.group_fn={group_fn} compares the responses to a prompt, but there is one; set ppo.group_size (or "
         "sampling.n)"),
    ])  # fmt: skip
    return problems + (judge_problems(group_fn, reward.judge) if asks_model(group_fn) else [])


def env_problems(env: EnvConfig, ppo: PPOConfig, max_staleness: int) -> list[str]:
    """Return the invalid options of multi-turn rollouts."""
    known = ", ".join(TOOL_CALL_PARSERS)
    return check_class(env.cls) + unmet([
        (env.tool_format in TOOL_CALL_PARSERS, f"env.tool_format={env.tool_format}: it must be one of {known}"),
        (not env.sandbox or not env.cls.startswith("realhf.environments.agents"),
         "env.sandbox=True has no network, and agents need one: isolate the program yourself, as in a container"),
        (not env.sandbox or not env.cls.startswith("realhf.environments.single_reply"),
         "env.sandbox=True has no files, and SingleReply loads its function later: code is isolated in any case"),
        (not (env.partial_tokens and max_staleness),
         "env.partial_tokens and max_staleness are set: a partial rollout already uses older weights"),
        (not (env.partial_tokens and ppo.dynamic_sampling),
         "env.partial_tokens and ppo.dynamic_sampling are set: unfinished prompts would be replaced"),
        (ppo.gen.min_new_tokens == 0, "ppo.gen.min_new_tokens is for single responses; not with env.cls"),
        (not ppo.gen.prompt_lookup_num_tokens,
         "ppo.gen.prompt_lookup_num_tokens is for single responses; not with env.cls"),
        (ppo.gen.keep_first is None, "ppo.gen.keep_first is for single responses; not with env.cls"),
        (not ppo.overlong_buffer, "ppo.overlong_buffer is for single responses; not with env.cls"),
        (ppo.length_penalty.value == "none", "ppo.length_penalty is for single responses; not with env.cls"),
        (ppo.gae_lambda_alpha is None, "ppo.gae_lambda_alpha is for single responses; not with env.cls"),
        (not ppo.router_replay, "ppo.router_replay is for single responses; not with env.cls"),
        (env.turn_discount == 1 or ppo.advantage.name in ("group", "rloo"),
         f"env.turn_discount={env.turn_discount} discounts scores of episodes: it needs ppo.advantage=group or rloo"),
    ])  # fmt: skip


def ppo_problems(ppo: PPOConfig, batch: int) -> list[str]:
    """Return one line per invalid option of ``ppo``, with ``batch`` prompts per step."""
    longest, has_ref = ppo.gen.max_new_tokens, ppo.kl_in is not KLPlace.none
    problems = unmet([
        (ppo.generation_size is None or ppo.generation_size >= ppo.group_size,
         f"ppo.generation_size={ppo.generation_size} is smaller than ppo.group_size={ppo.group_size}"),
        (ppo.gen.keep_first is None or ppo.generation_size is None or ppo.gen.keep_first >= ppo.group_size,
         f"ppo.gen.keep_first={ppo.gen.keep_first} is smaller than ppo.group_size={ppo.group_size}"),
        (not ppo.group_adv_norm or ppo.group_size > 1, "ppo.group_adv_norm needs ppo.group_size > 1"),
        (not ppo.dynamic_sampling or ppo.group_size > 1, "ppo.dynamic_sampling needs ppo.group_size > 1"),
        (ppo.ppo_n_minibatches <= batch,
         f"ppo.ppo_n_minibatches={ppo.ppo_n_minibatches} does not fit dataset.train_bs_n_seqs={batch}"),
        (has_ref or ppo.ref_ema_eta is None, "ppo.ref_ema_eta: ppo.kl_in=none has no reference to update"),
        (has_ref or not ppo.kl_monitor, "ppo.kl_monitor: ppo.kl_in=none has no reference"),
        (ppo.overlong_buffer <= longest,
         f"ppo.overlong_buffer={ppo.overlong_buffer} is larger than ppo.gen.max_new_tokens={longest}"),
        (not ppo.disable_value or not ppo.value_pretrain_steps,
         "ppo.value_pretrain_steps trains the critic, but ppo.disable_value=True"),
        (ppo.critic_gae_lambda is None or not ppo.disable_value,
         "ppo.critic_gae_lambda is for the critic, but ppo.disable_value=True"),
        (ppo.gae_lambda_alpha is None or ppo.advantage.value == "gae",
         f"ppo.gae_lambda_alpha is for ppo.advantage=gae, not {ppo.advantage.value}"),
        (ppo.recompute_logprobs or ppo.importance.value == "tis",
         f"ppo.importance={ppo.importance.value} has no effect without ppo.recompute_logprobs=True"),
        (ppo.gen.n == 1, f"ppo.gen.n={ppo.gen.n} is for the experiment gen; set ppo.group_size"),
    ])  # fmt: skip
    problems += POLICY_LOSSES[ppo.policy_loss.value].check(ppo) + ADVANTAGES[ppo.advantage.value].check(ppo)
    problems += CORRECTIONS[ppo.importance.value].check(ppo) + LENGTH_PENALTIES[ppo.length_penalty.value].check(ppo)
    return problems + sampling_problems("ppo.gen", ppo.gen, ppo.generation_size or ppo.group_size)


def unused_curriculum(data: DatasetConfig, name: str) -> list[str]:
    """Return a problem if an experiment that reads every row once has several sources or a curriculum."""
    is_plain = not data.paths and data.curriculum == CurriculumConfig()
    return [] if is_plain else [f"dataset.paths and dataset.curriculum: {name} reads every row of dataset.path once"]


def eval_problems(evaluation: EvaluationConfig, holds_out: bool) -> list[str]:
    is_greedy = evaluation.greedy or evaluation.temperature == 0
    return unmet([
        (holds_out or evaluation == EvaluationConfig(),
         "evaluation has options, but there are no held-out rows: set dataset.eval_path or dataset.eval_fraction"),
        (not holds_out or evaluation.n == 1 or not is_greedy,
         f"evaluation.n={evaluation.n}: greedy responses are all the same; set evaluation.greedy=False and a "
         "temperature"),
    ])  # fmt: skip


def score_range(reward: RewardConfig) -> tuple[float, float]:
    """Return the lowest and the highest score of a response, infinite for functions of the user."""
    low = high = 0.0
    for fn, weight in zip(fns_of(reward), weights_of(reward), strict=True):
        scores = [-inf, inf]
        if builtin_verifier(fn):
            formatted = (reward.wrong_formatted_reward, reward.right_unformatted_reward) if reward.format_reward else ()
            scores = [reward.wrong_reward, reward.right_reward, *(s for s in formatted if s is not None)]
        elif fn.startswith(FORMAT):
            scores = [0.0, 1.0]
        weighted = [weight * score for score in scores] if weight else [0.0]
        low, high = low + min(weighted), high + max(weighted)
    if reward.group_fn and (weight := reward.group_weight):
        weighted = [weight * score for score in ((0.0, 1.0) if reward.group_fn in GROUP_PRESETS else (-inf, inf))]
        low, high = low + min(weighted), high + max(weighted)
    return low, high


def truncation_warnings(ppo: PPOConfig, scores: tuple[float, float]) -> list[str]:
    """Return a warning if a truncated response has a higher reward than finished ones may have.

    ``scores`` are the lowest and the highest score of a response.
    """
    truncated = -ppo.overlong_penalty if ppo.overlong_buffer else 0.0
    lowest = min((score - ppo.reward_output_bias) * ppo.reward_output_scaling for score in scores)
    if not ppo.mask_no_eos_with_zero or ppo.mask_too_long or truncated <= lowest:
        return []
    return [f"ppo.mask_no_eos_with_zero=True: the reward of a truncated response is {truncated:g}, that of a finished "
            f"one can be {lowest:g}, so the policy may learn not to finish; exclude truncated responses with "
            "ppo.mask_too_long=True, or use rewards that are not lower"]  # fmt: skip


def env_warnings(env: EnvConfig, ppo: PPOConfig) -> list[str]:
    """Return a warning if tokens of older weights are trained without correction."""
    if env.partial_tokens is None or ppo.recompute_logprobs:
        return []
    return ["env.partial_tokens without ppo.recompute_logprobs: tokens of older weights have no importance weights; "
            "set ppo.recompute_logprobs=True"]  # fmt: skip


def ppo_warnings(ppo: PPOConfig, max_staleness: int) -> list[str]:
    """Return one line per combination of options that runs but is known to be biased or ineffective."""
    in_loss, in_reward = (ppo.kl_in is place and ppo.kl_ctl > 0 for place in (KLPlace.loss, KLPlace.reward))
    loss, reward = ppo.kl_loss_estimator, ppo.kl_reward_estimator
    uncorrected = max_staleness > 0 and not ppo.recompute_logprobs
    has_ratio = ppo.policy_loss is not PolicyLoss["reinforce"]
    is_weighted = ppo.recompute_logprobs and ppo.importance.value != "none"
    checks = [
        (in_loss and loss is KLEstimator.k1,
         "ppo.kl_loss_estimator=k1: its expected gradient is 0 on-policy, and off-policy it points away from the old "
         "policy; k2 has the gradient of the KL"),
        (in_loss and loss in (KLEstimator.k2, KLEstimator.k3) and max_staleness > 0,
         f"ppo.kl_loss_estimator={loss.value} with max_staleness: biased on responses of an older policy; "
         "k4 is not (without ppo.recompute_logprobs)"),
        (in_reward and reward in (KLEstimator.k2, KLEstimator.k3),
         f"ppo.kl_reward_estimator={reward.value}: in the reward only k1 has the gradient of the KL"),
        (in_reward and ppo.group_adv_norm and not ppo.dynamic_sampling,
         "ppo.group_adv_norm with ppo.kl_in=reward: where all responses to a prompt have one score, only the KL "
         "penalty differs, and it is scaled to variance 1; set ppo.kl_in=loss or ppo.dynamic_sampling=True"),
        (uncorrected and has_ratio,
         "max_staleness without ppo.recompute_logprobs: ratios are clipped around the old generator instead of the "
         "policy before the first optimizer step"),
        (uncorrected and not has_ratio,
         "max_staleness with ppo.policy_loss=reinforce: no correction for responses of an older policy; "
         "set ppo.recompute_logprobs=True"),
        (ppo.gen.is_rounded and not is_weighted,
         "ppo.gen.weight_dtype or ppo.gen.kv_cache_dtype without importance weights: the model that samples is not the "
         "one that is trained; set ppo.recompute_logprobs=True ppo.importance=tis"),
    ]  # fmt: skip
    return [line for applies, line in checks if applies]
