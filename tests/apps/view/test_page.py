"""HTML pages: well-formed, escaped, complete."""

import xml.etree.ElementTree as ET
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.apps.view.tables import Listing, render_page
from tests.scaling import examples

CELL = st.text(st.sampled_from('ab1,; -<&"'), max_size=30).map(str.strip)
SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'


def test_optional_parts(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("a: <b>")
    rows = [{"prompt": "1 < ", "response": "2 & 3", "rewards": 0.5, "answer_tokens": 3}]
    page = render_page("a < b", [SVG], [Listing("t", "l", (), (("x & y",),))], curves=[SVG, SVG], note="n > m",
                       samples=rows, samples_step=7, config=config)  # fmt: skip
    root = ET.fromstring(page)
    assert [head.text for head in (*root.iter("h1"), *root.iter("h2"))] == ["a < b", "responses after step 7", "t"]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) == 3 and next(root.iter("td")).text == "x & y"
    sample, options = ("".join(pre.itertext()) for pre in root.iter("pre"))
    assert sample.split() == ["1", "<", "2", "&", "3", "rewards", "0.5", "answer_tokens", "3"] and options == "a: <b>"
    assert [p.text for p in root.iter("p")] == ["n > m"]


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=4))
def test_tables_have_all_cells(rows: list[tuple[str, str]]) -> None:
    root = ET.fromstring(render_page("t", [], [Listing("a < b", "lr", ("x", "y"), tuple(rows))]))
    cells = [[cell.text or "" for cell in line] for line in root.iter("tr")]
    assert cells == [["x", "y"], *(list(row) for row in rows)]
    assert [head.text for head in root.iter("h2")] == ["a < b"] and not list(root.iter("pre"))
