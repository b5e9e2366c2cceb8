"""Which workers hold the rows of every prompt, and who sends a call's rows to those that compute it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, eq

import numpy as np

from realhf.api.batch_meta import PROMPT, SCALAR_BYTES, BatchMeta, ColumnMeta, RowId
from realhf.api.layout import Layout
from realhf.api.messages import Holders


@dataclass(eq=False, slots=True)
class RowHolders:
    """Workers that hold the same rows, their producer first. One object for all these rows, told apart by identity.

    Thousands are made at every call: it is never changed, but not frozen, which would take three times as long.
    """

    ranks: tuple[int, ...]

    def with_replica(
        self, replica: tuple[int, ...], replica_set: frozenset[int]
    ) -> "tuple[tuple[int, ...], RowHolders]":
        """Return who of ``replica`` has the rows already, the sender first (the producer alone, where none has).

        Also return who has them when all of ``replica`` does. ``meant`` are the same workers as a set.
        """
        if replica_set.isdisjoint(self.ranks):  # nearly always; without a set of the many that are not meant
            return self.ranks[:1], RowHolders(self.ranks + replica)
        before = set(self.ranks)
        have = tuple(rank for rank in replica if rank in before)
        lack = tuple(rank for rank in replica if rank not in before)
        return have, RowHolders(self.ranks + lack) if lack else self


@dataclass(slots=True)
class PromptRows:
    """The rows of one prompt that have the values of one key, in order. One worker made them; they move together."""

    ids: tuple[RowId, ...]
    lengths: tuple[int, ...]
    holders: RowHolders


NO_ROWS = PromptRows((), (), RowHolders(()))
"""A prompt of which nothing was left: nobody holds it, so this one stands for all of them."""


@dataclass
class ColumnIndex:
    """Where the values of one key are, for every prompt that is through with it (which may have left no rows)."""

    dtype: str = ""
    prompts: dict[int, PromptRows] = field(default_factory=dict)


def sorted_rows(meta: BatchMeta) -> BatchMeta:
    """Return the same rows by prompt and sample, as most come anyway."""
    if tuple(sorted(meta.ids)) == meta.ids:
        return meta
    order = sorted(range(len(meta.ids)), key=meta.ids.__getitem__)
    columns = {k: ColumnMeta(c.dtype, tuple([c.lengths[i] for i in order])) for k, c in meta.columns.items()}
    return BatchMeta(tuple([meta.ids[i] for i in order]), columns)


def rows_with_all_inputs(
    prompts: Sequence[int], inputs: Sequence[Sequence[PromptRows]], own: Sequence[Sequence[PromptRows]]
) -> list[tuple[RowId, ...]]:
    """Return the rows of every prompt that have every input; a producer may have dropped some (best of n).

    An input has one element for each of ``prompts``. ``own`` are those that every row has for itself.
    """
    if not own:
        kept: list[tuple[RowId, ...]] = [(RowId(prompt, PROMPT),) for prompt in prompts]
    else:
        first, *others = ([rows.ids for rows in of_prompts] for of_prompts in own)
        kept = first if all(ids == first for ids in others) else [*map(_common, first, *others)]
    if all(map(attrgetter("ids"), chain.from_iterable(inputs))):
        return kept
    return [ids if all(rows.ids for rows in at) else () for ids, *at in zip(kept, *inputs, strict=True)]


def _common(first: tuple[RowId, ...], *others: tuple[RowId, ...]) -> tuple[RowId, ...]:
    return first if all(ids == first for ids in others) else tuple(sorted(set(first).intersection(*others)))


def row_lengths(rows: Sequence[PromptRows], kept: Sequence[tuple[RowId, ...]], is_shared: bool) -> tuple[int, ...]:
    """Return the length of every row that was kept, of a key; what is shared has one for all rows of its prompt."""
    if is_shared:
        return tuple([n for of, ids in zip(rows, kept, strict=True) for n in of.lengths * len(ids)])
    if all(map(eq, map(attrgetter("ids"), rows), kept)):
        return tuple(chain.from_iterable(map(attrgetter("lengths"), rows)))
    length = {row: n for of in rows for row, n in zip(of.ids, of.lengths, strict=True)}
    return tuple([length[row] for ids in kept for row in ids])


def row_bytes(columns: Iterable[ColumnMeta]) -> list[int]:
    """Return the bytes of the largest value of every row, what a row weighs when rows are dealt out."""
    sizes = [np.array(column.lengths, np.int64) * SCALAR_BYTES[column.dtype] for column in columns]
    return np.maximum.reduce(sizes).tolist()


def record_transfer(
    inputs: Mapping[str, Sequence[PromptRows]],
    kept: Sequence[tuple[RowId, ...]],
    assignment: tuple[tuple[int, ...], ...],
    layout: Layout,
) -> Holders:
    """Return, for every key, who of its destinations has each row already, the sender first; else its producer.

    ``kept[k]`` are the call's rows of the ``k``-th prompt. All destinations are put on record: a later call finds the
    row there, since inboxes are first in, first out.
    """
    prompt_of = [k for k, ids in enumerate(kept) for _ in ids]
    groups: list[tuple[int, ...]] = []
    numbers = {key: [0] * len(kept) for key in inputs}
    for d, part in enumerate(assignment):
        replica, prompts = layout.replica(d), [*dict.fromkeys(map(prompt_of.__getitem__, part))]
        meant = frozenset(replica)
        known: dict[RowHolders, tuple[int, RowHolders]] = {}
        for key, rows in inputs.items():
            chosen = numbers[key]
            for k in prompts:
                row = rows[k]
                if (found := known.get(row.holders)) is None:
                    have, after = row.holders.with_replica(replica, meant)
                    found = known[row.holders] = len(groups), after
                    groups.append(have)
                chosen[k], row.holders = found
    return Holders(tuple(groups), {
        key: tuple(map(chosen.__getitem__, prompt_of)) for key, chosen in numbers.items()
    })  # fmt: skip
