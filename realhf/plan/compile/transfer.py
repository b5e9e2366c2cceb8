"""The row transfers that a call needs before it computes."""

from collections.abc import Iterator
from dataclasses import dataclass

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.layout import Layout
from realhf.api.messages import PrepareCall


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
    call: PrepareCall, keys: tuple[str, ...], layout: Layout
) -> Iterator[tuple[str, RowId, int, tuple[int, ...], str, int]]:
    """Yield (key, row, sender, receivers, dtype, length) of the transfers that give each replica its rows.

    Values that a worker already has are skipped; a value shared by several rows is sent to a worker once.
    """
    for d, rows in enumerate(call.assignment):
        replica = layout.replica(d)
        missing: dict[tuple[int, ...], tuple[int, ...]] = {}  # by holders, most rows share the same
        for key in keys:
            column, holders = call.inputs.columns[key], call.holders.of(key)
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


def plan_transfer(call: PrepareCall, keys: tuple[str, ...], layout: Layout) -> tuple[RowCopy, ...]:
    """Return the copies of ``row_transfers``, one per receiver."""
    return tuple(
        RowCopy(key, row, src, dst, dtype, length)
        for key, row, src, dsts, dtype, length in row_transfers(call, keys, layout)
        for dst in dsts
    )
