"""Where rows are, and how they get to a call: the index of row locations, and the transfers before a call."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, eq

import numpy as np

from realhf.api.batch_meta import PROMPT, SCALAR_BYTES, BatchMeta, ColumnMeta, RowId
from realhf.api.layout import Layout
from realhf.api.messages import Holders, PrepareCall


@dataclass(eq=False, slots=True)  # not frozen, which is three times as slow: thousands are created per call
class RowHolders:
    """Workers that hold the same rows, the producer first; immutable by convention, compared by identity."""

    ranks: tuple[int, ...]

    def with_replica(
        self, replica: tuple[int, ...], members: frozenset[int], mesh: Collection[int], busy: Collection[int]
    ) -> "tuple[tuple[int, ...], RowHolders]":
        """Return who of ``replica`` holds the rows, sender first (if none: a sender), and the new holders."""
        if members.isdisjoint(self.ranks):  # the common case, without building a set of all holders
            return (self._sender(mesh, busy),), RowHolders(self.ranks + replica)
        held = set(self.ranks)
        present = tuple(rank for rank in replica if rank in held)
        missing = tuple(rank for rank in replica if rank not in held)
        return present, RowHolders(self.ranks + missing) if missing else self

    def _sender(self, mesh: Collection[int], busy: Collection[int]) -> int:
        """Return the producer, or if it is busy another holder, if possible in the mesh of the call."""
        if self.ranks[0] not in busy:
            return self.ranks[0]
        free = [rank for rank in self.ranks if rank not in busy]
        return next((rank for rank in free if rank in mesh), free[0] if free else self.ranks[0])


@dataclass(slots=True)
class PromptRows:
    """The rows of one prompt that have a value for one key, in order. They were produced, and move, together."""

    ids: tuple[RowId, ...]
    lengths: tuple[int, ...]
    holders: RowHolders


Rows = Sequence[PromptRows]  # the rows of one key for every prompt
RowIds = tuple[RowId, ...]
NO_ROWS = PromptRows((), (), RowHolders(()))  # the shared value for prompts without rows


@dataclass
class ColumnIndex:
    """Locations of the values of one key, for every prompt that has been processed (and may have no rows left)."""

    dtype: str = ""
    prompts: dict[int, PromptRows] = field(default_factory=dict)


def sorted_rows(meta: BatchMeta) -> BatchMeta:
    if tuple(sorted(meta.ids)) == meta.ids:
        return meta
    order = sorted(range(len(meta.ids)), key=meta.ids.__getitem__)
    columns = {k: ColumnMeta(c.dtype, tuple([c.lengths[i] for i in order])) for k, c in meta.columns.items()}
    return BatchMeta(tuple([meta.ids[i] for i in order]), columns)


def rows_with_all_inputs(prompts: Sequence[int], inputs: Sequence[Rows], own: Sequence[Rows]) -> list[RowIds]:
    """Return, for every prompt, the rows that have all inputs; a producer may have dropped some (best of n).

    ``inputs[k][p]`` are the rows of input ``k`` and prompt ``p``; ``own`` are the inputs with one value per sample.
    """
    if not own:
        kept: list[RowIds] = [(RowId(prompt, PROMPT),) for prompt in prompts]
    else:
        first, *others = ([rows.ids for rows in of_prompts] for of_prompts in own)
        kept = first if all(ids == first for ids in others) else [*map(_common, first, *others)]
    if all(map(attrgetter("ids"), chain.from_iterable(inputs))):
        return kept
    return [ids if all(rows.ids for rows in at) else () for ids, *at in zip(kept, *inputs, strict=True)]


def _common(first: RowIds, *others: RowIds) -> RowIds:
    return first if all(ids == first for ids in others) else tuple(sorted(set(first).intersection(*others)))


def row_lengths(rows: Rows, kept: Sequence[RowIds], is_shared: bool) -> tuple[int, ...]:
    """Return the lengths of one key for all kept rows; the rows of a prompt share one value if ``is_shared``."""
    if is_shared:
        return tuple([n for of, ids in zip(rows, kept, strict=True) for n in of.lengths * len(ids)])
    if all(map(eq, map(attrgetter("ids"), rows), kept)):
        return tuple(chain.from_iterable(map(attrgetter("lengths"), rows)))
    length = {row: n for of in rows for row, n in zip(of.ids, of.lengths, strict=True)}
    return tuple([length[row] for ids in kept for row in ids])


def row_bytes(columns: Iterable[ColumnMeta]) -> list[int]:
    """Return the bytes of the largest value of every row, its weight when rows are partitioned."""
    sizes = [np.array(column.lengths, np.int64) * SCALAR_BYTES[column.dtype] for column in columns]
    return np.maximum.reduce(sizes).tolist()


def record_transfer(
    inputs: Mapping[str, Rows], kept: Sequence[RowIds], assignment: tuple[tuple[int, ...], ...], layout: Layout,
    busy: Collection[int] = (),
) -> Holders:  # fmt: skip
    """Return, per key and row, the destinations that already hold it (sender first), or else its sender.

    ``kept[k]`` are the rows of the ``k``-th prompt in the call. All destinations are recorded as holders: later calls
    find the rows there, since worker queues are first in, first out. The sender is the producer, if possible not one of
    the ``busy`` workers, which may have begun a long call.
    """
    prompt_of = [k for k, ids in enumerate(kept) for _ in ids]
    groups: list[tuple[int, ...]] = []
    numbers = {key: [0] * len(kept) for key in inputs}
    for d, part in enumerate(assignment):
        replica, prompts = layout.replica(d), [*dict.fromkeys(map(prompt_of.__getitem__, part))]
        members = frozenset(replica)
        known: dict[RowHolders, tuple[int, RowHolders]] = {}
        for key, rows in inputs.items():
            key_numbers = numbers[key]
            for k in prompts:
                row = rows[k]
                if (entry := known.get(row.holders)) is None:
                    present, after = row.holders.with_replica(replica, members, layout.mesh.ranks, busy)
                    entry = known[row.holders] = len(groups), after
                    groups.append(present)
                key_numbers[k], row.holders = entry
    rows_of = {key: tuple(map(key_numbers.__getitem__, prompt_of)) for key, key_numbers in numbers.items()}
    return Holders(tuple(groups), rows_of)


@dataclass(frozen=True)
class RowCopy:
    """A copy of one row of one column from worker ``src`` to worker ``dst``."""

    key: str
    row: RowId
    src: int
    dst: int
    dtype: str
    length: int


def stored_row_id(row: RowId, key: str, shared: tuple[str, ...]) -> RowId:
    """Return the id under which a row's value is stored; samples share the prompt's row for ``shared`` keys."""
    return RowId(row.prompt, PROMPT) if key in shared else row


def row_transfers(
    call: PrepareCall, keys: Sequence[str], layout: Layout
) -> Iterator[tuple[str, RowId, int, tuple[int, ...], str, int]]:
    """Yield (key, row, sender, receivers, dtype, length) of the transfers that give each replica its rows.

    Values that a worker already has are skipped; a value shared by several rows is sent to a worker once.
    """
    columns = call.transferred
    holders_of = {key: call.holders.of(key) for key in keys}
    for d, rows in enumerate(call.assignment):
        replica = layout.replica(d)
        missing: dict[tuple[int, ...], tuple[int, ...]] = {}  # by holders, most rows share the same
        for key in keys:
            column, holders = columns[key], holders_of[key]
            sent: set[RowId] = set()
            for i in rows:
                row = stored_row_id(call.inputs.ids[i], key, call.shared)
                if row in sent:
                    continue
                sent.add(row)
                held_by = holders[i]
                if held_by not in missing:
                    missing[held_by] = tuple(rank for rank in replica if rank not in held_by)
                if missing[held_by]:
                    yield key, row, held_by[0], missing[held_by], column.dtype, column.lengths[i]


def plan_transfer(call: PrepareCall, keys: Sequence[str], layout: Layout) -> tuple[RowCopy, ...]:
    """Return the copies of ``row_transfers``, one per receiver."""
    return tuple(
        RowCopy(key, row, src, dst, dtype, length)
        for key, row, src, dsts, dtype, length in row_transfers(call, keys, layout)
        for dst in dsts
    )
