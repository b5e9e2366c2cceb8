"""Row transfers before a call."""

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.messages import Holders, PrepareCall
from realhf.plan.compile.transfer import RowCopy, plan_transfer, row_bytes, sorted_rows, stored_row_id

IDS = (RowId(0, 0), RowId(0, 1), RowId(3, 0))
META = BatchMeta(IDS, {"tokens": ColumnMeta("int64", (5, 6, 7)), "row": ColumnMeta("uint8", (9, 9, 8))})


Ranks = tuple[int | tuple[int, ...], ...]


def call(tokens: Ranks, row: Ranks, assignment: tuple[tuple[int, ...], ...]) -> PrepareCall:
    groups = tuple(ranks if isinstance(ranks, tuple) else (ranks,) for ranks in (*tokens, *row))
    holders = Holders(groups, {"tokens": tuple(range(len(tokens))), "row": tuple(range(len(tokens), len(groups)))})
    return PrepareCall(1, "any", 0, 0, META, holders, ("row",), assignment, (0, 0, 0), {})


def layout(dp: int = 1, tp: int = 1, pp: int = 1) -> Layout:
    return Layout(DeviceMesh(tuple(range(dp * tp * pp))), ParallelStrategy(dp, tp, pp))


def test_rows_are_sent_to_their_replica() -> None:
    copies = plan_transfer(call((1, 0, 4), (1, 1, 1), ((0, 1), (2,))), ("tokens",), layout(dp=2))
    assert copies == (
        RowCopy("tokens", IDS[0], 1, 0, "int64", 5),
        RowCopy("tokens", IDS[2], 4, 1, "int64", 7),
    )


def test_present_rows_are_not_copied() -> None:
    assert plan_transfer(call((0, 0, 1), (0, 0, 1), ((0, 1), (2,))), ("tokens", "row"), layout(dp=2)) == ()


def test_shared_values_are_sent_once_per_worker() -> None:
    copies = plan_transfer(call((0, 0, 0), (5, 5, 5), ((0, 1, 2),)), ("row",), layout())
    assert copies == (
        RowCopy("row", RowId(0, PROMPT), 5, 0, "uint8", 9),
        RowCopy("row", RowId(3, PROMPT), 5, 0, "uint8", 8),
    )
    assert (
        stored_row_id(IDS[1], "row", ("row",)) == RowId(0, PROMPT)
        and stored_row_id(IDS[1], "tokens", ("row",)) == IDS[1]
    )


def test_all_workers_of_a_replica_receive_its_rows() -> None:
    copies = plan_transfer(call((9, 9, 9), (9, 9, 9), ((0, 1), (2,))), ("tokens",), layout(dp=2, tp=2, pp=2))
    assert {(c.row, c.dst) for c in copies} == {
        *((row, dst) for row in IDS[:2] for dst in (0, 1, 4, 5)),
        *((IDS[2], dst) for dst in (2, 3, 6, 7)),
    }
    assert {c.src for c in copies} == {9}


def test_a_worker_does_not_send_rows_it_has_not_received() -> None:
    # the master recorded the replica, workers 0 and 1, as holders after the first row of the prompt
    copies = plan_transfer(call((0, 0, 0), (5, (0, 1), (0, 1)), ((0, 1), ())), ("row",), layout(dp=2, tp=2))
    assert [(c.src, c.dst) for c in copies] == [(5, 0), (5, 1)]


def test_a_rank_without_rows_receives_none() -> None:
    copies = plan_transfer(call((0, 0, 0), (0, 0, 0), ((), (), (0, 1, 2))), ("tokens",), layout(dp=3))
    assert {c.dst for c in copies} == {2}


def test_missing_rows_are_sent_within_a_replica() -> None:
    copies = plan_transfer(call((1, (0, 1), (1, 0)), (0, 0, 0), ((0, 1, 2),)), ("tokens",), layout(tp=2))
    assert copies == (RowCopy("tokens", IDS[0], 1, 0, "int64", 5),)


def test_rows_are_sorted() -> None:
    ids = tuple(RowId(p, s) for p, s in ((5, 1), (2, 0), (5, 0), (2, 1)))
    rows = sorted_rows(BatchMeta(ids, {"tokens": ColumnMeta("int64", (4, 1, 3, 2))}))
    assert rows.ids == tuple(sorted(ids)) and rows.columns["tokens"].lengths == (1, 2, 3, 4)
    assert sorted_rows(rows) is rows


def test_row_bytes_is_the_largest_value() -> None:
    columns = [ColumnMeta("int64", (3, 1, 0)), ColumnMeta("float32", (1, 5, 0))]
    assert row_bytes(columns) == [24, 20, 0]
