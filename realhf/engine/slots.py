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

    ``ends`` says for every row that enters where its prompt ends in the packed prompts, ``holders`` which slot has it.
    """

    prompts: list[int]
    slots: list[int]
    copies: list[tuple[int, list[int], int]]
    ends: list[int]
    holders: list[int]


def plan_prefill(
    fresh: Sequence[int], first_slot: int, n: int, texts: Mapping[int, list[int]], lends: bool = False
) -> Prefill:
    """Plan for rows that enter the slots from ``first_slot`` on; ``texts`` are the tokens of their prompts.

    A prompt with which another one begins is not computed: states of one answer share what came before. Where a slot
    ``lends`` its prompt to the other rows of it, only that one gets it.
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
        if others := [slot for slot in (own[:1] if lends else own) if slot != first]:
            copies.append((first, others, len(texts[prompt])))
    ends = [starts[leaders[row // n]] + len(texts[row // n]) - 1 for row in fresh]
    holders = [slots[row // n][0] if lends else slot for slot, row in enumerate(fresh, first_slot)]
    return Prefill(order, [slots[prompt][0] for prompt in order], copies, ends, holders)


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
    """Cached tokens ``start`` to ``stop`` of a row go to another slot."""

    src: int
    dst: int
    start: int
    stop: int


class Slots:
    """One group of slots, of which the first ``n_live`` hold rows.

    A turn draws one token for each of the last ``n_drawing`` live rows: for all of them in a decoding step; for those
    that just entered when there is a ``prefill``. A group without live rows has ended: none will enter any more.
    Where slots lend, a prompt lies in the slot of one of its rows alone; when that row leaves, another one gets it.
    """

    def __init__(self, request: Request, queue: deque[int], n_slots: int, lends: bool = False) -> None:
        self.request, self.queue, self.n_slots, self.lends = request, queue, n_slots, lends
        self.drawn: list[tuple[Tensor, Tensor]] = []  # rows and their tokens, in the order of drawing
        self._hold(torch.empty(8, 0, dtype=torch.int64, device=request.stop_tokens.device))
        self._choose()

    def _hold(self, table: Tensor) -> None:
        """Keep, by slot: prompt number, sample, tokens drawn, position of the last token, that token, row, limit.

        And the slot that has the row's prompt.
        """
        self._table, self.n_live = table, table.shape[1]
        _, _, self._counts, self.positions, self.last, self.rows, self._limits, self.holders = table
        self.prefixes: Tensor | None = None
        if self.request.share:
            starts = self.positions - self._counts + 1
            self.prefixes = torch.stack((self.rows // self.request.n, starts, self.holders))

    @property
    def counters(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a draw depends on, beside the seed: prompt number, sample and position, ``[n_drawing]`` each."""
        prompts, samples, counts = self._table[:3, self.n_live - self.n_drawing :]
        return prompts, samples, counts

    @property
    def inputs(self) -> Tensor:
        """What a decoding step depends on, ``[5, n_live]``: last token, position, prompt number, sample, count."""
        return self._table[[4, 3, 0, 1, 2]]

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
        keep, gone, positions = self.n_live - len(slots), set(slots), self.positions.tolist()
        starts = (self.positions - self._counts + 1).tolist()
        holders, moves = self._inherited(gone, starts)
        movers = [slot for slot in range(keep, self.n_live) if slot not in gone]
        holes = [slot for slot in slots if slot < keep]
        places, now = list(range(keep)), list(range(self.n_live))
        for mover, hole in zip(movers, holes, strict=True):
            places[hole], now[mover] = mover, hole
            moves.append(SlotMove(mover, hole, 0 if holders[mover] == mover else starts[mover], positions[mover]))
        table = self._table[:, torch.tensor(places, dtype=torch.int64, device=self._table.device)]
        table[-1] = torch.tensor([now[holders[place]] for place in places], device=table.device)
        self._hold(table)
        return moves

    def _inherited(self, gone: set[int], starts: Sequence[int]) -> tuple[list[int], list[SlotMove]]:
        """Return who has every row's prompt when some slots are gone, and what their heirs get of them."""
        holders, heirs = self.holders.tolist(), dict[int, int]()
        for slot, holder in enumerate(holders):
            if holder in gone and slot not in gone:
                holders[slot] = heirs.setdefault(holder, slot)
        return holders, [SlotMove(holder, heir, 0, starts[heir]) for holder, heir in heirs.items()]

    def _choose(self) -> None:
        """Let rows enter when an eighth of the slots is free, or enough for all that wait; else decode."""
        self.prefill: Prefill | None = None
        self.n_drawing = self.n_live
        free = self.n_slots - self.n_live
        if self.queue and (free * 8 >= self.n_slots or free >= len(self.queue)):
            fresh = self._take(free)
            texts = {row // self.request.n: self.request.ids[row // self.request.n] for row in fresh}
            self.prefill = plan_prefill(fresh, self.n_live, self.request.n, texts, self.lends)
            self.n_drawing = len(fresh)
            self._enter(fresh, self.prefill.holders)

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

    def _enter(self, fresh: list[int], holders: list[int]) -> None:
        request, prompts = self.request, [row // self.request.n for row in fresh]
        numbers = [request.prompts.ids[prompt].prompt for prompt in prompts]
        samples, none = [row % request.n for row in fresh], [0] * len(fresh)
        positions = [request.lengths[prompt] - 1 for prompt in prompts]
        limits = [request.budgets[prompt] for prompt in prompts]
        columns = [numbers, samples, none, positions, none, fresh, limits, holders]
        self._hold(torch.cat((self._table, torch.tensor(columns, device=self._table.device)), 1))
