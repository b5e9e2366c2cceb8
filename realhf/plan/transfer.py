"""Which row must move from which worker to which, before a call computes."""

from dataclasses import dataclass

from realhf.api.batch import PROMPT, RowId
from realhf.api.layout import Layout
from realhf.api.messages import Call


@dataclass(frozen=True)
class RowCopy:
    """One row of one column on its way from worker ``src`` to worker ``dst``."""

    key: str
    row: RowId
    src: int
    dst: int
    dtype: str
    length: int


def stored_as(row: RowId, key: str, shared: tuple[str, ...]) -> RowId:
    """Return the id under which a row's value is held: the prompt's own for what all its samples share."""
    return RowId(row.prompt, PROMPT) if key in shared else row


def plan_transfer(call: Call, keys: tuple[str, ...], layout: Layout) -> tuple[RowCopy, ...]:
    """Return the copies that bring every data-parallel replica its rows; what is there already is not copied.

    A value shared by several rows is sent to a worker once.
    """
    copies: dict[tuple[str, RowId, int], RowCopy] = {}
    for d, rows in enumerate(call.assignment):
        replica = layout.replica(d)
        for key in keys:
            column, holders = call.inputs.columns[key], call.holders.of(key)
            for i in rows:
                row = stored_as(call.inputs.ids[i], key, call.shared)
                for dst in replica:
                    if dst not in holders[i]:
                        copy = RowCopy(key, row, holders[i][0], dst, column.dtype, column.lengths[i])
                        copies.setdefault((key, row, dst), copy)
    return tuple(copies.values())
