"""The bookkeeping of generation: which row sits in which slot. No model and no communication lives here.

Groups of slots share a queue of rows. Every stage of a pipeline keeps the same books from the same tokens.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from realhf.api.config import GenerationConfig
from realhf.data.batch import SequenceBatch


@dataclass(frozen=True)
class Request:
    """What one call of generation asks for: row r is sample ``r % n`` of prompt ``r // n``.

    ``max_prefill_tokens`` bounds the prompts that are computed in one pass; only a single longer one may exceed it.
    ``share``: what rows of one prompt have cached alike may be read once for all of them.
    """

    prompts: SequenceBatch
    config: GenerationConfig
    n: int
    seed: int
    stops: tuple[int, ...]
    max_prefill_tokens: int
    share: bool = True

    @cached_property
    def texts(self) -> tuple[Tensor, ...]:
        """The tokens of every prompt."""
        return self.prompts.columns["prompts"].rows()

    @cached_property
    def ids(self) -> tuple[list[int], ...]:
        """The tokens of every prompt, as numbers."""
        return tuple(text.tolist() for text in self.texts)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.prompts.lengths("prompts")

    @property
    def n_rows(self) -> int:
        return len(self.prompts) * self.n

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """New tokens that an answer to each prompt may have."""
        if "budget" not in self.prompts.columns:
            return (self.config.max_new_tokens,) * len(self.prompts)
        return tuple(self.prompts["budget"].tolist())

    @property
    def longest(self) -> int:
        """Tokens that a row may reach."""
        return max(length + budget for length, budget in zip(self.lengths, self.budgets, strict=True))

    @cached_property
    def stop_tokens(self) -> Tensor:
        return torch.tensor(self.stops, dtype=torch.int64, device=self.prompts["prompts"].device)


@dataclass(frozen=True)
class Prefill:
    """Prompts to compute, shortest first, each into a slot; ``copies`` are what other slots get of them, and how much.

    ``ends`` says for every row that enters where its prompt ends in the packed prompts.
    """

    prompts: list[int]
    slots: list[int]
    copies: list[tuple[int, list[int], int]]
    ends: list[int]


def plan_prefill(fresh: Sequence[int], first_slot: int, n: int, texts: Mapping[int, list[int]]) -> Prefill:
    """Plan for rows that enter the slots from ``first_slot`` on; ``texts`` are the tokens of their prompts.

    A prompt with which another one begins is not computed: states of one answer share what came before.
    """
    slots: dict[int, list[int]] = {}
    for slot, row in enumerate(fresh, first_slot):
        slots.setdefault(row // n, []).append(slot)
    leaders = leaders_of({prompt: texts[prompt] for prompt in slots})
    order = sorted(set(leaders.values()), key=lambda prompt: (len(texts[prompt]), prompt))
    starts = dict(zip(order, accumulate((len(texts[prompt]) for prompt in order), initial=0), strict=False))
    copies = []
    for prompt, own in slots.items():
        first = slots[leaders[prompt]][0]
        if others := [slot for slot in own if slot != first]:
            copies.append((first, others, len(texts[prompt])))
    ends = [starts[leaders[row // n]] + len(texts[row // n]) - 1 for row in fresh]
    return Prefill(order, [slots[prompt][0] for prompt in order], copies, ends)


def leaders_of(texts: Mapping[int, list[int]]) -> dict[int, int]:
    """Return for every text one that begins with it, itself where no other does.

    In alphabetical order a text is directly followed by those that begin with it.
    """
    order = sorted(texts, key=lambda number: texts[number])
    leaders: dict[int, int] = {}
    for number, follower in zip(reversed(order), [None, *reversed(order)], strict=False):
        text = texts[number]
        is_prefix = follower is not None and texts[follower][: len(text)] == text
        leaders[number] = leaders[follower] if is_prefix and follower is not None else number
    return leaders


@dataclass(frozen=True)
class SlotMove:
    """The first ``length`` cached tokens of a row go to another slot."""

    src: int
    dst: int
    length: int


class Slots:
    """One group of slots, of which the first ``n_live`` hold rows.

    A turn draws one token for each of the last ``n_drawing`` live rows: for all of them in a decoding step; for those
    that just entered when there is a ``prefill``. A group without live rows has ended: none will enter any more.
    """

    def __init__(self, request: Request, queue: deque[int], n_slots: int) -> None:
        self.request, self.queue, self.n_slots = request, queue, n_slots
        self.drawn: list[tuple[Tensor, Tensor]] = []  # rows and their tokens, in the order of drawing
        self._hold(torch.empty(7, 0, dtype=torch.int64, device=request.stop_tokens.device))
        self._choose()

    def _hold(self, table: Tensor) -> None:
        """Keep, by slot: prompt number, sample, tokens drawn, position of the last token, that token, row, limit."""
        self._table, self.n_live = table, table.shape[1]
        _, _, self._counts, self.positions, self.last, self.rows, self._limits = table
        self.prefixes: Tensor | None = None
        if self.request.share:
            self.prefixes = torch.stack((self.rows // self.request.n, self.positions - self._counts + 1))

    @property
    def counters(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a draw depends on, beside the seed: prompt number, sample and position, ``[n_drawing]`` each."""
        prompts, samples, counts = self._table[:3, self.n_live - self.n_drawing :]
        return prompts, samples, counts

    def record(self, tokens: Tensor) -> list[SlotMove]:
        """Take the turn's tokens ``[n_drawing]``, choose the next turn, and return what moves in the cache before it.

        Finished rows leave and the last live ones move into the holes.
        """
        request, first = self.request, self.n_live - self.n_drawing
        self.drawn.append((self.rows[first:], tokens))
        self.last[first:] = tokens
        self._table[2:4, first:] += 1
        stopped = (tokens[:, None] == request.stop_tokens).any(1)  # of few: isin would sort
        ended = (stopped | (self._counts[first:] >= self._limits[first:])).nonzero().flatten() + first
        moves = self._leave(ended.tolist()) if len(ended) else []
        self._choose()
        return moves

    def _leave(self, slots: list[int]) -> list[SlotMove]:
        keep, gone, lengths = self.n_live - len(slots), set(slots), self.positions.tolist()
        movers = [slot for slot in range(keep, self.n_live) if slot not in gone]
        holes = [slot for slot in slots if slot < keep]
        places = list(range(keep))
        for mover, hole in zip(movers, holes, strict=True):
            places[hole] = mover
        self._hold(self._table[:, torch.tensor(places, dtype=torch.int64, device=self._table.device)])
        return [SlotMove(mover, hole, lengths[mover]) for mover, hole in zip(movers, holes, strict=True)]

    def _choose(self) -> None:
        """Let rows enter when an eighth of the slots is free, or enough for all that wait; else decode."""
        self.prefill: Prefill | None = None
        self.n_drawing = self.n_live
        free = self.n_slots - self.n_live
        if self.queue and (free * 8 >= self.n_slots or free >= len(self.queue)):
            fresh = self._take(free)
            texts = {row // self.request.n: self.request.ids[row // self.request.n] for row in fresh}
            self.prefill = plan_prefill(fresh, self.n_live, self.request.n, texts)
            self.n_drawing = len(fresh)
            self._enter(fresh)

    def _take(self, n_slots: int) -> list[int]:
        """Take rows from the queue while there are slots for them and tokens left for their prompts."""
        request, rows, n_tokens = self.request, list[int](), 0
        while self.queue and len(rows) < n_slots:
            prompt = self.queue[0] // request.n
            if not rows or prompt != rows[-1] // request.n:
                n_tokens += request.lengths[prompt]
                if rows and n_tokens > request.max_prefill_tokens:
                    break
            rows.append(self.queue.popleft())
        return rows

    def _enter(self, fresh: list[int]) -> None:
        request, prompts = self.request, [row // self.request.n for row in fresh]
        numbers = [request.prompts.ids[prompt].prompt for prompt in prompts]
        samples, none = [row % request.n for row in fresh], [0] * len(fresh)
        positions = [request.lengths[prompt] - 1 for prompt in prompts]
        limits = [request.budgets[prompt] for prompt in prompts]
        columns = torch.tensor([numbers, samples, none, positions, none, fresh, limits], device=self._table.device)
        self._hold(torch.cat((self._table, columns), 1))
