"""Benchmarks and studies can be imported: what they use has not moved."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_PEERS = "peer_*.py"  # need the peer's interpreter
FILES = [file.relative_to(ROOT) for folder in ("benchmarks", "experiments")
         for file in sorted((ROOT / folder).rglob("*.py")) if not file.match(OF_PEERS)]  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_program_can_be_imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str((ROOT / file).parent), str(ROOT), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(file)])
    found = runpy.run_path(str(ROOT / file), run_name="imported")
    assert found["__doc__"] or file.name == "__init__.py", "a program says what it does"
