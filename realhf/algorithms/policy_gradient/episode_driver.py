"""Plays the episodes of a rollout between the engine and the environments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from realhf.algorithms.policy_gradient.episodes import Episode
from realhf.api.config import EnvConfig, GenerationConfig
from realhf.base.seeds import stable_seed
from realhf.data.chat import ChatEncoder
from realhf.data.turns import EpisodeKey, TurnInput, TurnOutput, TurnRequest
from realhf.environments import Reply, Turn
from realhf.environments.pool import EnvFailure, EnvPool


@dataclass(frozen=True)
class PromptRow:
    """A prompt's number and tokens, and its row of the data set."""

    prompt: int
    tokens: list[int]
    row: dict[str, Any]


class EpisodeDriver:
    """Plays ``n`` episodes of every prompt: passes replies to environments, and their turns to the engine.

    An episode ends when its environment is done or fails, after ``max_turns`` replies, or at ``max_len`` tokens of a
    row; the last two are truncated. The engine's sample ``sample + k * n`` is row ``k`` of an episode. One row of an
    episode is open at a time.
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
        self._vocab, self._n = len(tokenizer), n
        self._config, self._gen, self._seed, self._max_len = config, gen, seed, max_len
        self._prompts = {one.prompt: one for one in prompts}
        keys = [(one.prompt, sample) for one in prompts for sample in range(n)]
        self.episodes = [Episode(key, number) for number, key in enumerate(keys)]
        self._by_key = {episode.key: episode for episode in self.episodes}
        self._pending = deque(self.episodes)
        self._open: dict[int, int | None] = {}  # by episode: the row that is open in the engine
        self._truncated: set[int] = set()  # episodes whose environment was asked for the last reward
        self._most = max_episodes

    def next(self, outputs: Sequence[TurnOutput], is_idle: bool) -> TurnRequest:
        request = TurnRequest()
        for output in outputs:
            prompt, sample = output.key
            episode = self._by_key[prompt, sample % self._n]
            reply = self._reply(output, len(episode.row.tokens))
            episode.append_reply(output, reply.text)
            self._pool.step(episode.number, reply)
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
            self._open[episode.number] = None
            self._pool.reset(episode.number, self._prompts[prompt].row, stable_seed(*parts))

    def _reply(self, output: TurnOutput, n_before: int) -> Reply:
        text = self._tokenizer.decode(output.tokens, skip_special_tokens=True)
        stop = "stop" if output.stopped else "length"
        return Reply(text, output.tokens, [], stop, output.logprobs, n_before)

    def _answered(self, episode: Episode, result: Turn | EnvFailure, request: TurnRequest) -> None:
        if isinstance(result, EnvFailure):
            episode.failure = f"{result.kind}: {result.detail}\n{result.traceback}".strip()
            self._end(episode, request)
            return
        if episode.n_turns:
            episode.append_reward(result.reward)
        episode.info = result.info
        if result.done or episode.number in self._truncated:
            episode.truncated = episode.number in self._truncated
            self._end(episode, request)
            return
        tokens = self._tokens(episode, result)
        if problem := self._problem(episode, tokens):
            episode.failure = f"error: {problem}"
            self._end(episode, request)
            return
        limits = self._gen.max_new_tokens, self._max_len - len(episode.row.tokens) - len(tokens)
        limit = min(*limits, result.max_tokens or limits[0])
        if episode.n_turns >= self._config.max_turns or limit < 1:
            episode.drop_empty_row()
            self._truncated.add(episode.number)
            self._pool.truncate(episode.number)
            return
        request.inputs.append(self._input(episode, tokens, limit, request))

    def _input(self, episode: Episode, tokens: list[int], limit: int, request: TurnRequest) -> TurnInput:
        row, is_open = episode.row, self._open[episode.number] == episode.current
        key, count = self._key(episode, episode.current), sum(row.sampled)
        if not is_open:
            self._close(episode, request)
            self._open[episode.number] = episode.current
        row.append(tokens)
        return TurnInput(key, tokens if is_open else list(row.tokens), limit, count)

    def _key(self, episode: Episode, row: int) -> EpisodeKey:
        prompt, sample = episode.key
        return prompt, sample + row * self._n

    def _close(self, episode: Episode, request: TurnRequest) -> None:
        if (row := self._open[episode.number]) is not None:
            request.closed.append(self._key(episode, row))

    def _problem(self, episode: Episode, tokens: Sequence[int]) -> str:
        if tokens and max(tokens) >= self._vocab:
            return f"Turn.tokens has token {max(tokens)}, the vocabulary has {self._vocab} tokens"
        if not episode.has_started and len(tokens) >= self._max_len:
            return f"the first turn has {len(tokens)} tokens, an episode may have {self._max_len} (env.max_episode_len)"
        return ""

    def _end(self, episode: Episode, request: TurnRequest) -> None:
        self._pool.end(episode.number)
        self._close(episode, request)
        del self._open[episode.number]
        episode.drop_empty_row()
        if not episode.has_started:  # a row has at least one token
            prompt = self._prompts[episode.key[0]].tokens[: self._max_len]
            episode.row.append(prompt or [self._tokenizer.eos_token_id])

    def _tokens(self, episode: Episode, turn: Turn) -> list[int]:
        """Return the tokens between the last reply, or the start, and the next reply; at least one at the start.

        A whole conversation makes the row current that it continues.
        """
        if turn.whole:
            return self._rest(episode, turn) or ([] if episode.row.tokens else [self._tokenizer.eos_token_id])
        if not episode.has_started:
            return self._first(episode, turn) or [self._tokenizer.eos_token_id]
        if turn.tokens is not None:
            return turn.tokens
        if turn.text is not None:
            return self._encoder.text(turn.text)
        return self._encoder.following(list(turn.messages), episode.row.tokens[-1]) if turn.messages else []

    def _rest(self, episode: Episode, turn: Turn) -> list[int]:
        """Return the tokens of a whole conversation that follow those of its row."""
        if turn.tokens is not None:
            return turn.tokens[episode.continue_tokens(turn.tokens) :]
        messages = [{"tools": list(turn.tools)}, *turn.messages]
        if n := episode.continue_messages(messages):
            return self._encoder.following(messages[n:], episode.row.tokens[-1])
        return self._encoder.first(list(turn.messages), turn.tools)

    def _first(self, episode: Episode, turn: Turn) -> list[int]:
        if turn.tokens is not None:
            return turn.tokens
        if turn.text is not None:
            return self._encoder.text(turn.text, is_first=True)
        if turn.messages:
            return self._encoder.first(list(turn.messages), turn.tools)
        return self._prompts[episode.key[0]].tokens

    def result(self) -> bytes:
        return msgspec.msgpack.encode(self.episodes)
