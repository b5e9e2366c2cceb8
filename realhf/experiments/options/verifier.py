"""What follows from where rewards come from, for every experiment that has answers judged."""

import os

from realhf.api.config import RewardConfig
from realhf.api.experiment import Task
from realhf.rewards.registry import builtin_verifier, check_fn, fns_of, is_remote, names_of
from realhf.rewards.verdict import BUILT_IN, FORMAT


def reward_task(reward: RewardConfig) -> Task:
    """Return what rows must hold for the verifier to judge their answers."""
    named = set(map(builtin_verifier, fns_of(reward)))
    if named & {"code", "code_unordered"}:
        return Task.code
    return Task.math if "math" in named else Task.prompt


def reward_problems(reward: RewardConfig) -> list[str]:
    """Return what the options of rewards contradict, one line each; no user's file is run, no service is asked."""
    fns = fns_of(reward)
    names = names_of(fns)
    remote = any(map(is_remote, fns))
    checks = [
        (reward.timeout > 0, f"reward.timeout must be positive, got {reward.timeout}"),
        (reward.processes >= 1, f"reward.processes must be positive, got {reward.processes}"),
        (reward.max_concurrency >= 1, f"reward.max_concurrency must be positive, got {reward.max_concurrency}"),
        (reward.retries >= 0, f"reward.retries must not be negative, got {reward.retries}"),
        (not reward.fns or reward.fn in BUILT_IN,
         f"reward.fn={reward.fn} and reward.fns={reward.fns}: give one of them, or all in reward.fns"),
        (len(set(names)) == len(names), f"reward.fns: the names {', '.join(names)} must differ"),
        (not reward.weights or len(reward.weights) == len(fns),
         f"reward.weights has {len(reward.weights)} numbers, but there are {len(fns)} rewards (reward.fns)"),
        (not reward.format_reward or any(map(builtin_verifier, fns)),
         f"reward.format_reward grades answers that are right or wrong: it needs one of {', '.join(BUILT_IN)}; "
         f"beside other functions use reward.fns=[...,'{FORMAT}REGEX']"),
        (not reward.token_env or remote, "reward.token_env is for services (reward.fn=http://host:port/path)"),
        (not (reward.token_env and remote) or bool(os.environ.get(reward.token_env)),
         f"reward.token_env={reward.token_env}: there is no such variable in the environment, or it is empty"),
    ]  # fmt: skip
    problems = [line for holds, line in checks if not holds]
    patterns = [f"{FORMAT}{reward.format_reward}"] if reward.format_reward else []
    for fn in [*fns, *patterns]:
        problems += check_fn(fn)
    return problems
