"""The call of a verifier, and checks of its options."""

import os

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import RewardConfig
from realhf.api.experiment import Task
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.experiments.options.checks import positive_problems, unmet
from realhf.rewards.registry import FORMAT, VERIFIERS, builtin_verifier, check_fn, fns_of, is_remote, names_of


def reward_task(reward: RewardConfig) -> Task:
    """Return the kind of dataset rows that the rewards need; of several, code has priority over math."""
    tasks = [VERIFIERS[name].task for fn in fns_of(reward) if (name := builtin_verifier(fn))]
    return min(tasks, key=(Task.code, Task.math, Task.prompt).index, default=Task.prompt)


def verifier_call(name: str, reward: RewardConfig, ppo: PPOConfig, batch: int) -> MFC:
    interface = InterfaceSpec("verifier", {"reward": to_plain(reward), "ppo": to_plain(ppo)})
    return MFC(name, None, Kind.INFERENCE, interface, ("tokens", "prompt_mask", "row"), ("rewards",), batch)


def reward_problems(reward: RewardConfig) -> list[str]:
    """Return the problems of the reward options, one line each, without running files or contacting services."""
    fns = fns_of(reward)
    names = names_of(fns)
    remote = any(map(is_remote, fns))
    problems = positive_problems("reward.", reward, "timeout", "processes", "max_concurrency")
    problems += unmet([
        (reward.retries >= 0, f"reward.retries must not be negative, got {reward.retries}"),
        (not reward.fns or reward.fn in VERIFIERS,
         f"reward.fn={reward.fn} and reward.fns={reward.fns}: set only one of them"),
        (len(set(names)) == len(names), f"reward.fns: the names {', '.join(names)} must differ"),
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
    return problems + [line for fn in [*fns, *patterns] for line in check_fn(fn)]
