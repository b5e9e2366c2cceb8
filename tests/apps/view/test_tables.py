"""Text tables of any width."""

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.apps.view.tables import MIN_LAST_COLUMN, Listing
from tests.scaling import examples

ROWS = (
    ("actor_gen", "4.22", "rows, weights and caches, 12.5 GB, activations"),
    ("ref", "0.386", "-"),
)
TABLE = Listing("calls", "lrl", ("call", "seconds", "for"), ROWS)


def test_columns_are_aligned() -> None:
    assert TABLE.text(200).splitlines() == [
        "call       seconds  for",
        "actor_gen     4.22  rows, weights and caches, 12.5 GB, activations",
        "ref          0.386  -",
    ]


def test_the_last_column_wraps_after_commas() -> None:
    assert TABLE.text(46).splitlines()[1:] == [
        "actor_gen     4.22  rows, weights and caches,",
        "                    12.5 GB, activations",
        "ref          0.386  -",
    ]
    assert TABLE.text(30) == TABLE.text(10) != TABLE.text(46)  # the last column has a minimum width


def test_a_table_without_a_header_and_with_numbers_in_the_last_column() -> None:
    table = Listing("step", "lr", (), (("predicted", "6.5 s"), ("busy", "98%")))
    assert table.text(80).splitlines() == ["predicted  6.5 s", "busy         98%"]


CELL = st.text(st.sampled_from('ab1,; -<&"'), max_size=30).map(str.strip)


@settings(max_examples=examples(80))
@given(st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=5), st.integers(1, 120))
def test_words_are_not_lost_or_broken_and_lines_fit_the_width(rows: list[tuple[str, str, str]], width: int) -> None:
    table = Listing("t", "lrl", (), tuple(rows))
    lines = table.text(width).splitlines()
    assert "".join(lines).replace(" ", "") == "".join(cell for row in rows for cell in row).replace(" ", "")
    longest = max((len(part) for row in rows for part in row[2].replace(";", ",").split(", ")), default=0) + 1
    start = sum(max(len(row[i]) for row in rows) + 2 for i in (0, 1))
    assert all(len(line) <= max(width, start + max(MIN_LAST_COLUMN, longest)) for line in lines)
