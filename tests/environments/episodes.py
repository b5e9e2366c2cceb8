"""Plays episodes of adapters in the child process of a pool, for the tests."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from realhf.environments import Reply, Turn
from realhf.environments.env_process import EnvOptions
from realhf.environments.pool import EnvFailure, EnvPool
from tests.conftest import TIMEOUT_S

ADAPTERS = {
    "GymnasiumEnv": "gymnasium_env",
    "NemoGymEnv": "nemo_gym_env",
    "OpenEnvClient": "openenv_env",
    "ReasoningGymEnv": "reasoning_gym_env",
    "TextArenaEnv": "textarena_env",
    "VerifiersEnv": "verifiers_env",
}
Policy = Callable[[Turn, int], "str | Reply"]


def shown(turn: Turn) -> str:
    return turn.text or "\n".join(message["content"] for message in turn.messages)


def play(
    cls: str,
    options: dict[str, Any],
    policy: Policy,
    row: dict | None = None,
    seed: int = 3,
    n_episodes: int = 1,
    max_turns: int = 60,
    rows: Sequence[dict] = (),
) -> list[list[Turn]]:
    """Play episodes of the same row, or of ``rows``, and the same seed at once; return their turns, at most
    ``max_turns``. A failure raises.
    """
    n_episodes = len(rows) or n_episodes
    timeout = TIMEOUT_S / 4
    pool = EnvPool(EnvOptions(f"realhf.environments.adapters.{ADAPTERS[cls]}:{cls}", options, 1, timeout))
    episodes: list[list[Turn]] = [[] for _ in range(n_episodes)]
    n_open, deadline = n_episodes, time.monotonic() + TIMEOUT_S
    try:
        for number in range(n_episodes):
            pool.reset(number, rows[number] if rows else row or {}, seed)
        while n_open:
            assert time.monotonic() < deadline, episodes
            for answer in pool.poll(5.0):
                if isinstance(answer.result, EnvFailure):
                    raise RuntimeError(answer.result.detail)
                turns = episodes[answer.episode]
                turns.append(answer.result)
                if answer.result.done or len(turns) == max_turns:
                    pool.end(answer.episode)
                    n_open -= 1
                    continue
                reply = policy(answer.result, len(turns))
                pool.step(answer.episode, Reply(reply, [1]) if isinstance(reply, str) else reply)
        assert pool.poll(0.2) == []  # the environments close, and their process lives on
        assert pool._workers[0].process is not None and pool._workers[0].process.poll() is None
    finally:
        pool.close()
    return episodes


def script(*replies: "str | Reply") -> Policy:
    return lambda _, number: replies[min(number, len(replies)) - 1]


def rewards(turns: list[Turn]) -> list[float]:
    return [turn.reward for turn in turns]
