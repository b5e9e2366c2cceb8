"""Which row must move from which worker to which, before a call computes."""

from collections.abc import Iterator
from dataclasses import dataclass

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.layout import Layout
from realhf.api.messages import PrepareCall


@dataclass(frozen=True)
class RowCopy:
    """One row of one column on its way from worker ``src`` to worker ``dst``."""

    key: str
    row: RowId
    src: int
    dst: int
    dtype: str
    length: int


def stored_row_id(row: RowId, key: str, shared: tuple[str, ...]) -> RowId:
    """Return the id under which a row's value is held: the prompt's own for what all its samples share."""
    return RowId(row.prompt, PROMPT) if key in shared else row


def row_transfers(
    call: PrepareCall, keys: tuple[str, ...], layout: Layout
) -> Iterator[tuple[str, RowId, int, tuple[int, ...], str, int]]:
    """Yield (key, row, sender, receivers, type, length) of what brings every data-parallel replica its rows.

    What is there already is not copied, and a value shared by several rows is sent to a worker once.
    """
    for d, rows in enumerate(call.assignment):
        replica = layout.replica(d)
        lacking: dict[tuple[int, ...], tuple[int, ...]] = {}  # by those who hold a row: few are alike
        for key in keys:
            column, holders = call.inputs.columns[key], call.holders.of(key)
            sent: set[RowId] = set()
            for i in rows:
                row = stored_row_id(call.inputs.ids[i], key, call.shared)
                if row in sent:
                    continue
                sent.add(row)
                here = holders[i]
                if here not in lacking:
                    lacking[here] = tuple(rank for rank in replica if rank not in here)
                if lacking[here]:
                    yield key, row, here[0], lacking[here], column.dtype, column.lengths[i]


def plan_transfer(call: PrepareCall, keys: tuple[str, ...], layout: Layout) -> tuple[RowCopy, ...]:
    """Return the copies of ``moved_rows``, one for each receiver."""
    return tuple(
        RowCopy(key, row, src, dst, dtype, length)
        for key, row, src, dsts, dtype, length in row_transfers(call, keys, layout)
        for dst in dsts
    )
