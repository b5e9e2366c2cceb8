"""The rendered page: its policy, and data that cannot end its script element."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.apps.view.report.page import SCRIPTS, STYLE, assets, policy, render, script_json
from realhf.apps.view.report.page_data import curve_data, page_content
from realhf.apps.view.report.run_reader import RunReader
from realhf.apps.view.report.series import Series

FOLDER = Path(__file__).parents[4] / "realhf" / "apps" / "view" / "report"
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>&amp;&lt;\"'`",
    "\u2028\u2029\x00\x1b[31m",
    "\ud800 lone",
    "\u202e\u05d0\u05d1 right to left",
    "<img src=x onerror=alert(1)>",
]


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the texts of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)


@pytest.fixture
def hostile_page(tmp_path: Path) -> str:
    root = tmp_path / "run"
    (root / "generations").mkdir(parents=True)
    rows = [{"prompt": text, "response": text * 3, "rewards": i} for i, text in enumerate(HOSTILE)]
    (root / "generations" / "step_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = {"step": 1, **{f"loss{text}": 1.0 for text in HOSTILE}, "loss": 2.0, "x/grad_norm": float("nan")}
    (root / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (root / "first_failure.txt").write_text(HOSTILE[0])
    (root / "config.yaml").write_text(HOSTILE[0] + "\x00")
    reader = RunReader(root, HOSTILE[0], 100_000)
    reader.update()
    return render(page_content([reader], HOSTILE[0]))


def test_hostile_texts_stay_texts(hostile_page: str) -> None:
    page = Elements(hostile_page)
    tags = [tag for tag, _ in page.found]
    assert tags.count("script") == 2 and "img" not in tags
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    data = json.loads(page.scripts[0])
    assert [row["p"] for row in data["responses"][0][0]["rows"]] == HOSTILE and data["runs"] == [HOSTILE[0]]
    hostile_page.encode("utf-8")
    assert "\x00" not in hostile_page


def test_the_page_needs_no_network(hostile_page: str) -> None:
    page = Elements(hostile_page)
    assert not [(tag, attributes) for tag, attributes in page.found if tag in ("link", "iframe", "object", "base")
                or attributes.keys() & {"src", "srcset", "action", "style", "data", "xlink:href"}]  # fmt: skip
    assert all((attributes["href"] or "").startswith("#") for _, attributes in page.found if "href" in attributes)
    rules = next(a["content"] or "" for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in rules and "connect-src 'none'" in rules and "unsafe" not in rules
    assert f"'sha256-{b64encode(sha256(page.scripts[1].encode()).digest()).decode()}'" in rules


def test_only_a_served_page_may_ask_its_server() -> None:
    assert "connect-src 'self'" in policy("", "", follow=True) and "connect-src 'none'" in policy("", "", follow=False)


@given(st.dictionaries(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=()))))
def test_data_of_scripts(data: dict[str, str]) -> None:
    text = script_json(data)
    assert text.isascii() and not set("<>&\x00") & set(text) and json.loads(text) == data


def test_curves_share_their_steps() -> None:
    import numpy as np

    curves = {}
    for key, n in (("a", 3), ("b", 3), ("c", 2), ("long", 5000)):
        series = Series()
        series.extend(np.arange(n, dtype=np.float64), np.arange(n) / 3)
        curves[0, key] = series.curve()
    data = curve_data(curves)
    assert [line["x"] for line in data["curves"]] == [0, 0, 1, 2] and data["steps"][0] == [0, 1, 2]
    assert data["curves"][0]["y"] == [0, 0.33333, 0.66667] and "low" not in data["curves"][0]
    assert len(data["curves"][3]["low"]) == len(data["curves"][3]["y"]) == len(data["steps"][2])


def test_scripts_and_styles_are_short_and_ask_for_nothing() -> None:
    for name in (*SCRIPTS, STYLE, "page.html.j2"):
        text = (FOLDER / name).read_text("ascii")
        assert len(text.splitlines()) <= 400 and not re.search(
            r"https?://(?!www\.w3\.org)|@import|url\(|innerHTML =|eval\(", text
        )
    assert "</" not in assets()[0]
