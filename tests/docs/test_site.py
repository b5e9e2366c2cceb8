"""The site of the documents is built without a warning, its links lead to elements, and it loads nothing remote."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.blocks import ROOT

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The identifiers and links of a page, and what a browser loads with it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := found.get(key))}
        if tag == "a" and (link := found.get("href")):
            self.links.append(link)
        elif tag == "link" and found.get("rel") not in ("canonical", "index", "search", "next", "prev"):
            self.loaded.append(found.get("href") or "")
        elif tag in LOADED and (source := found.get(LOADED[tag])):
            self.loaded.append(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "docs", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert pages and pages <= built


def test_links_of_the_site_lead_to_elements(site: Path) -> None:
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    broken = []
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            target = (file.parent / path).resolve() if path else file
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append(f"{file.name}: {link}")
    assert sum(len(page.links) for page in pages.values()) > 500 and broken == []


def test_the_site_loads_nothing_remote(site: Path) -> None:
    loaded = [(file, source) for file in site.rglob("*.html") for source in Page(file).loaded]
    assert loaded and not [pair for pair in loaded if "//" in pair[1] and not pair[1].startswith("data:")]
