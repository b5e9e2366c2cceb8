"""Which row is in which slot: the bookkeeping of generation, without model and communication.

Groups of slots share a queue of rows. Every stage of a pipeline computes the same state from the same tokens.
"""

from bisect import insort
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
from realhf.ops.cascade import PrefixGroups, group_prefixes
from realhf.ops.rows import on_device

IntTable = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Request:
    """One call of generation: row r is sample ``r % n`` of prompt ``r // n``.

    ``max_prefill_tokens`` bounds the prompts of one prefill; only a single longer prompt may exceed it. With
    ``share_prefixes`` the cached prefix of the rows of one prompt may be read once for all of them. With
    ``records_experts`` the experts of all tokens are a column of the result.
    """

    prompts: SequenceBatch
    config: GenerationConfig
    n: int
    seed: int
    stop_ids: tuple[int, ...]
    max_prefill_tokens: int
    share_prefixes: bool = True
    records_experts: bool = False

    @cached_property
    def prompt_tensors(self) -> tuple[Tensor, ...]:
        return self.prompts.columns["prompts"].rows()

    @cached_property
    def prompt_tokens(self) -> tuple[list[int], ...]:
        tokens = self.prompts["prompts"].cpu()  # one copy for all
        return tuple(prompt.tolist() for prompt in tokens.split(self.lengths))

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.prompts.lengths("prompts")

    @property
    def n_rows(self) -> int:
        return len(self.prompts) * self.n

    @property
    def n_kept(self) -> int:
        """The number of responses per prompt that are results: the shortest ones, the first ones of equal length."""
        return min(self.config.keep_first or self.n, self.n)

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """The maximum number of new tokens of each prompt."""
        if "budget" not in self.prompts.columns:
            return (self.config.max_new_tokens,) * len(self.prompts)
        return tuple(self.prompts["budget"].tolist())

    @property
    def max_row_len(self) -> int:
        return max(length + budget for length, budget in zip(self.lengths, self.budgets, strict=True))

    @cached_property
    def stop_tokens(self) -> Tensor:
        return on_device(torch.tensor(self.stop_ids, dtype=torch.int64), self.prompts["prompts"].device)


@dataclass(frozen=True)
class Prefill:
    """Prompts to compute, shortest first, each into a slot.

    ``copies`` are (source slot, target slots, number of tokens). For each admitted row, ``ends`` is the index of its
    prompt's last token in the packed prompts, ``owners`` the slot that stores its prompt.
    """

    prompts: list[int]
    slots: list[int]
    copies: list[tuple[int, list[int], int]]
    ends: list[int]
    owners: list[int]


def plan_prefill(
    new_rows: Sequence[int],
    first_slot: int,
    n: int,
    prompts: Mapping[int, list[int]],
    shares_prefix: bool = False,
    copies_prefixes: bool = True,
) -> Prefill:
    """Plan the prefill of rows admitted to the slots from ``first_slot`` on; ``prompts`` are the tokens by number.

    A prompt that is a prefix of another one, or equals it, is copied from it; without ``copies_prefixes`` only if it
    equals it, for a cache with states, which are behind the last token. With ``shares_prefix`` only the first slot of
    each prompt stores it, and the prompt's other rows read it there.
    """
    slots: dict[int, list[int]] = {}
    for slot, row in enumerate(new_rows, first_slot):
        slots.setdefault(row // n, []).append(slot)
    leaders = find_leaders({prompt: prompts[prompt] for prompt in slots}, copies_prefixes)
    order = sorted(set(leaders.values()), key=lambda prompt: (len(prompts[prompt]), prompt))
    starts = dict(zip(order, accumulate((len(prompts[prompt]) for prompt in order), initial=0), strict=False))
    copies = []
    for prompt, own in slots.items():
        first = slots[leaders[prompt]][0]
        if others := [slot for slot in (own[:1] if shares_prefix else own) if slot != first]:
            copies.append((first, others, len(prompts[prompt])))
    ends = [starts[leaders[row // n]] + len(prompts[row // n]) - 1 for row in new_rows]
    owners = [slots[row // n][0] if shares_prefix else slot for slot, row in enumerate(new_rows, first_slot)]
    return Prefill(order, [slots[prompt][0] for prompt in order], copies, ends, owners)


def find_leaders(prompts: Mapping[int, list[int]], of_prefixes: bool = True) -> dict[int, int]:
    """Return for every prompt one that it is a prefix of, by default itself; else one that it equals.

    In lexicographic order a prompt is directly followed by those that it is a prefix of.
    """
    order = sorted(prompts, key=lambda number: prompts[number])
    leaders: dict[int, int] = {}
    for number, follower in zip(reversed(order), [None, *reversed(order)], strict=False):
        tokens = prompts[number]
        is_prefix = follower is not None and prompts[follower][: len(tokens) if of_prefixes else None] == tokens
        leaders[number] = leaders[follower] if is_prefix and follower is not None else number
    return leaders


SlotMove = tuple[int, int, int, int]
"""Source slot, target slot, and the start and stop of the cached tokens to copy."""


class SlotTable:
    """One group of slots, of which the first ``n_live`` have rows.

    A turn samples one token for each of the last ``n_sampling`` live rows: all of them in a decoding step, the newly
    admitted ones if there is a ``prefill``. A group without live rows is finished. With ``shares_prefix`` a prompt is
    stored in the slot of one of its rows; when that row is evicted, another one becomes the owner. ``copies_prefixes``
    is as for ``plan_prefill``. With ``request.n_kept`` the rows of a prompt are cancelled that are as long as the last
    one that is kept. The state is in numpy arrays in host memory: updates are many small operations, on which
    a device would have to synchronise.
    """

    def __init__(
        self,
        request: Request,
        queue: deque[int],
        n_slots: int,
        shares_prefix: bool = False,
        copies_prefixes: bool = True,
    ) -> None:
        self.request, self.queue, self.n_slots, self.shares_prefix = request, queue, n_slots, shares_prefix
        self._copies_prefixes = copies_prefixes
        self.sampled: list[tuple[Tensor, Tensor]] = []  # rows and their tokens, by turn
        self.cancelled: list[int] = []  # rows that were evicted before their end
        self._ended_counts: dict[int, list[int]] = {}  # by prompt, with request.n_kept
        self._cancel_counts = np.full(len(request.prompts), NEVER)
        self._stops = np.array(request.stop_ids, np.int64)
        self._set_table(np.empty((8, 0), np.int64))
        self._schedule()

    def _set_table(self, table: IntTable) -> None:
        """Set the columns by slot: last token, its position, prompt number, sample, token count, row, limit, owner."""
        self._table, self.n_live = table, table.shape[1]
        self.last, self.positions, _, _, self._counts, self.rows, self._limits, self.owners = table
        self._starts = self.positions - self._counts + 1
        self._finished = np.empty(0, np.int64)
        self._prefixes: Tensor | None = None

    @property
    def prefixes(self) -> Tensor | None:
        """The common prefixes of rows, as for ``Transformer.decode``; the same tensor until rows are exchanged."""
        if self._prefixes is None and self.request.share_prefixes:
            self._prefixes = self._on_device(np.stack((self.rows // self.request.n, self._starts, self.owners)))
        return self._prefixes

    def prefix_groups(self, n_slots: int) -> PrefixGroups | None:
        """Return the rows that share a prefix, for ``n_slots`` computed slots; None if there are none."""
        if not self.shares_prefix:
            return None
        return group_prefixes(self.rows // self.request.n, self._starts, self.owners, n_slots)

    def _on_device(self, array: IntTable) -> Tensor:
        """Return an array on the model's device; on the CPU it shares the table's memory."""
        return on_device(torch.from_numpy(array), self.request.stop_tokens.device)

    @property
    def inputs(self) -> Tensor:
        """The inputs of a turn, ``[5, n_live]``: last token, position, prompt number, sample, token count."""
        return self._on_device(self._table[:5])

    @property
    def counters(self) -> Tensor:
        """The arguments of sampling besides the seed, ``[3, n_sampling]``: prompt number, sample, token count."""
        return self._on_device(self._table[2:5, self.n_live - self.n_sampling :])

    @property
    def longest(self) -> int:
        """The length of the longest row, including the token that is computed next."""
        return int(self.positions.max(initial=-1)) + 1

    @property
    def most_steps(self) -> int:
        """The number of steps until every row has ended."""
        return int((self._limits - self._counts).max(initial=0))

    @property
    def room(self) -> IntTable:
        """How many tokens of each row fit behind the next one."""
        return self._limits - self._counts - 1

    def own_prompts(self) -> list[SlotMove]:
        """Make every row the owner of its prompt; return the copies of prompts."""
        borrowers = np.flatnonzero(self.owners != np.arange(self.n_live)).tolist()
        moves = [(int(self.owners[slot]), slot, 0, int(self._starts[slot])) for slot in borrowers]
        self.owners[borrowers], self._prefixes = borrowers, None
        return moves

    def state(self, seed_mask: int) -> IntTable:
        """Return ``[6, n_live]``: the inputs, with prompt numbers masked by the seed, and limits of the counts."""
        table = self._table[[0, 1, 2, 3, 4, 6]]
        table[2] ^= seed_mask
        return table

    def history(self, index: int) -> tuple[int, list[int]]:
        """Return the row of this turn's sample ``index``, and the tokens that it has sampled before."""
        row = int(self.rows[self.n_live - self.n_sampling + index])
        return row, [token for rows, tokens in self.sampled for token in tokens[rows == row].tolist()]

    def record(self, tokens: Tensor) -> list[SlotMove]:
        """Record the turn's tokens ``[n_sampling]``, schedule the next turn, and return the cache moves before it.

        The tokens are on the CPU. Finished rows are evicted and the last live rows move to their slots.
        """
        self.append(tokens)
        return self.end_turn()

    def append(self, tokens: Tensor) -> None:
        """Record a step's tokens, one of every sampling row."""
        slots, new = self.sampling(), tokens.numpy()
        self.sampled.append((torch.from_numpy(self.rows[slots]), tokens))
        self.last[slots] = new
        self.positions[slots] += 1
        self._counts[slots] += 1
        self._finished = slots[self._ends(slots)]

    def append_steps(self, tokens: Tensor, is_new: Tensor) -> None:
        """Record several steps of all rows, ``[k, n_live]``; a row has new tokens in the first ones."""
        new, mask = tokens.numpy(), is_new.numpy()
        counts = mask.sum(0)
        self.sampled.append((torch.from_numpy(np.broadcast_to(self.rows, new.shape)[mask]), tokens[is_new]))
        self.last[:] = new[counts - 1, np.arange(self.n_live)]
        self.positions += counts
        self._counts += counts
        self._finished = np.flatnonzero(self._ends(np.arange(self.n_live)))

    def _ends(self, slots: IntTable) -> npt.NDArray[np.bool_]:
        """Return which rows have ended with their last token."""
        stopped: npt.NDArray[np.bool_] = (self.last[slots, None] == self._stops).any(1)
        ended = stopped | (self._counts[slots] >= self._limits[slots])
        return ended if self.request.n_kept == self.request.n else ended | self._cancel(slots, ended)

    def _cancel(self, slots: IntTable, ended: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which of the rows that have not ended cannot be among those of their prompt that are kept."""
        prompts, n_kept = self.rows[slots] // self.request.n, self.request.n_kept
        for prompt, count in zip(prompts[ended].tolist(), self._counts[slots[ended]].tolist(), strict=True):
            counts = self._ended_counts.setdefault(prompt, [])
            insort(counts, count)
            if len(counts) >= n_kept:
                self._cancel_counts[prompt] = counts[n_kept - 1]
        cancelled: npt.NDArray[np.bool_] = ~ended & (self._counts[slots] >= self._cancel_counts[prompts])
        self.cancelled += self.rows[slots[cancelled]].tolist()
        return cancelled

    def sampling(self, indices: IntTable | None = None) -> IntTable:
        """Return the slots of this turn's samples, or of those with some indices."""
        slots = np.arange(self.n_live - self.n_sampling, self.n_live)
        return slots if indices is None else slots[indices]

    def finished_rows(self) -> list[int]:
        """Return the rows that finish in this turn."""
        found: list[int] = self.rows[self._finished].tolist()
        return found

    def finished_tokens(self) -> tuple[IntTable, IntTable, IntTable]:
        """Return the rows that finish in this turn, how many of their tokens are cached, and where, ``[2, n]``.

        The last token of a row is not cached: it is sampled, but not computed.
        """
        finished = self._finished
        counts = self.positions[finished]
        slots, ends = finished.repeat(counts), counts.cumsum()
        positions = np.arange(len(slots)) - (ends - counts).repeat(counts)
        is_shared = positions < self._starts[slots]
        return self.rows[finished], counts, np.stack((np.where(is_shared, self.owners[slots], slots), positions))

    def end_turn(self) -> list[SlotMove]:
        """Evict finished rows, schedule the next turn, and return the cache moves before it."""
        moves = self._evict(self._finished) if len(self._finished) else []
        self._schedule()
        return moves

    def _evict(self, finished: IntTable) -> list[SlotMove]:
        n_kept, is_evicted = self.n_live - len(finished), np.zeros(self.n_live, np.bool_)
        is_evicted[finished] = True
        owners, moves = self._new_owners(is_evicted)
        sources, holes = np.flatnonzero(~is_evicted[n_kept:]) + n_kept, finished[finished < n_kept]
        old_slots, new_slots = np.arange(n_kept), np.arange(self.n_live)
        old_slots[holes], new_slots[sources] = sources, holes
        for src, dst in zip(sources.tolist(), holes.tolist(), strict=True):
            start = 0 if owners[src] == src else int(self._starts[src])
            moves.append((src, dst, start, int(self.positions[src])))
        table = self._table.take(old_slots, 1)
        table[-1] = new_slots[owners[old_slots]]
        self._set_table(table)
        return moves

    def _new_owners(self, is_evicted: npt.NDArray[np.bool_]) -> tuple[IntTable, list[SlotMove]]:
        """Return the owner of every row's prompt after an eviction, and the moves of prompts to new owners."""
        owners, new_owners = self.owners.copy(), dict[int, int]()
        for slot in np.flatnonzero(is_evicted[owners] & ~is_evicted).tolist():
            owners[slot] = new_owners.setdefault(int(owners[slot]), slot)
        return owners, [(old, new, 0, int(self._starts[new])) for old, new in new_owners.items()]

    def _schedule(self) -> None:
        """Admit rows if an eighth of the slots is free, or enough for all waiting rows; else decode."""
        self.prefill: Prefill | None = None
        self.n_sampling = self.n_live
        n_free, request = self.n_slots - self.n_live, self.request
        if self.queue and (n_free * 8 >= self.n_slots or n_free >= len(self.queue)):
            new_rows = self._pop_rows(n_free)
            prompts = {row // request.n: request.prompt_tokens[row // request.n] for row in new_rows}
            kinds = self.shares_prefix, self._copies_prefixes
            self.prefill = plan_prefill(new_rows, self.n_live, request.n, prompts, *kinds)
            self.n_sampling = len(new_rows)
            self._admit(new_rows, self.prefill.owners)

    def _pop_rows(self, n_slots: int) -> list[int]:
        request, rows, n_tokens = self.request, list[int](), 0
        while self.queue and len(rows) < n_slots:
            prompt = self.queue[0] // request.n
            if not rows or prompt != rows[-1] // request.n:
                n_tokens += request.lengths[prompt]
                if rows and n_tokens > request.max_prefill_tokens:
                    break
            rows.append(self.queue.popleft())
        return rows

    def _admit(self, new_rows: list[int], owners: list[int]) -> None:
        request, prompts = self.request, [row // self.request.n for row in new_rows]
        numbers = [request.prompts.ids[prompt].prompt for prompt in prompts]
        samples, zeros = [row % request.n for row in new_rows], [0] * len(new_rows)
        positions = [request.lengths[prompt] - 1 for prompt in prompts]
        limits = [request.budgets[prompt] for prompt in prompts]
        columns = [zeros, positions, numbers, samples, zeros, new_rows, limits, owners]
        self._set_table(np.concatenate((self._table, np.array(columns, np.int64)), 1))
