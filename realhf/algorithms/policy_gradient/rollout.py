"""The interfaces of multi-turn rollouts: episodes with environments, and their rewards."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import torch

from realhf.algorithms.policy_gradient.advantages import episode_numbers, group_sums
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.episode_driver import EpisodeDriver, RolloutOptions
from realhf.algorithms.policy_gradient.episodes import Episode, EpisodeGroup
from realhf.algorithms.policy_gradient.rewards import rewards_of
from realhf.api.batch_meta import RowId
from realhf.api.config import EnvConfig, GenerationConfig, opt
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext
from realhf.data.turns import EpisodeKey
from realhf.environments.env_process import EnvOptions
from realhf.environments.pool import EnvPool
from realhf.ops.rows import on_device

DTYPES = {"tokens": torch.int64, "prompt_mask": torch.uint8, "logprobs": torch.float32, "versions": torch.int32,
          "turn_rewards": torch.float32}  # fmt: skip
SCALARS = {"episode": torch.int64, "truncated": torch.uint8, "scores": torch.float32}


@dataclass
class EpisodeConfig:
    env: EnvConfig = opt(EnvConfig, "the environment")
    gen: GenerationConfig = opt(GenerationConfig, "sampling; max_new_tokens limits one reply")
    n: int = opt(1, "episodes per prompt")


class EpisodeRollout:
    """Plays ``n`` episodes per prompt. Reads ``prompts row``.

    Returns ``tokens prompt_mask logprobs turn_rewards`` by token, where ``prompt_mask`` is 0 on sampled tokens only and
    ``turn_rewards`` are on the last sampled token before each reward; and ``episode truncated scores``: the sample
    number of the row's episode, and the discounted sum of its rewards, NaN for a failed one. Row ``k`` of an episode
    has sample number ``episode + k * n``.

    With ``env.partial_tokens``, a prompt's row also has the groups ``carried`` from the prompts at its position of
    earlier batches. It returns the first of them that is finished, if any.
    """

    config_type = EpisodeConfig

    def __init__(self, config: EpisodeConfig, context: InterfaceContext) -> None:
        self.config, self.context = config, context
        self._paused: dict[EpisodeKey, int] = {}
        self._carried: tuple[list[list[EpisodeGroup]], SequenceBatch] = [], SequenceBatch(())

    @cached_property
    def pool(self) -> EnvPool:
        env = self.config.env
        limits = env.workers, env.timeout, env.max_concurrency, env.memory_gb
        return EnvPool(EnvOptions(env.cls, dict(env.options), *limits, env.tool_format, env.sandbox))

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        env, gen, n = self.config.env, self.config.gen, self.config.n
        chains, most = self._chains(batch), env.max_episodes or 2 * gen.max_num_seqs
        n_before = n_sampled(chains)
        n_episodes = max(1, min(most, sum(len(chain) * n for chain in chains)))
        options = RolloutOptions(env, gen, self.context.seed, engine.config.max_row_len, n_episodes,
                                 env.partial_tokens, engine.version)  # fmt: skip
        max_len = max((options.max_len(len(group.tokens)) for chain in chains for group in chain), default=1)
        drivers: list[EpisodeDriver] = []

        def make_driver() -> EpisodeDriver:
            groups = [group for chain in chains for group in chain]
            drivers.append(EpisodeDriver(self.pool, self.context.tokenizer, groups, options, self._paused))
            return drivers[0]

        result = engine.sample_turns(make_driver, gen, self.context.seed, max_len, n_episodes)
        self._paused = drivers[0].paused if drivers else {}
        for span in drivers[0].spans if drivers else ():
            self.context.add_span(*span)
        groups = deque(msgspec.msgpack.decode(result, type=list[EpisodeGroup]))
        chains = [[groups.popleft() for _ in chain] for chain in chains]
        n_new = n_sampled(chains) - n_before
        done = [(row.prompt, group) for row, chain in zip(batch.ids, chains, strict=True) if (group := finished(chain))]
        self._carried = chains, batch
        episodes = [episode for _, group in done for episode in group.episodes]
        if failed := next((one for one in episodes if one.failure), None):
            prompt, sample = failed.key
            self.context.report_failure(f"{env.cls}, episode {sample} of prompt {prompt}: {failed.failure}")
        rows = episode_rows(done, n, env.turn_discount, batch["prompts"].device)
        stats = {**episode_stats(episodes), "sampled_tokens": (float(n_new), float(len(batch)))}
        if env.partial_tokens:
            stats |= partial_stats(episodes, chains, engine.version)
        return rows, stats

    def _chains(self, batch: SequenceBatch) -> list[list[EpisodeGroup]]:
        """Return the groups to play for each prompt: those carried from earlier steps, and its own."""
        chains = []
        keys = ("prompts", "row", *(("carried",) if "carried" in batch.columns else ()))
        for row, *values in zip(batch.ids, *(batch.columns[key].rows() for key in keys), strict=True):
            tokens, fields, *carried = (value.cpu().numpy() for value in values)
            chain = msgspec.msgpack.decode(carried[0].tobytes(), type=list[EpisodeGroup]) if carried else []
            new = EpisodeGroup.new(row.prompt, tokens.tolist(), fields.tobytes().decode(), self.config.n)
            chains.append([*chain, new])
        return chains

    def carry(self) -> SequenceBatch:
        """Return the groups that are not finished, one row per prompt of the last batch."""
        chains, batch = self._carried
        rows = [np.frombuffer(msgspec.msgpack.encode(chain), np.uint8) for chain in chains]
        data = torch.from_numpy(np.concatenate(rows)) if rows else torch.empty(0, dtype=torch.uint8)
        column = Column(on_device(data, batch["prompts"].device), tuple(map(len, rows)))
        return SequenceBatch(batch.ids, {"carried": column})

    def close(self) -> None:
        if "pool" in self.__dict__:
            self.pool.close()


def n_sampled(chains: Sequence[Sequence[EpisodeGroup]]) -> int:
    """Return the number of tokens that the model has sampled for groups."""
    groups = (group for chain in chains for group in chain)
    return sum(sum(row.sampled) for group in groups for episode in group.episodes for row in episode.rows)


def finished(chain: list[EpisodeGroup]) -> EpisodeGroup | None:
    """Remove and return the first group whose episodes have all ended."""
    group = next((group for group in chain if group.is_over), None)
    if group is not None:
        chain.remove(group)
    return group


def episode_rows(
    groups: Sequence[tuple[int, EpisodeGroup]], n: int, turn_discount: float, device: torch.device
) -> SequenceBatch:
    """Return the columns of ``EpisodeRollout`` and ``versions``, of groups with the prompts of their rows."""
    columns = {key: list[float]() for key in DTYPES}
    ids, lengths, scalars = list[RowId](), list[int](), list[tuple[int, bool, float]]()
    for prompt, group in groups:
        for one in group.episodes:
            for number, row in enumerate(one.rows):
                rewards = [0.0] * len(row.tokens)
                for at, index, reward in one.rewards:
                    if at == number:
                        rewards[index] += reward
                columns["tokens"] += row.tokens
                columns["prompt_mask"] += [1 - sampled for sampled in row.sampled]
                columns["logprobs"] += row.logprobs
                columns["versions"] += row.versions
                columns["turn_rewards"] += rewards
                lengths.append(len(row.tokens))
                sample = one.key[1]
                ids.append(RowId(prompt, sample + number * n))
                scalars.append((sample, one.truncated and number == one.last[0], one.score(turn_discount)))
    shape = tuple(lengths)
    found = {key: Column(on_device(torch.tensor(columns[key], dtype=DTYPES[key]), device), shape) for key in DTYPES}
    for (key, dtype), values in zip(SCALARS.items(), zip(*scalars, strict=True) if scalars else ((),) * 3, strict=True):
        found[key] = Column.scalars(on_device(torch.tensor(values, dtype=dtype), device))
    return SequenceBatch(tuple(ids), found)


def partial_stats(episodes: Sequence[Episode], chains: Sequence[Sequence[EpisodeGroup]], version: int) -> Stats:
    """Return the number of unfinished groups per prompt, and how many steps older the weights of tokens are."""
    rows = [row for one in episodes for row in one.rows]
    ages = sum((version - v) * s for row in rows for v, s in zip(row.versions, row.sampled, strict=True))
    return {
        "carried": (float(sum(map(len, chains))), float(len(chains))),
        "token_age": (float(ages), float(sum(sum(row.sampled) for row in rows))),
    }


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
        "retried": (float(sum(one.retries for one in episodes)), n),
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
    """Returns ``rewards`` of episodes. Reads ``scores prompt_mask episode``; episodes that failed are dropped.

    ``model_scores`` of a reward model are added: of an episode, the mean over its rows.
    """

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config, self.report = config, context.report_results

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        scores = batch["scores"]
        if "model_scores" in batch.columns:
            sums, sizes = group_sums(batch["model_scores"], episode_numbers(batch))
            scores = scores + (sums / sizes).to(scores.dtype)
        rows, stats = rewards_of(batch, scores, self.config, self.report)
        del stats["failed"]  # a statistic of the rollout
        return rows, stats
