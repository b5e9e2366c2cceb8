"""The bookkeeping of generation: which row sits in which slot. No model and no communication lives here.

Groups of slots share a queue of rows. Every stage of a pipeline keeps the same books from the same tokens.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realhf.api.config import GenerationConfig
from realhf.data.batch import SequenceBatch

IntTable = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


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


class SlotTable:
    """One group of slots, of which the first ``n_live`` hold rows.

    A turn draws one token for each of the last ``n_drawing`` live rows: for all of them in a decoding step; for those
    that just entered when there is a ``prefill``. A group without live rows has ended: none will enter any more.
    Where slots lend, a prompt lies in the slot of one of its rows alone; when that row leaves, another one gets it.
    The books are kept in host memory, by numpy: they are many small steps, and a device would wait for each.
    """

    def __init__(self, request: Request, queue: deque[int], n_slots: int, lends: bool = False) -> None:
        self.request, self.queue, self.n_slots, self.lends = request, queue, n_slots, lends
        self.drawn: list[tuple[Tensor, Tensor]] = []  # rows and their tokens, in the order of drawing
        self._stops = np.array(request.stops, np.int64)
        self._hold(np.empty((8, 0), np.int64))
        self._choose()

    def _hold(self, table: IntTable) -> None:
        """Keep, by slot: last token, position of it, prompt number, sample, tokens drawn, row, limit.

        And the slot that has the row's prompt.
        """
        self._table, self.n_live = table, table.shape[1]
        self._last, self._positions, _, _, self._counts, self._rows, self._limits, self._holders = table
        self._starts = self._positions - self._counts + 1
        self.prefixes: Tensor | None = None
        if self.request.share:
            self.prefixes = self._placed(np.stack((self._rows // self.request.n, self._starts, self._holders)))

    def _placed(self, part: IntTable) -> Tensor:
        """Return what the model reads, where it is; on the CPU it shares the memory of the books."""
        return torch.from_numpy(part).to(self.request.stop_tokens.device)

    @property
    def inputs(self) -> Tensor:
        """What a turn depends on, ``[5, n_live]``: last token, position, prompt number, sample, tokens drawn."""
        return self._placed(self._table[:5])

    @property
    def counters(self) -> Tensor:
        """What a draw depends on, beside the seed: prompt number, sample and tokens drawn, ``[3, n_drawing]``."""
        return self._placed(self._table[2:5, self.n_live - self.n_drawing :])

    @property
    def rows(self) -> Tensor:
        return torch.from_numpy(self._rows)

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(self._positions)

    @property
    def holders(self) -> Tensor:
        return torch.from_numpy(self._holders)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, with the one that is computed next."""
        return int(self._positions.max(initial=-1)) + 1

    def record(self, tokens: Tensor) -> list[SlotMove]:
        """Take the turn's tokens ``[n_drawing]``, choose the next turn, and return what moves in the cache before it.

        Finished rows leave and the last live ones move into the holes.
        """
        first, seen = self.n_live - self.n_drawing, tokens.cpu().numpy()
        self.drawn.append((self.rows[first:], tokens))
        self._last[first:] = seen
        self._positions[first:] += 1
        self._counts[first:] += 1
        stopped = (seen[:, None] == self._stops).any(1)
        ended = np.flatnonzero(stopped | (self._counts[first:] >= self._limits[first:])) + first
        moves = self._evict(ended) if len(ended) else []
        self._choose()
        return moves

    def _evict(self, ended: IntTable) -> list[SlotMove]:
        keep, gone = self.n_live - len(ended), np.zeros(self.n_live, np.bool_)
        gone[ended] = True
        holders, moves = self._new_owners(gone)
        movers, holes = np.flatnonzero(~gone[keep:]) + keep, ended[ended < keep]
        places, now = np.arange(keep), np.arange(self.n_live)
        places[holes], now[movers] = movers, holes
        for src, dst in zip(movers.tolist(), holes.tolist(), strict=True):
            start = 0 if holders[src] == src else int(self._starts[src])
            moves.append(SlotMove(src, dst, start, int(self._positions[src])))
        table = self._table.take(places, 1)
        table[-1] = now[holders[places]]
        self._hold(table)
        return moves

    def _new_owners(self, gone: Flags) -> tuple[IntTable, list[SlotMove]]:
        """Return who has every row's prompt when some slots are gone, and what their heirs get of them."""
        holders, heirs = self._holders.copy(), dict[int, int]()
        for slot in np.flatnonzero(gone[holders] & ~gone).tolist():
            holders[slot] = heirs.setdefault(int(holders[slot]), slot)
        return holders, [SlotMove(holder, heir, 0, int(self._starts[heir])) for holder, heir in heirs.items()]

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
            self._admit(fresh, self.prefill.holders)

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

    def _admit(self, fresh: list[int], holders: list[int]) -> None:
        request, prompts = self.request, [row // self.request.n for row in fresh]
        numbers = [request.prompts.ids[prompt].prompt for prompt in prompts]
        samples, none = [row % request.n for row in fresh], [0] * len(fresh)
        positions = [request.lengths[prompt] - 1 for prompt in prompts]
        limits = [request.budgets[prompt] for prompt in prompts]
        columns = [none, positions, numbers, samples, none, fresh, limits, holders]
        self._hold(np.concatenate((self._table, np.array(columns, np.int64)), 1))
