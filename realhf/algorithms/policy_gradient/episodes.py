"""Multi-turn rollouts: plays episodes between the model and environments, and returns them as rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.config import EnvConfig, GenerationConfig
from realhf.base.seeds import stable_seed
from realhf.data.chat import ChatEncoder
from realhf.data.turns import EpisodeKey, TurnInput, TurnOutput, TurnRequest
from realhf.environments import Reply, Turn
from realhf.environments.pool import EnvFailure, EnvPool


@dataclass
class Episode:
    """An episode of a prompt's sample. Lists are by token; ``sampled`` is 1 on tokens of the model.

    ``rewards`` are pairs: the index of the last token that the model had sampled, and the reward that followed.
    """

    key: EpisodeKey
    number: int
    tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    n_turns: int = 0
    truncated: bool = True
    failure: str = ""
    info: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model has not sampled."""
        self.tokens += tokens
        self.sampled += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def append_reply(self, output: TurnOutput) -> None:
        self.tokens += output.tokens
        self.sampled += [1] * len(output.tokens)
        self.logprobs += output.logprobs
        self.n_turns += 1

    def score(self, turn_discount: float) -> float:
        """Return the discounted sum of the rewards; NaN for a failed episode."""
        if self.failure:
            return math.nan
        return sum(reward * turn_discount**i for i, (_, reward) in enumerate(self.rewards))


@dataclass(frozen=True)
class PromptRow:
    """A prompt's number and tokens, and its row of the data set."""

    prompt: int
    tokens: list[int]
    row: dict[str, Any]


class EpisodeDriver:
    """Plays ``n`` episodes of every prompt: passes replies to environments, and their turns to the engine.

    An episode ends when its environment is done or fails, after ``max_turns`` replies, or at ``max_len`` tokens; the
    last two are truncated.
    """

    def __init__(
        self,
        pool: EnvPool,
        tokenizer: Any,
        prompts: Sequence[PromptRow],
        n: int,
        config: EnvConfig,
        gen: GenerationConfig,
        seed: int,
        max_len: int,
        max_episodes: int,
    ) -> None:
        self._pool, self._tokenizer, self._encoder = pool, tokenizer, ChatEncoder(tokenizer)
        self._vocab = len(tokenizer)
        self._config, self._gen, self._seed, self._max_len = config, gen, seed, max_len
        self._prompts = {one.prompt: one for one in prompts}
        keys = [(one.prompt, sample) for one in prompts for sample in range(n)]
        self.episodes = [Episode(key, number) for number, key in enumerate(keys)]
        self._by_key = {episode.key: episode for episode in self.episodes}
        self._pending = deque(self.episodes)
        self._open: set[int] = set()
        self._most = max_episodes

    def next(self, outputs: Sequence[TurnOutput], is_idle: bool) -> TurnRequest:
        request = TurnRequest()
        for output in outputs:
            episode = self._by_key[output.key]
            episode.append_reply(output)
            self._pool.step(episode.number, self._reply(output))
        self._start()
        while True:
            for answer in self._pool.poll(self._config.timeout if is_idle and self._open else 0.0):
                episode = self.episodes[answer.episode]
                episode.seconds.append(answer.seconds)
                self._answered(episode, answer.result, request)
            self._start()
            if not is_idle or request.inputs or not self._open:
                break
        return TurnRequest(request.inputs, request.closed, done=is_idle and not request.inputs and not self._open)

    def _start(self) -> None:
        while self._pending and len(self._open) < self._most:
            episode = self._pending.popleft()
            prompt, sample = episode.key
            parts = ("environment", self._seed, prompt, *([sample] if self._config.seed_per_sample else []))
            self._open.add(episode.number)
            self._pool.reset(episode.number, self._prompts[prompt].row, stable_seed(*parts))

    def _reply(self, output: TurnOutput) -> Reply:
        text = self._tokenizer.decode(output.tokens, skip_special_tokens=True)
        return Reply(text, output.tokens, stop="stop" if output.stopped else "length")

    def _answered(self, episode: Episode, result: Turn | EnvFailure, request: TurnRequest) -> None:
        if isinstance(result, EnvFailure):
            episode.failure = f"{result.kind}: {result.detail}\n{result.traceback}".strip()
            self._end(episode, request)
            return
        if episode.n_turns:
            episode.rewards.append((len(episode.tokens) - 1, result.reward))
        episode.info = result.info
        if result.done:
            episode.truncated = False
            self._end(episode, request)
            return
        tokens = self._tokens(episode, result)
        if problem := self._problem(episode, tokens):
            episode.failure = f"error: {problem}"
            self._end(episode, request)
            return
        limit = min(self._gen.max_new_tokens, self._max_len - len(episode.tokens) - len(tokens))
        if episode.n_turns >= self._config.max_turns or limit < 1:
            self._end(episode, request)
            return
        episode.append(tokens)
        request.inputs.append(TurnInput(episode.key, tokens, limit))

    def _problem(self, episode: Episode, tokens: Sequence[int]) -> str:
        if tokens and max(tokens) >= self._vocab:
            return f"Turn.tokens has token {max(tokens)}, the vocabulary has {self._vocab} tokens"
        if not episode.tokens and len(tokens) >= self._max_len:
            return f"the first turn has {len(tokens)} tokens, an episode may have {self._max_len} (env.max_episode_len)"
        return ""

    def _end(self, episode: Episode, request: TurnRequest) -> None:
        self._pool.end(episode.number)
        self._open.discard(episode.number)
        request.closed.append(episode.key)
        if not episode.tokens:  # a row has at least one token
            episode.append(self._prompts[episode.key[0]].tokens[: self._max_len] or [self._tokenizer.eos_token_id])

    def _tokens(self, episode: Episode, turn: Turn) -> list[int]:
        """Return the tokens between the last reply, or the start, and the next reply; at least one at the start."""
        if not episode.tokens:
            return self._first(episode, turn) or [self._tokenizer.eos_token_id]
        if turn.tokens is not None:
            return turn.tokens
        if turn.text is not None:
            return self._encoder.text(turn.text)
        return self._encoder.following(list(turn.messages), episode.tokens[-1]) if turn.messages else []

    def _first(self, episode: Episode, turn: Turn) -> list[int]:
        if turn.tokens is not None:
            return turn.tokens
        if turn.text is not None:
            return self._encoder.text(turn.text, is_first=True)
        if turn.messages:
            return self._encoder.first(list(turn.messages), turn.tools)
        return self._prompts[episode.key[0]].tokens

    def result(self) -> bytes:
        import msgspec

        return msgspec.msgpack.encode(self.episodes)
