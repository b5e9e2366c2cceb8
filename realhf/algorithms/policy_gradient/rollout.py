"""The interfaces of multi-turn rollouts: episodes with environments, and their rewards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import torch

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.episode_driver import EpisodeDriver, PromptRow
from realhf.algorithms.policy_gradient.episodes import Episode
from realhf.algorithms.policy_gradient.rewards import rewards_of
from realhf.api.batch_meta import RowId
from realhf.api.config import EnvConfig, GenerationConfig, opt
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext
from realhf.environments.pool import EnvOptions, EnvPool
from realhf.ops.rows import on_device

DTYPES = {"tokens": torch.int64, "prompt_mask": torch.uint8, "logprobs": torch.float32, "turn_rewards": torch.float32}
SCALARS = {"episode": torch.int64, "truncated": torch.uint8, "scores": torch.float32}


@dataclass
class EpisodeConfig:
    env: EnvConfig = opt(EnvConfig, "the environment")
    gen: GenerationConfig = opt(GenerationConfig, "sampling; max_new_tokens limits one reply")
    n: int = opt(1, "episodes per prompt")


def max_episode_len(env: EnvConfig, gen: GenerationConfig, longest_prompt: int, n_positions: int) -> int:
    """Return the maximum number of tokens of an episode."""
    default = longest_prompt + 2 * env.max_turns * gen.max_new_tokens
    return min(env.max_episode_len or default, n_positions)


class EpisodeRollout:
    """Plays ``n`` episodes per prompt. Reads ``prompts row``.

    Returns ``tokens prompt_mask logprobs turn_rewards`` by token, where ``prompt_mask`` is 0 on sampled tokens only and
    ``turn_rewards`` are on the last sampled token before each reward; and ``episode truncated scores``: the sample
    number of the row's episode, and the discounted sum of its rewards, NaN for a failed one. Row ``k`` of an episode
    has sample number ``episode + k * n``.
    """

    config_type = EpisodeConfig

    def __init__(self, config: EpisodeConfig, context: InterfaceContext) -> None:
        self.config, self.context = config, context

    @cached_property
    def pool(self) -> EnvPool:
        env = self.config.env
        limits = env.workers, env.timeout, env.max_concurrency, env.memory_gb
        return EnvPool(EnvOptions(env.cls, dict(env.options), *limits, env.tool_format))

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        env, gen, n = self.config.env, self.config.gen, self.config.n
        max_len = max_episode_len(env, gen, max(batch.lengths("prompts"), default=1), engine.config.max_row_len)
        n_episodes = max(1, min(env.max_episodes or 2 * gen.max_num_seqs, len(batch) * n))

        def make_driver() -> EpisodeDriver:
            columns = (batch.columns[key].rows() for key in ("prompts", "row"))
            rows = zip(batch.ids, *columns, strict=True)
            prompts = [PromptRow(i.prompt, tokens.tolist(), json.loads(bytes(row.tolist()))) for i, tokens, row in rows]
            return EpisodeDriver(
                self.pool, self.context.tokenizer, prompts, n, env, gen, self.context.seed, max_len, n_episodes
            )

        result = engine.sample_turns(make_driver, gen, self.context.seed, max_len, n_episodes)
        episodes = msgspec.msgpack.decode(result, type=list[Episode])
        if failed := next((one for one in episodes if one.failure), None):
            prompt, sample = failed.key
            self.context.report_failure(f"{env.cls}, episode {sample} of prompt {prompt}: {failed.failure}")
        return episode_rows(episodes, n, env.turn_discount, batch["prompts"].device), episode_stats(episodes)

    def close(self) -> None:
        if "pool" in self.__dict__:
            self.pool.close()


def episode_rows(episodes: Sequence[Episode], n: int, turn_discount: float, device: torch.device) -> SequenceBatch:
    """Return the columns of ``EpisodeRollout``."""
    columns = {key: list[float]() for key in DTYPES}
    ids, lengths, scalars = list[RowId](), list[int](), list[tuple[int, bool, float]]()
    for one in episodes:
        prompt, sample = one.key
        for number, row in enumerate(one.rows):
            rewards = [0.0] * len(row.tokens)
            for at, index, reward in one.rewards:
                if at == number:
                    rewards[index] += reward
            columns["tokens"] += row.tokens
            columns["prompt_mask"] += [1 - sampled for sampled in row.sampled]
            columns["logprobs"] += row.logprobs
            columns["turn_rewards"] += rewards
            lengths.append(len(row.tokens))
            ids.append(RowId(prompt, sample + number * n))
            scalars.append((sample, one.truncated and number == one.last[0], one.score(turn_discount)))
    shape = tuple(lengths)
    found = {key: Column(on_device(torch.tensor(columns[key], dtype=DTYPES[key]), device), shape) for key in DTYPES}
    for (key, dtype), values in zip(SCALARS.items(), zip(*scalars, strict=True), strict=True):
        found[key] = Column.scalars(on_device(torch.tensor(values, dtype=dtype), device))
    return SequenceBatch(tuple(ids), found)


def episode_stats(episodes: Sequence[Episode]) -> Stats:
    """Return statistics of episodes: replies, sampled tokens, failures, and seconds of environment calls.

    ``drifted`` is the fraction of sampled tokens that are not in the context in which they were sampled.
    """
    good = [one for one in episodes if not one.failure]
    n, n_good = float(len(episodes)), float(len(good))
    seconds = [second for one in episodes for second in one.seconds]
    rows = [row for one in episodes for row in one.rows]
    stats: Stats = {
        "failed": (n - n_good, n),
        "turns": (float(sum(one.n_turns for one in good)), n_good),
        "rows": (float(sum(len(one.rows) for one in good)), n_good),
        "drifted": (float(sum(row.n_drifted for row in rows)), float(sum(sum(row.sampled) for row in rows))),
        "response_length": (float(sum(sum(row.sampled) for one in good for row in one.rows)), n_good),
        "episode_length": (float(sum(len(row.tokens) for one in good for row in one.rows)), n_good),
        "truncated": (float(sum(one.truncated for one in good)), n_good),
        "env_step_s": (float(sum(seconds)), float(len(seconds))),
    }
    if seconds:
        stats["env_step_p99_s"] = (float(np.quantile(seconds, 0.99)), 1.0)
    for name in sorted({name for one in good for name in one.info}):
        values = [one.info[name] for one in good if name in one.info]
        stats[f"info_{name}"] = (float(sum(values)), float(len(values)))
    return stats


class EpisodeRewards:
    """Returns ``rewards`` of episodes. Reads ``scores prompt_mask episode``; episodes that failed are dropped."""

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config = config

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        rows, stats = rewards_of(batch, batch["scores"], self.config)
        del stats["failed"]  # a statistic of the rollout
        return rows, stats
