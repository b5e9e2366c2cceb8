"""The admission of turns to slots: several at a time, and none is left."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.data.turns import TurnInput
from realhf.models.engine.decode.session_table import SessionTable
from tests.scaling import examples


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 20), st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_turns_are_admitted_together_and_all_end(n_slots: int, n_open: int, limits: list[int]) -> None:
    """The first turn of an episode has ``limits[number]`` tokens, the second one 3; an episode closes after both."""
    table = SessionTable(n_slots, n_open, (0,))
    table.submit([TurnInput((number, 0), [5], limit) for number, limit in enumerate(limits)])
    found: dict[int, list[int]] = {number: [] for number in range(len(limits))}
    for _ in range(50 * len(limits)):
        n_free, n_waiting = n_slots - table.n_live, len(table._resumed) + min(len(table._new), len(table._homes))
        before = table.n_live
        admitted, _ = table.admit()
        if table.n_live == before and n_waiting:  # others are computed meanwhile
            assert before and (n_free == 0 or (n_free * 8 < n_slots and n_free < n_waiting))
        if table.is_idle:
            break
        n = len(admitted) or table.n_live
        table.record(np.full(n, 7), np.zeros((2, n)))
        outputs, _ = table.finish()
        for output in outputs:
            found[output.key[0]].append(len(output.tokens))
        table.submit([TurnInput(one.key, [6], 3) for one in outputs if len(found[one.key[0]]) == 1])
        table.release([one.key for one in outputs if len(found[one.key[0]]) == 2])
    assert found == {number: [limit, 3] for number, limit in enumerate(limits)}
