"""Which workers hold the rows of every prompt, and who sends a call's rows to those that compute it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from realhf.api.batch import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.layout import Layout
from realhf.api.messages import Holders


@dataclass(frozen=True, eq=False)
class Keepers:
    """Workers that hold the same rows, their producer first. One object for all these rows, told apart by identity."""

    ranks: tuple[int, ...]

    def passed_on(self, replica: tuple[int, ...]) -> "tuple[tuple[int, ...], Keepers]":
        """Return who of ``replica`` has the rows already, the sender first (the producer alone, where none has).

        Also return who has them when all of ``replica`` does.
        """
        before = set(self.ranks)
        if before.isdisjoint(replica):
            return self.ranks[:1], Keepers(self.ranks + replica)
        have = tuple(rank for rank in replica if rank in before)
        lack = tuple(rank for rank in replica if rank not in before)
        return have, Keepers(self.ranks + lack) if lack else self


@dataclass
class PromptRows:
    """The rows of one prompt that have the values of one key, in order. One worker made them; they move together."""

    ids: tuple[RowId, ...]
    lengths: tuple[int, ...]
    holders: Keepers

    def lengths_of(self, ids: tuple[RowId, ...], is_shared: bool) -> tuple[int, ...]:
        """Return the length of every one of ``ids``; what is shared has one for all of them."""
        if is_shared:
            return self.lengths * len(ids)
        if ids == self.ids:
            return self.lengths
        length = dict(zip(self.ids, self.lengths, strict=True))
        return tuple(length[row] for row in ids)


NOBODY = Keepers(())


@dataclass
class Table:
    """Where the values of one key are, for every prompt that is through with it (which may have left no rows)."""

    dtype: str = ""
    prompts: dict[int, PromptRows] = field(default_factory=dict)


def in_order(meta: BatchMeta) -> BatchMeta:
    """Return the same rows by prompt and sample, as most come anyway."""
    order = sorted(range(len(meta.ids)), key=meta.ids.__getitem__)
    if order == list(range(len(order))):
        return meta
    columns = {k: ColumnMeta(c.dtype, tuple([c.lengths[i] for i in order])) for k, c in meta.columns.items()}
    return BatchMeta(tuple([meta.ids[i] for i in order]), columns)


def common_rows(prompt: int, inputs: Sequence[PromptRows], own: Sequence[PromptRows]) -> tuple[RowId, ...]:
    """Return the rows of a prompt that have every input; a producer may have dropped some (best of n).

    ``own`` are the inputs that every row has for itself.
    """
    if not all(rows.ids for rows in inputs):
        return ()
    if not own:
        return (RowId(prompt, PROMPT),)
    first = own[0].ids
    if all(rows.ids == first for rows in own):
        return first
    return tuple(sorted(set(first).intersection(*(rows.ids for rows in own))))


def pass_on(
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
        replica, prompts = layout.replica(d), dict.fromkeys([prompt_of[i] for i in part])
        known: dict[Keepers, tuple[int, Keepers]] = {}
        for key, rows in inputs.items():
            chosen = numbers[key]
            for k in prompts:
                before = rows[k].holders
                if before not in known:
                    have, after = before.passed_on(replica)
                    known[before] = len(groups), after
                    groups.append(have)
                chosen[k], rows[k].holders = known[before]
    return Holders(tuple(groups), {key: tuple([chosen[k] for k in prompt_of]) for key, chosen in numbers.items()})
