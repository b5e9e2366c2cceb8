"""Group-wise rewards: collects the responses to each prompt and scores them together."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from realhf.api.batch_meta import RowId
from realhf.api.config import RewardConfig
from realhf.api.messages import Stats
from realhf.base.paths import RunDir
from realhf.base.seeds import stable_seed
from realhf.rewards.group.presets import asks_model
from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.verdict import Item, ResponseGroup, Verdict

if TYPE_CHECKING:
    from realhf.rewards.llm_judge.chat_client import ChatUsage
    from realhf.rewards.llm_judge.judge import LLMJudge


class GroupScorer:
    """Scores all responses to a prompt by ``reward.group_fn``.

    A function or a language model sees them in an order that depends on the seed and the prompt only, so no position
    is always that of the same sample. All rows of a prompt are on one data-parallel rank.
    """

    def __init__(self, config: RewardConfig, seed: int, run: RunDir) -> None:
        self.config, self.seed, self.run = config, seed, run

    @cached_property
    def pool(self) -> JudgePool:
        config = self.config
        return JudgePool(config.group_fn, config.timeout, config.processes, max_concurrency=config.max_concurrency,
                         is_group_wise=True)  # fmt: skip

    @cached_property
    def model(self) -> "LLMJudge":
        from realhf.rewards.llm_judge.judge import LLMJudge  # imports the HTTP client

        return LLMJudge(self.config.group_fn, self.config.judge, self.run.judge)

    @property
    def asks_model(self) -> bool:
        return asks_model(self.config.group_fn)

    def spawn(self) -> None:
        """Start the judge processes, if there are any."""
        if not self.asks_model:
            self.pool.spawn()

    def self_test(self) -> None:
        """Wait for the judge processes; UserError if they cannot load the function. No request is sent."""
        if not self.asks_model:
            self.pool.start()

    def score(self, ids: Sequence[RowId], items: Sequence[Item]) -> tuple[list[Verdict], Stats]:
        """Return the verdict on each row, and the statistics of a language model."""
        rows_of: dict[int, list[int]] = defaultdict(list)
        for i, row in enumerate(ids):
            rows_of[row.prompt].append(i)
        orders = [self.shuffled(prompt, rows, ids) for prompt, rows in rows_of.items()]
        groups = [self.group_of([items[i] for i in rows], ids[rows[0]].prompt) for rows in orders]
        stats: Stats = {}
        if self.asks_model:
            verdicts, stats = self.model.judge_groups(groups), usage_stats(self.model.usage)
        else:
            judged = zip(groups, self.pool.judge_groups(groups), strict=True)
            verdicts = [spread(verdict, len(group.responses)) for group, verdict in judged]
        found = {i: v for rows, part in zip(orders, verdicts, strict=True) for i, v in zip(rows, part, strict=True)}
        return [found[i] for i in range(len(ids))], stats

    def group_of(self, items: Sequence[Item], prompt_id: int) -> ResponseGroup:
        prompt, _, row = items[0]
        return ResponseGroup(prompt, tuple(response for _, response, _ in items), row, prompt_id, self.seed)

    def shuffled(self, prompt: int, rows: Sequence[int], ids: Sequence[RowId]) -> list[int]:
        """Return the rows of a prompt in the order that the function sees, which is not that of the batch."""
        order = sorted(rows, key=lambda i: ids[i].sample)
        random.Random(stable_seed("order of responses", self.seed, prompt)).shuffle(order)
        return order

    def close(self) -> None:
        if not self.asks_model:
            self.pool.close()


def spread(verdict: Verdict, n: int) -> list[Verdict]:
    """Return the verdicts on the responses of a group; a failure is that of all."""
    return [replace(verdict, score=score, scores=()) for score in verdict.scores] if verdict.scores else [verdict] * n


def usage_stats(usage: "ChatUsage") -> Stats:
    """Return the totals of a call, which are not divided, and the fraction of replies from the cache."""
    totals = {"requests": usage.requests, "retries": usage.retries, "failures": usage.failures,
              "tokens_in": usage.tokens_in, "tokens_out": usage.tokens_out, "usd": usage.usd}  # fmt: skip
    stats: Stats = {f"judge_{name}": (float(value), 0.0) for name, value in totals.items()}
    return stats | {"judge_cached": (float(usage.cached), float(usage.cached + usage.requests))}
