"""Where rewards come from, by the name that the user gives: child processes or a service. Answers are judged once."""

import json
import os
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from realhf.api.config import RewardConfig
from realhf.rewards.judge.pool import Item, JudgePool, check_reward_fn
from realhf.rewards.judge.remote import RemoteJudge, check_url
from realhf.rewards.verdict import BUILT_IN, FORMAT, Verdict


class Judge(Protocol):
    """Gives verdicts on answers. It is started, and tested where that is possible, by ``self_test``."""

    def self_test(self) -> None: ...

    def judge(self, items: Sequence[Item]) -> list[Verdict]: ...

    def close(self) -> None: ...


def open_judge(fn: str, config: RewardConfig) -> Judge:
    """Return what judges by ``fn``; nothing is started yet. UserError for a bad ``fn``."""
    if is_remote(fn):
        token = os.environ.get(config.token_env, "") if config.token_env else ""
        return RemoteJudge(fn, config.timeout, config.processes, config.retries, token)
    return JudgePool(fn, config.timeout, config.processes, max_concurrency=config.max_concurrency)


def check_fn(fn: str) -> list[str]:
    """Return what is wrong with a ``reward.fn``: one line per problem; no user's file is run, no service is asked."""
    return check_url(fn) if is_remote(fn) else check_reward_fn(fn)


def is_remote(fn: str) -> bool:
    return fn.startswith(("http:", "https:"))


def builtin_verifier(fn: str) -> str | None:
    """Return which of our own verifiers, that judge right (1) or wrong (0), ``fn`` is, here or behind ``?fn=math``."""
    name = parse_qs(urlsplit(fn).query).get("fn", [""])[0] if is_remote(fn) else fn
    return name if name in BUILT_IN else None


def names_of(fns: Sequence[str]) -> list[str]:
    """Return a short name for every reward: ``math``, ``format``, a user's function, or ``math@host:port``."""
    return [_remote_name(fn) if is_remote(fn) else "format" if fn.startswith(FORMAT) else fn.rpartition(":")[2]
            for fn in fns]  # fmt: skip


def _remote_name(url: str) -> str:
    parts = urlsplit(url)
    asked = parse_qs(parts.query).get("fn")
    return f"{asked[0]}@{parts.netloc}" if asked else f"{parts.netloc}{parts.path}"


def judge_once(judges: Sequence[Judge], items: Sequence[Item]) -> list[list[Verdict]]:
    """Return every judge's verdicts on all items, in order; equal items are judged once."""
    keys = [(prompt, answer, json.dumps(row, sort_keys=True)) for prompt, answer, row in items]
    distinct = dict(zip(keys, items, strict=True))
    found = [dict(zip(distinct, judge.judge(list(distinct.values())), strict=True)) for judge in judges]
    return [[verdicts[key] for key in keys] for verdicts in found]


def fns_of(config: RewardConfig) -> list[str]:
    return config.fns or [config.fn]


def weights_of(config: RewardConfig) -> list[float]:
    return config.weights or [1.0] * len(fns_of(config))
