"""Log files."""

import time
from pathlib import Path

from realhf.base.logging import open_log


def test_a_log_is_appended_to_and_a_second_open_does_not_duplicate_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker-0.log"
    open_log(path, "worker-0").info("one")
    log = open_log(path, "worker-0")
    log.info("zwei: %s", "\u00fc")
    log.handlers[0].close()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == ["one", "zwei: \u00fc"]
    assert not log.propagate


def test_times_are_utc(tmp_path: Path) -> None:
    formatter = open_log(tmp_path / "x.log", "utc").handlers[0].formatter
    assert formatter is not None and formatter.converter is time.gmtime
