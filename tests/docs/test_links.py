"""Relative links and anchors of the documents, and the figures that they show. External links are only listed."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from tests.docs.blocks import PAGES, ROOT, anchors, links

STUDIES = sorted((ROOT / "experiments").rglob("*.md"))
EXTERNAL = ("http://", "https://", "mailto:")


@pytest.mark.parametrize("page", [*PAGES, *STUDIES], ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_anchors_exist(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(EXTERNAL):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_of_the_site_is_in_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text().splitlines()
    listed = {f"{line}.md" for line in index}
    pages = {page.relative_to(docs).as_posix() for page in PAGES if page.is_relative_to(docs)}
    assert pages - listed == {"index.md"}
    linked = {link.partition("#")[0] for link in links(docs / "index.md")}
    assert pages - linked == {"index.md"}


def test_figures_are_shown_and_are_valid_and_have_a_text() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page) if link.endswith(".svg")}
    figures = set((ROOT / "docs" / "figures").iterdir())
    assert figures <= shown
    for figure in figures:
        assert ElementTree.parse(figure).getroot().tag.endswith("svg")
        text = figure.read_text()
        assert "prefers-color-scheme: dark" in text
        assert "http" not in text.replace("http://www.w3.org/", "")


def test_external_links_use_https(record_property: Callable[[str, object], None]) -> None:
    """There is no network here: the links are listed in the report of the tests."""
    external = sorted({link for page in PAGES for link in links(page) if link.startswith(EXTERNAL)})
    record_property("external_links", "\n".join(external))
    print(*external, sep="\n")
    assert [link for link in external if not link.startswith("https://")] == []
