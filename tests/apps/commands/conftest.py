"""The command ``realhf plan`` of the tests."""

from pathlib import Path

import pytest

from tests.apps.commands.plan_command import Command, write_model


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    write_model(tmp_path / "7b")
    monkeypatch.chdir(tmp_path)
    return Command(tmp_path, capsys)
