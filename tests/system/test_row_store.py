"""Rows by id and key, until their prompts are dropped."""

import pytest
import torch

from realhf.api.batch_meta import PROMPT, RowId
from realhf.data.batch import Column, SequenceBatch
from realhf.system.row_store import RowStore

IDS = (RowId(0, 0), RowId(0, 1), RowId(3, 0))


def filled() -> tuple[RowStore, SequenceBatch]:
    store = RowStore()
    batch = SequenceBatch(IDS, {"tokens": Column(torch.arange(6), (1, 2, 3))}).with_scalars("rewards", torch.ones(3))
    store.put(batch)
    return store, batch


def test_rows_are_views_and_gather_in_any_order() -> None:
    store, batch = filled()
    assert store.get(RowId(0, 1), "tokens").data_ptr() == batch["tokens"][1:].data_ptr()
    column = store.gather([RowId(3, 0), RowId(0, 0)], "tokens")
    assert column.data.tolist() == [3, 4, 5, 0] and column.lengths == (3, 1)


def test_missing_rows_and_keys() -> None:
    store, _ = filled()
    assert store.find(RowId(3, 1), "tokens") is None and store.find(RowId(9, 0), "tokens") is None
    assert store.find(RowId(0, 0), "values") is None
    with pytest.raises(KeyError):
        store.get(RowId(0, PROMPT), "tokens")


def test_a_value_is_replaced() -> None:
    store, _ = filled()
    store.put_value(RowId(0, 0), "rewards", torch.tensor([7.0]))
    assert store.get(RowId(0, 0), "rewards").tolist() == [7.0]
    assert store.get(RowId(0, 1), "rewards").tolist() == [1.0]


def test_all_rows_of_prompts_are_dropped() -> None:
    store, _ = filled()
    store.put_value(RowId(1, PROMPT), "prompts", torch.arange(2))
    assert len(store) == 3
    store.drop(0, 2)
    assert (
        len(store) == 1 and store.find(RowId(0, 1), "tokens") is None and store.find(RowId(3, 0), "tokens") is not None
    )
    store.drop(0, 100)
    assert len(store) == 0
