"""Episodes of multi-turn rollouts and their rows. Imports no torch."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.data.turns import EpisodeKey, TurnOutput
from realhf.environments.pool import PastRequest

Message = Mapping[str, Any]


@dataclass
class EpisodeRow:
    """A conversation that only grows. Lists are by token; ``sampled`` is 1 on tokens that the model sampled for it.

    ``versions`` are those of the weights that sampled, 0 elsewhere. ``replies`` are the ends of replies, with the
    checksum of the tokens up to there. ``n_messages`` counts the messages up to each reply, for conversations that an
    agent sends whole; ``messages`` are those.
    """

    tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    replies: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    n_messages: list[int] = field(default_factory=list)

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model has not sampled."""
        self.tokens += tokens
        self.sampled += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [0] * len(tokens)

    def append_sampled(self, output: TurnOutput, version: int = 0) -> None:
        """Append tokens of a reply, which may go on."""
        self.tokens += output.tokens
        self.sampled += [1] * len(output.tokens)
        self.logprobs += output.logprobs
        self.versions += [version] * len(output.tokens)

    def end_reply(self, text: str) -> None:
        self.replies.append((len(self.tokens), checksum(self.tokens)))
        if self.messages:
            self.messages.append({"role": "assistant", "content": text})
            self.n_messages.append(len(self.messages))

    def fork(self, number: int) -> EpisodeRow:
        """Return a new row with the tokens up to the end of reply ``number``, none of which is its own."""
        row = EpisodeRow()
        row.append(self.tokens[: self.replies[number][0]])
        return row

    @property
    def is_in_reply(self) -> bool:
        """Whether the last reply is incomplete."""
        end = self.replies[-1][0] if self.replies else 0
        return bool(self.sampled) and self.sampled[-1] == 1 and end < len(self.tokens)

    @property
    def n_drifted(self) -> int:
        """Number of sampled tokens of replies that are not, or not in the context, in which they were sampled."""
        starts = [0, *(end for end, _ in self.replies)]
        pairs = zip(starts, self.replies, strict=False)
        return sum(
            sum(self.sampled[start:end]) for start, (end, known) in pairs if checksum(self.tokens[:end]) != known
        )


def checksum(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("q", tokens).tobytes())


@dataclass
class Episode:
    """An episode of a prompt's sample: its rows, of which the last is continued.

    ``last`` are the row and the index of the token that the model has sampled last. ``rewards`` are these at the time
    of a reward, and the reward. While the model replies, ``reply_start`` is the index of the reply's first token, and
    ``reply_left`` how many tokens it may still have. ``history`` are the environment's requests of a paused episode.
    """

    key: EpisodeKey
    rows: list[EpisodeRow] = field(default_factory=lambda: [EpisodeRow()])
    current: int = 0
    last: tuple[int, int] = (0, 0)
    rewards: list[tuple[int, int, float]] = field(default_factory=list)
    n_turns: int = 0
    truncated: bool = True
    failure: str = ""
    info: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    reply_start: int = 0
    reply_left: int = 0
    history: list[PastRequest] = field(default_factory=list)
    is_over: bool = False
    retries: int = 0

    @property
    def row(self) -> EpisodeRow:
        return self.rows[self.current]

    @property
    def has_started(self) -> bool:
        return bool(self.rows[0].tokens)

    def append_sampled(self, output: TurnOutput, version: int = 0) -> bool:
        """Append sampled tokens; return whether the reply is complete."""
        self.row.append_sampled(output, version)
        self.last = (self.current, len(self.row.tokens) - 1)
        self.reply_left -= len(output.tokens)
        return output.stopped or self.reply_left < 1

    def end_reply(self, text: str) -> None:
        self.row.end_reply(text)
        self.n_turns += 1

    def append_reward(self, reward: float) -> None:
        """Append the reward of the last reply, or add to it."""
        if self.rewards and self.rewards[-1][:2] == self.last:
            reward += self.rewards.pop()[2]
        self.rewards.append((*self.last, reward))

    def drop_empty_row(self) -> None:
        """Remove the last row if the model sampled nothing for it, unless it is the only one."""
        if len(self.rows) > 1 and not self.rows[-1].replies:
            self.rows.pop()
            self.current = self.last[0]

    def score(self, turn_discount: float) -> float:
        """Return the discounted sum of the rewards; NaN for a failed episode."""
        if self.failure:
            return math.nan
        return sum(reward * turn_discount**i for i, (*_, reward) in enumerate(self.rewards))

    def continue_messages(self, messages: Sequence[Message]) -> int:
        """Make the row current that a whole conversation continues, or a new one; return how many messages it has.

        A conversation continues a row whose messages it starts with. Else it forks from the last reply that it has in
        common with one.
        """
        best = (0, 0, -1)
        for number, row in enumerate(self.rows):
            for reply, n in enumerate(row.n_messages):
                if n > best[0] and list(messages[:n]) == row.messages[:n]:
                    best = (n, number, reply)
        n, number, reply = best
        self._select(number, reply, len(self.rows[number].n_messages))
        self.row.messages = list(messages)
        return n

    def continue_tokens(self, tokens: Sequence[int]) -> int:
        """Make the row current that the tokens continue, or a new one; return how many of the tokens it has."""
        best = (0, 0, -1)
        for number, row in enumerate(self.rows):
            for reply, (end, _) in enumerate(row.replies):
                if best[0] < end <= len(tokens) and list(tokens[:end]) == row.tokens[:end]:
                    best = (end, number, reply)
        n, number, reply = best
        self._select(number, reply, len(self.rows[number].replies))
        return n

    def _select(self, number: int, reply: int, n_replies: int) -> None:
        if reply >= 0 and reply == n_replies - 1:
            self.current = number
        elif self.has_started:
            new = self.rows[number].fork(reply) if reply >= 0 else EpisodeRow()
            self.rows.append(new)
            self.current = len(self.rows) - 1


@dataclass
class EpisodeGroup:
    """The episodes of a prompt, with its tokens and its row of the data set, as JSON: its numbers may have any size."""

    prompt: int
    tokens: list[int]
    row: str
    episodes: list[Episode]

    @staticmethod
    def new(prompt: int, tokens: list[int], row: str, n: int) -> EpisodeGroup:
        return EpisodeGroup(prompt, tokens, row, [Episode((prompt, sample)) for sample in range(n)])

    @property
    def is_over(self) -> bool:
        return all(episode.is_over for episode in self.episodes)
