"""Plays the episodes of a rollout between the engine and the environments."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from realhf.algorithms.policy_gradient.episodes import Episode, EpisodeGroup
from realhf.api.config import EnvConfig, GenerationConfig
from realhf.base.errors import UserError
from realhf.base.seeds import stable_seed
from realhf.data.chat import ChatEncoder
from realhf.data.turns import EpisodeKey, TurnInput, TurnOutput, TurnRequest
from realhf.environments import Reply, Turn
from realhf.environments.pool import EnvAnswer, EnvFailure, EnvPool

MAX_SPANS = 1000
"""Calls of environments in the trace, per rollout and worker."""


@dataclass(frozen=True)
class RolloutOptions:
    """``n_positions`` bounds the tokens of a row, ``max_episodes`` the open episodes.

    ``max_tokens`` bounds the tokens that an episode samples in this rollout, with weights of ``version``.
    """

    env: EnvConfig
    gen: GenerationConfig
    seed: int
    n_positions: int
    max_episodes: int
    max_tokens: int | None = None
    version: int = 0

    def max_len(self, prompt_length: int) -> int:
        """Return the maximum number of tokens of an episode's row."""
        return min(self.env.max_len(prompt_length, self.gen.max_new_tokens), self.n_positions)


@dataclass
class _OpenEpisode:
    """An episode in the pool under ``number``; ``row`` is open in the engine. ``left`` are tokens it may sample."""

    episode: Episode
    group: EpisodeGroup
    number: int
    max_len: int
    left: int
    row: int | None = None
    is_truncated: bool = False  # its environment was asked for the last reward


class EpisodeDriver:
    """Plays the episodes of groups of equal size: passes replies to environments, and their turns to the engine.

    An episode ends when its environment is done or fails, after ``max_turns`` replies, or at ``max_len`` tokens of a
    row; the last two are truncated. One that fails is played again up to ``retries`` times. It pauses after
    ``max_tokens``. The engine's sample ``sample + k * n`` is row ``k`` of an episode. One row of an episode is open at
    a time. ``paused`` are the numbers of paused episodes whose environments live; ``spans`` are calls of environments,
    for the trace.
    """

    def __init__(
        self,
        pool: EnvPool,
        tokenizer: Any,
        groups: Sequence[EpisodeGroup],
        options: RolloutOptions,
        paused: Mapping[EpisodeKey, int] | None = None,
    ) -> None:
        self._pool, self._tokenizer, self._encoder = pool, tokenizer, ChatEncoder(tokenizer)
        self._vocab, self._options = len(tokenizer), options
        self.groups, self._n = groups, len(groups[0].episodes) if groups else 1
        self._pending = deque((e, group) for group in groups for e in group.episodes if not e.is_over)
        self._by_key: dict[EpisodeKey, _OpenEpisode] = {}
        self._by_number: dict[int, _OpenEpisode] = {}
        self.spans: list[tuple[str, int, int]] = []
        self.paused = dict(paused or {})
        for key in self.paused.keys() - {episode.key for episode, _ in self._pending}:
            pool.end(self.paused.pop(key))

    def next(self, outputs: Sequence[TurnOutput], is_idle: bool) -> TurnRequest:
        request = TurnRequest()
        for output in outputs:
            prompt, sample = output.key
            self._sampled(self._by_key[prompt, sample % self._n], output, request)
        self._start(request)
        while True:
            wait_s = self._options.env.timeout if is_idle and self._by_number and not request.inputs else 0.0
            for answer in self._pool.poll(wait_s):
                one = self._by_number[answer.episode]
                one.episode.seconds.append(answer.seconds)
                self._record(answer)
                self._answered(one, answer.result, request)
            self._start(request)
            if not is_idle or request.inputs or not self._by_number:
                break
        return TurnRequest(request.inputs, request.closed, done=is_idle and not request.inputs and not self._by_number)

    def _record(self, answer: EnvAnswer) -> None:
        if answer.op and len(self.spans) < MAX_SPANS:
            duration = int(answer.seconds * 1e6)
            self.spans.append((f"environment/{answer.op}", time.time_ns() // 1000 - duration, duration))

    def _start(self, request: TurnRequest) -> None:
        options = self._options
        while self._pending and len(self._by_number) < options.max_episodes:
            episode, group = self._pending.popleft()
            known, max_len = self.paused.pop(episode.key, None), options.max_len(len(group.tokens))
            number = self._pool.new_number() if known is None else known
            one = _OpenEpisode(episode, group, number, max_len, self._most_tokens(max_len))
            self._by_key[episode.key] = self._by_number[one.number] = one
            if episode.history:
                if known is None:
                    self._pool.restore(one.number, episode.history)
                self._sample([], one, request)
                continue
            self._reset(one)

    def _most_tokens(self, max_len: int) -> int:
        return self._options.max_tokens or max_len * self._options.env.max_turns

    def _reset(self, one: _OpenEpisode) -> None:
        prompt, sample = one.episode.key
        parts = ("environment", self._options.seed, prompt, *([sample] if self._options.env.seed_per_sample else []))
        self._pool.reset(one.number, json.loads(one.group.row), stable_seed(*parts))

    def _play_again(self, one: _OpenEpisode, request: TurnRequest) -> None:
        """Start an episode again that has failed; with a deterministic environment it is the same.

        Of an episode that began with older weights, only the environment is played again.
        """
        failed = one.episode
        if failed.history:
            failed.retries += 1
            self._pool.retry(one.number)
            return
        one.episode = Episode(failed.key, seconds=failed.seconds, retries=failed.retries + 1)
        one.group.episodes[one.group.episodes.index(failed)] = one.episode
        self._close(one, request)
        one.row, one.is_truncated, one.left = None, False, self._most_tokens(one.max_len)
        self._reset(one)

    def _sampled(self, one: _OpenEpisode, output: TurnOutput, request: TurnRequest) -> None:
        episode, row = one.episode, one.episode.row
        one.left -= len(output.tokens)
        if not episode.append_sampled(output, self._options.version):
            self._pause(one, request)
            return
        tokens, logprobs = row.tokens[episode.reply_start :], row.logprobs[episode.reply_start :]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        episode.end_reply(text)
        stop = "stop" if output.stopped else "length"
        self._pool.step(one.number, Reply(text, tokens, [], stop, logprobs, episode.reply_start))

    def _answered(self, one: _OpenEpisode, result: Turn | EnvFailure, request: TurnRequest) -> None:
        episode, options = one.episode, self._options
        if isinstance(result, EnvFailure) and episode.retries < options.env.retries:
            self._play_again(one, request)
            return
        if isinstance(result, EnvFailure):
            episode.failure = f"{result.kind}: {result.detail}\n{result.traceback}".strip()
            self._end(one, request)
            return
        if episode.n_turns:
            episode.append_reward(result.reward)
        episode.info = result.info
        if result.done or one.is_truncated:
            episode.truncated = one.is_truncated
            self._end(one, request)
            return
        tokens, problem = self._next_tokens(one, result)
        if problem:
            episode.failure = f"error: {problem}"
            self._end(one, request)
            return
        limits = options.gen.max_new_tokens, one.max_len - len(episode.row.tokens) - len(tokens)
        episode.reply_left = min(*limits, result.max_tokens or limits[0])
        if episode.n_turns >= options.env.max_turns or episode.reply_left < 1:
            episode.drop_empty_row()
            one.is_truncated = True
            self._pool.truncate(one.number)
            return
        self._sample(tokens, one, request)

    def _sample(self, tokens: list[int], one: _OpenEpisode, request: TurnRequest) -> None:
        """Request the reply after ``tokens``, or the rest of one, or pause the episode before it."""
        episode, row = one.episode, one.episode.row
        count = sum(row.sampled)
        is_in_reply = row.is_in_reply
        row.append(tokens)
        if not is_in_reply:
            episode.reply_start = len(row.tokens)
        limit = min(episode.reply_left, one.left)
        if limit < 1:
            self._pause(one, request)
            return
        is_open = one.row == episode.current
        if not is_open:
            self._close(one, request)
            one.row = episode.current
        key = self._key(episode, episode.current)
        request.inputs.append(TurnInput(key, tokens if is_open else list(row.tokens), limit, count))

    def _key(self, episode: Episode, row: int) -> EpisodeKey:
        prompt, sample = episode.key
        return prompt, sample + row * self._n

    def _close(self, one: _OpenEpisode, request: TurnRequest) -> None:
        if one.row is not None:
            request.closed.append(self._key(one.episode, one.row))

    def _problem(self, one: _OpenEpisode, tokens: Sequence[int]) -> str:
        if tokens and max(tokens) >= self._vocab:
            return f"Turn.tokens has token {max(tokens)}, the vocabulary has {self._vocab} tokens"
        if not one.episode.has_started and len(tokens) >= one.max_len:
            return (f"the first turn has {len(tokens)} tokens, an episode may have {one.max_len} "
                    "(env.max_episode_len)")  # fmt: skip
        return ""

    def _pause(self, one: _OpenEpisode, request: TurnRequest) -> None:
        one.episode.history = self._pool.history(one.number)
        self.paused[one.episode.key] = one.number
        self._release(one, request)

    def _end(self, one: _OpenEpisode, request: TurnRequest) -> None:
        episode = one.episode
        self._pool.end(one.number)
        self._release(one, request)
        episode.is_over, episode.history = True, []
        episode.drop_empty_row()
        if not episode.has_started:  # a row has at least one token
            prompt = one.group.tokens[: one.max_len]
            episode.row.append(prompt or [self._tokenizer.eos_token_id])

    def _release(self, one: _OpenEpisode, request: TurnRequest) -> None:
        self._close(one, request)
        del self._by_number[one.number], self._by_key[one.episode.key]

    def _next_tokens(self, one: _OpenEpisode, turn: Turn) -> tuple[list[int], str]:
        """Return the tokens of a turn, and what is wrong with it, such as messages that the chat template refuses."""
        try:
            tokens = self._tokens(one, turn)
        except UserError as error:
            if self._tokenizer.chat_template is None:
                raise
            return [], str(error)
        return tokens, self._problem(one, tokens)

    def _tokens(self, one: _OpenEpisode, turn: Turn) -> list[int]:
        """Return the tokens between the last reply, or the start, and the next reply; at least one at the start.

        A whole conversation makes the row current that it continues.
        """
        episode = one.episode
        if turn.whole:
            return self._rest(episode, turn) or ([] if episode.row.tokens else [self._tokenizer.eos_token_id])
        if not episode.has_started:
            return self._first(one.group, turn) or [self._tokenizer.eos_token_id]
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

    def _first(self, group: EpisodeGroup, turn: Turn) -> list[int]:
        if turn.tokens is not None:
            return turn.tokens
        if turn.text is not None:
            return self._encoder.text(turn.text, is_first=True)
        if turn.messages:
            return self._encoder.first(list(turn.messages), turn.tools)
        return group.tokens

    def result(self) -> bytes:
        return msgspec.msgpack.encode(self.groups)
