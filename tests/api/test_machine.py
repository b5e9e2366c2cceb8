"""Expected lengths of the rows of a run."""

from hypothesis import given
from hypothesis import strategies as st

from realhf.api.batch_meta import RowId
from realhf.api.machine import Workload


@given(st.lists(st.integers(1, 99), min_size=1, max_size=9), st.integers(1, 12), st.integers(0, 50))
def test_responses_repeat_cyclically(lengths: list[int], samples: int, position: int) -> None:
    workload = Workload(((3,), (4,)), tuple(lengths), samples)
    expected = [lengths[(position * samples + i) % len(lengths)] for i in range(samples)]
    assert list(workload.responses_at(position)) == expected
    prompt = (3, 4)[position % 2]
    rows = tuple((RowId(position, i), prompt + n) for i, n in enumerate(expected))
    assert workload.sampled_rows(position) == rows


def test_the_description_names_the_assumption() -> None:
    assert Workload(((3,), (5,)), (7,), 1, "fixed(7)").description == "4 tokens per prompt on average; fixed(7)"
    assert Workload(((3, 4), (5,))).description == "6 tokens per row on average"
