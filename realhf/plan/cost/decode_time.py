"""Time of one replica's generation: which rows decode together and for how long, and the seconds of this.

Slots are refilled, rows end at different steps, and a pipeline's rows form groups, as in models/engine/decode.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from realhf.plan.cost.speed import Speed, Stages, Work

MAX_BUNDLE = 1 / 32
"""Fraction of the live rows that may end within one span: a span is priced at its mean number of rows."""


class CacheReads(Enum):
    """Cached tokens that a decoding step reads: all rows as many as the longest, their own, or prompts only once."""

    PADDED = "padded"
    OWN = "own"
    SHARED = "shared"


class DecodeSpan(NamedTuple):
    """``steps`` decoding steps of ``rows`` rows, which read ``context`` cached tokens each (means over the steps)."""

    steps: int
    rows: float
    context: float


@dataclass(frozen=True)
class DecodeSchedule:
    """``prefills`` are the prompts that are computed together, and the number of rows that are admitted with them."""

    prefills: tuple[tuple[tuple[int, ...], int], ...]
    spans: tuple[DecodeSpan, ...]

    @property
    def n_steps(self) -> int:
        return sum(span.steps for span in self.spans)


class _LiveRows:
    """The rows in slots. A row that is admitted at step ``t`` has ``1 + s - t`` sampled tokens at step ``s``."""

    def __init__(self) -> None:
        self.now = 0
        self.ends: list[tuple[int, int, int]] = []  # heap: the last step, number of the prompt, step of admission
        self._starts: list[tuple[int, int]] = []  # heap: step of admission minus prompt length, the last step
        self._prompts: Counter[int] = Counter()  # live rows by prompt
        self._admitted, self._own_tokens, self._distinct_tokens = 0, 0, 0

    def admit(self, prompt: int, length: int, response: int) -> None:
        if response <= 1:  # prefill samples the first token
            return
        end = self.now + response - 1
        heappush(self.ends, (end, prompt, self.now))
        heappush(self._starts, (self.now - length, end))
        self._admitted += self.now
        self._own_tokens += length
        self._distinct_tokens += 0 if self._prompts[prompt] else length
        self._prompts[prompt] += 1

    def advance(self, step: int, prompts: tuple[int, ...]) -> None:
        """Move to a step, and evict the rows that have ended by then; ``prompts`` are the lengths by number."""
        self.now = step
        while self.ends and self.ends[0][0] <= step:
            _, prompt, admitted = heappop(self.ends)
            self._admitted -= admitted
            self._own_tokens -= prompts[prompt]
            self._prompts[prompt] -= 1
            self._distinct_tokens -= 0 if self._prompts[prompt] else prompts[prompt]

    def read_tokens(self, reads: CacheReads) -> float:
        """Return the cached tokens that all rows together read in a step from now."""
        n = len(self.ends)
        if reads is CacheReads.PADDED:
            while self._starts[0][1] <= self.now:  # it has ended
                heappop(self._starts)
            return n * (1 + self.now - self._starts[0][0])
        sampled = n * (1 + self.now) - self._admitted
        return sampled + (self._distinct_tokens if reads is CacheReads.SHARED else self._own_tokens)


@lru_cache(maxsize=512)
def decode_schedule(
    prompts: tuple[int, ...], responses: tuple[int, ...], n_slots: int, reads: CacheReads
) -> DecodeSchedule:
    """Return the order in which one replica samples responses: their lengths, as many to each of ``prompts``.

    A prompt is computed once for all its rows that are admitted together. Rows are admitted when an eighth of the slots
    is free, or enough for all waiting rows. Rows that end almost together are in one span.
    """
    n = len(responses) // len(prompts)
    live, first = _LiveRows(), 0
    prefills, spans = list[tuple[tuple[int, ...], int]](), list[DecodeSpan]()
    while first < len(responses) or live.ends:
        free, waiting = n_slots - len(live.ends), len(responses) - first
        if waiting and (free * 8 >= n_slots or free >= waiting):
            stop = first + min(free, waiting)
            prefills.append((prompts[first // n : (stop - 1) // n + 1], stop - first))
            for row in range(first, stop):
                live.admit(row // n, prompts[row // n], responses[row])
            first = stop
        else:
            most = max(1, int(len(live.ends) * MAX_BUNDLE))
            if waiting:
                most = min(most, min(-(-n_slots // 8), waiting) - free)
            spans.append(_span(live, prompts, most, reads))
    return DecodeSchedule(tuple(prefills), tuple(spans))


def _span(live: _LiveRows, prompts: tuple[int, ...], most: int, reads: CacheReads) -> DecodeSpan:
    """Decode until at least ``most`` rows have ended, and return the span."""
    begin, n_kept, row_steps, read = live.now, len(live.ends) - most, 0, 0.0
    while len(live.ends) > n_kept:
        n, steps = len(live.ends), live.ends[0][0] - live.now
        row_steps += n * steps
        read += steps * (live.read_tokens(reads) + n * steps / 2)  # rows become longer meanwhile
        live.advance(live.now + steps, prompts)
    return DecodeSpan(live.now - begin, row_steps / (live.now - begin), read / row_steps)


@dataclass
class DecodeTimer:
    """Seconds of a schedule. ``send`` is the seconds to send the activations of some tokens to the next stage.

    After ``seconds`` was called, ``busy`` is the seconds that the stages compute, summed over stages.
    """

    speed: Speed
    stages: Stages
    token_limit: int
    send: Callable[[int], float]
    busy: float = 0.0

    def __post_init__(self) -> None:
        # the head computes only the last token of a prompt
        self._bodies = [replace(shard, last=False) for shard, _ in self.stages]
        self._heads = [replace(shard, n_blocks=0, first=False) for shard, _ in self.stages]

    def seconds(self, schedule: DecodeSchedule) -> float:
        self.busy, seconds = 0.0, 0.0
        for (prompts, n_rows), count in Counter(schedule.prefills).items():
            seconds += count * self._prefill(prompts, n_rows, count)
        return seconds + sum(self._decode(*span) for span in schedule.spans)

    def _prefill(self, prompts: tuple[int, ...], n_rows: int, count: int) -> float:
        work = Work.of(prompts)
        passes = max(1, -(-work.tokens // self.token_limit))
        times = [
            self.speed.forward(body, work, ranks) + self.speed.decode(head, n_rows, 0, ranks)
            for body, head, (_, ranks) in zip(self._bodies, self._heads, self.stages, strict=True)
        ]
        self.busy += count * sum(times)
        bubble = sum(times) / passes + (passes - 1) / passes * max(times)
        return bubble + (len(times) - 1) * self.send(-(-work.tokens // passes))

    def _decode(self, n: int, n_rows: float, context: float) -> float:
        """Return the seconds of ``n`` tokens for all rows; groups of rows are pipelined over the stages."""
        n_groups = min(len(self.stages), max(1, int(n_rows)))
        rows = -(-round(n_rows) // n_groups)
        times = [self.speed.decode(shard, rows, context, ranks) for shard, ranks in self.stages]
        self.busy += n * n_groups * sum(times)
        if len(times) == 1:
            return n * times[0]
        round_trip = sum(times) + len(times) * self.send(rows)
        return n * max(round_trip, n_groups * max(times))
