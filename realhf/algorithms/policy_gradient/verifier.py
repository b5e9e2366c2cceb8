"""Rewards from verifiers: decodes responses and scores them in judge processes."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.config import Advantage, PPOConfig
from realhf.algorithms.policy_gradient.rewards import rewards_of
from realhf.api.batch_meta import RowId
from realhf.api.config import RewardConfig, opt
from realhf.api.experiment import Task
from realhf.api.messages import State, Stats
from realhf.base.paths import RunDir
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext
from realhf.rewards.group.scorer import GroupScorer
from realhf.rewards.judge.pool import Judge, judge_once, open_judge
from realhf.rewards.registry import FORMAT, VERIFIERS, builtin_verifier, fns_of, names_of, weights_of
from realhf.rewards.sandbox.sandbox import Reason
from realhf.rewards.verdict import Item, Status, Verdict


@dataclass
class VerifierConfig:
    reward: RewardConfig = opt(RewardConfig, "rewards")
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards, selection of responses")


def decode_items(batch: SequenceBatch, tokenizer: Any) -> list[Item]:
    """Return prompt and response without special tokens, and the dataset row in column ``row``, of every row."""
    items = []
    columns = (batch.columns[key].rows() for key in ("tokens", "prompt_mask", "row"))
    for tokens, prompt_mask, row in zip(*columns, strict=True):
        is_prompt = prompt_mask.bool()
        texts = [tokenizer.decode(tokens[m].tolist(), skip_special_tokens=True) for m in (is_prompt, ~is_prompt)]
        items.append((texts[0], texts[1], json.loads(bytes(row.tolist()))))
    return items


def is_failure(verdict: Verdict, fn: str) -> bool:
    """Return True if there is no score: a response that a built-in verifier cannot judge in time is wrong instead."""
    return verdict.status is Status.error or (verdict.status is Status.timeout and builtin_verifier(fn) is None)


def shaped_score(verdict: Verdict, fn: str, config: RewardConfig, is_well_formed: bool = True) -> float:
    """Return the score before bias and scaling.

    Built-in verifiers score right or wrong, and the format if ``format_reward`` is set; a user's function returns its
    own score.
    """
    if builtin_verifier(fn) is None:
        return verdict.score
    if verdict.score > 0:
        unformatted = config.right_unformatted_reward
        return config.right_reward if is_well_formed or unformatted is None else unformatted
    return config.wrong_formatted_reward if config.format_reward and is_well_formed else config.wrong_reward


class Verifier:
    """Verifies responses; returns the scalar ``rewards = (score - reward_output_bias) * reward_output_scaling``.

    The score is the weighted sum of the scores of ``reward.fns`` and of ``reward.group_fn``; responses for which one of
    them fails are dropped. The column ``model_scores``, of a reward model, is added, times ``rm_output_scaling``.
    Statistics over all responses: ``failed``, and over all verdicts ``verifier_error`` and ``verifier_timeout``. Over
    the others: ``reward``, ``accuracy`` (math, code), ``format_ok`` (format_reward), ``verdict_*``, the fraction of
    each `Reason` (code), with several rewards ``score_*`` by name, and ``judge_*`` of a language model. With
    check_verifier_status, ValueError if all responses are wrong. Its judges start at once; the first call runs their
    self-tests.
    """

    config_type = VerifierConfig

    def __init__(self, config: VerifierConfig, context: InterfaceContext) -> None:
        self.config = config
        self.context = context
        self.fns = fns_of(config.reward)
        patterns = [f"{FORMAT}{config.reward.format_reward}"] if config.reward.format_reward else []
        self.judges = [open_judge(fn, config.reward) for fn in (*self.fns, *patterns)]
        self.group: GroupScorer | None = None
        if config.reward.group_fn:
            self.group = GroupScorer(config.reward, context.seed, RunDir(context.run_root))
        self.judged_by = [*self.fns, *([config.reward.group_fn] if self.group else []), *patterns]
        for judge in self.all_judges:
            judge.spawn()  # ready after the first responses
        self.tested = False

    @property
    def all_judges(self) -> list[Judge | GroupScorer]:
        return [*self.judges, *([self.group] if self.group else [])]

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        if not self.tested:
            for judge in self.all_judges:
                judge.self_test()
            self.tested = True
        results, stats = self.verdicts(batch)
        judged = self.judged_rows(batch, results)
        verdicts = [[column[i] for i in judged] for column in results]
        n_rewards = len(self.fns) + (self.group is not None)
        verdicts, formats = verdicts[:n_rewards], verdicts[n_rewards:]
        format_ok = [v.score > 0 for v in formats[0]] if formats else [True] * len(judged)
        scores = [
            [shaped_score(v, fn, self.config.reward, good) for v, good in zip(column, format_ok, strict=True)]
            for fn, column in zip(self.judged_by, verdicts, strict=False)
        ]
        self.check_status(scores[: len(self.fns)])
        config = self.config.reward
        weights = torch.tensor(weights_of(config) + [config.group_weight] * bool(self.group), dtype=torch.float64)
        totals = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        totals[judged] = weights @ torch.tensor(scores, dtype=torch.float64).reshape(n_rewards, len(judged))
        model_scores = batch["model_scores"] if "model_scores" in batch.columns else None
        right = dict(zip(judged, self.right(verdicts), strict=False))  # rows that are not judged have no reward
        is_right = [right.get(i, False) for i in range(len(batch))] if right else []
        totals, report = totals.to(batch["tokens"].device), self.context.report_results
        rewarded, reward_stats = rewards_of(batch, totals, self.config.ppo, report, is_right, model_scores)
        if self.config.ppo.advantage is Advantage["gdpo"]:
            rewarded = with_parts(rewarded, [batch.ids[i] for i in judged], weights, scores)
        stats |= reward_stats | self.accuracy_stats(verdicts)
        if formats:
            stats["format_ok"] = (float(sum(format_ok)), float(len(judged)))
        if n_rewards > 1:
            names = names_of(self.judged_by[:n_rewards])
            stats |= {f"score_{name}": (sum(s), float(len(s))) for name, s in zip(names, scores, strict=True)}
        return rewarded, stats

    def verdicts(self, batch: SequenceBatch) -> tuple[list[list[Verdict]], Stats]:
        """Return the verdicts of each of ``judged_by`` on all rows, and statistics."""
        items = decode_items(batch, self.context.tokenizer)
        results = judge_once(self.judges, items)
        stats: Stats = {}
        if self.group:
            verdicts, stats = self.group.score(batch.ids, items)
            results.insert(len(self.fns), verdicts)
        return results, failure_stats(results) | stats

    def judged_rows(self, batch: SequenceBatch, results: Sequence[Sequence[Verdict]]) -> list[int]:
        """Return the rows for which no judge has failed; report the first failure."""
        failures: dict[int, tuple[str, Verdict]] = {}
        for fn, column in zip(self.judged_by, results, strict=True):
            failures = {i: (fn, v) for i, v in enumerate(column) if is_failure(v, fn)} | failures
        if failures:
            row, (fn, verdict) = batch.ids[min(failures)], failures[min(failures)]
            where = f"{fn}, response {row.sample} to prompt {row.prompt}"
            self.context.report_failure(f"{where}: {verdict.detail}\n{verdict.traceback}".strip())
        return [i for i in range(len(batch)) if i not in failures]

    def check_status(self, scores: Sequence[Sequence[float]]) -> None:
        """Raise ValueError if no response is right by any of the rewards and ``check_verifier_status`` is set."""
        config = self.config.reward
        if not config.check_verifier_status or not scores or not scores[0]:
            return
        worst = max(config.wrong_reward, config.wrong_formatted_reward if config.format_reward else config.wrong_reward)
        if all(max(column) <= worst for column in scores):
            raise ValueError(f"all {len(scores[0])} responses are wrong (reward.check_verifier_status is set)")

    def right(self, verdicts: Sequence[Sequence[Verdict]]) -> list[bool]:
        """Return which responses are correct by the first built-in verifier; nothing without one."""
        columns = (column for fn, column in zip(self.fns, verdicts, strict=False) if builtin_verifier(fn))
        return [verdict.score > 0 for verdict in next(columns, ())]

    def accuracy_stats(self, verdicts: Sequence[Sequence[Verdict]]) -> Stats:
        """Return the accuracy of the first built-in verifier."""
        stats = Stats()
        for fn, column in zip(self.fns, verdicts, strict=False):
            if (kind := builtin_verifier(fn)) is None:
                continue
            count = float(len(column))
            stats["accuracy"] = (float(sum(self.right(verdicts))), count)
            if VERIFIERS[kind].task is Task.code:
                reasons = Counter(v.detail for v in column if v.status is Status.ok)
                stats |= {f"verdict_{reason.value}": (float(reasons[reason.value]), count) for reason in Reason}
            break
        return stats

    def close(self) -> None:
        for judge in self.all_judges:
            judge.close()


def with_parts(
    rewarded: SequenceBatch, ids: Sequence[RowId], weights: Tensor, scores: Sequence[Sequence[float]]
) -> SequenceBatch:
    """Add the column ``reward_parts``: of each row the weights of the rewards, then its score by each, ``2 n`` numbers.

    ``scores`` are those of the rows ``ids``, by reward.
    """
    row_of, table = {row: i for i, row in enumerate(ids)}, torch.tensor(scores, dtype=torch.float32).t()
    own = table[[row_of[row] for row in rewarded.ids]]
    parts = torch.cat((weights.float().expand(len(own), -1), own), 1).to(rewarded["rewards"].device)
    return rewarded.with_columns(reward_parts=Column(parts.flatten(), (parts.shape[1],) * len(own)))


def failure_stats(results: Sequence[Sequence[Verdict]]) -> Stats:
    """Return the fractions of verdicts that are errors and timeouts."""
    counts = Counter(verdict.status for verdict in chain(*results))
    return {f"verifier_{s.value}": (float(counts[s]), float(counts.total())) for s in (Status.error, Status.timeout)}
