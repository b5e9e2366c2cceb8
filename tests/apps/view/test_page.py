"""Pages of plans: well-formed, escaped, complete."""

import xml.etree.ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.apps.view.tables import Listing, render_page
from tests.scaling import examples

CELL = st.text(st.sampled_from('ab1,; -<&"'), max_size=30).map(str.strip)
SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'


def test_images_and_escaped_cells() -> None:
    root = ET.fromstring(render_page("a < b", [SVG, SVG], [Listing("t", "l", (), (("x & y",),))]))
    assert [head.text for head in (*root.iter("h1"), *root.iter("h2"))] == ["a < b", "t"]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) == 2 and next(root.iter("td")).text == "x & y"


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=4))
def test_tables_have_all_cells(rows: list[tuple[str, str]]) -> None:
    root = ET.fromstring(render_page("t", [], [Listing("a < b", "lr", ("x", "y"), tuple(rows))]))
    cells = [[cell.text or "" for cell in line] for line in root.iter("tr")]
    assert cells == [["x", "y"], *(list(row) for row in rows)]
    assert [head.text for head in root.iter("h2")] == ["a < b"]
