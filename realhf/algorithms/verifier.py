"""Rewards from a verifier: decodes answers and has them judged; no model is involved."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from realhf.algorithms.selection import scored
from realhf.algorithms.stats import mean_of
from realhf.api.config import PPOConfig, RewardConfig, opt
from realhf.api.engine import Engine, InterfaceContext
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.rewards.pool import Item, JudgePool
from realhf.rewards.verdict import Status, Verdict


@dataclass
class VerifierConfig:
    reward: RewardConfig = opt(RewardConfig, "where rewards come from")
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards, which answers stay")


def decode_items(batch: SequenceBatch, tokenizer: Any) -> list[Item]:
    """Return (prompt, answer, data row) of every row, texts without special tokens.

    Columns: ``tokens``; ``prompt_mask``; ``row``, the data row as JSON in UTF-8 bytes.
    """
    items = []
    keys = ("tokens", "prompt_mask", "row")
    for tokens, prompt_mask, row in zip(*(batch.columns[key].rows() for key in keys), strict=True):
        is_prompt = prompt_mask.bool()
        texts = [tokenizer.decode(tokens[m].tolist(), skip_special_tokens=True) for m in (is_prompt, ~is_prompt)]
        items.append((texts[0], texts[1], json.loads(bytes(row.tolist()))))
    return items


def shaped_score(verdict: Verdict, config: RewardConfig) -> float:
    """Return a verdict's score before bias and scaling: ``wrong_reward`` for math's 0 and for a judge that failed."""
    if verdict.status is not Status.ok or (config.fn == "math" and verdict.score == 0.0):
        return config.wrong_reward
    return verdict.score


class Verifier:
    """Judges answers and makes the scalar ``rewards = (score - reward_output_bias) * reward_output_scaling``.

    Statistics count all judged answers: ``reward``, ``accuracy`` (math), ``verifier_error``, ``verifier_timeout``.
    With check_verifier_status, a call whose answers all got ``wrong_reward`` or less is a ValueError. The judges are
    started, and tested for math, at the first call.
    """

    config_type = VerifierConfig

    def __init__(self, config: VerifierConfig, context: InterfaceContext) -> None:
        self.config = config
        self.tokenizer = context.tokenizer
        self.pool = JudgePool(config.reward.fn, config.reward.timeout, config.reward.processes)
        self.tested = False

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        if not self.tested:
            self.pool.self_test()
            self.tested = True
        verdicts = self.pool.judge(decode_items(batch, self.tokenizer))
        scores = [shaped_score(verdict, self.config.reward) for verdict in verdicts]
        self.check_status(scores, verdicts)
        ppo = self.config.ppo
        shaped = (torch.tensor(scores, dtype=torch.float64) - ppo.reward_output_bias) * ppo.reward_output_scaling
        rewards = shaped.float().to(batch["tokens"].device)
        return scored(batch, rewards, ppo), {"reward": mean_of(rewards), **self.verdict_stats(verdicts)}

    def check_status(self, scores: Sequence[float], verdicts: Sequence[Verdict]) -> None:
        """Raise when no answer was judged right, if configured."""
        wrong = self.config.reward.wrong_reward
        if self.config.reward.check_verifier_status and scores and max(scores) <= wrong:
            failed = [v.detail or v.status.value for v in verdicts if v.status is not Status.ok]
            first = f"; {len(failed)} verifications failed, the first with: {failed[0]}" if failed else ""
            raise ValueError(
                f"all {len(scores)} answers were judged wrong (reward.check_verifier_status is set){first}"
            )

    def verdict_stats(self, verdicts: Sequence[Verdict]) -> Stats:
        count = float(len(verdicts))
        stats = {
            "verifier_error": (float(sum(v.status is Status.error for v in verdicts)), count),
            "verifier_timeout": (float(sum(v.status is Status.timeout for v in verdicts)), count),
        }
        if self.config.reward.fn == "math":
            stats["accuracy"] = (float(sum(v.status is Status.ok and v.score > 0 for v in verdicts)), count)
        return stats
