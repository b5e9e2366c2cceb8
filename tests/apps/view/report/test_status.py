"""The status of a run by its files and its lock."""

from pathlib import Path

import pytest

from realhf.apps.view.report.status import RunState, first_error, read_status
from realhf.base.atomic_io import try_lock
from realhf.base.logging import open_log
from realhf.base.paths import RunDir


@pytest.fixture
def paths(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    return run


def test_a_locked_directory_has_a_running_run(paths: RunDir) -> None:
    with try_lock(paths.lock):
        assert read_status(paths, 3, 5).state is RunState.RUNNING
        paths.stop.touch()
        assert "as requested" in read_status(paths, 3, 5).reason
    assert read_status(paths, 3, 5).state is RunState.STOPPED and read_status(paths, 5, 5).state is RunState.DONE


def test_a_worker_error_is_shown_with_its_traceback(paths: RunDir) -> None:
    log = open_log(paths.log("worker-1"), "worker-1")
    log.info("ready")
    try:
        raise RuntimeError("<b> too bad")
    except RuntimeError:
        log.exception("failed during step 3")
    log.handlers[0].close()
    paths.log("worker-0").write_text("2026-11-24 14:28:28,061 INFO ready: \x00\n")
    status = read_status(paths, 3, 5)
    assert status.state is RunState.FAILED
    for words in ("failed during step 3", "RuntimeError: <b> too bad", "(worker-1.log)"):
        assert words in status.error
    paths.log("worker-2").write_text("1999-01-01 00:00:00,000 ERROR first\nlines\n")
    assert first_error(paths.logs).startswith("1999-01-01 00:00:00,000 ERROR first\nlines")


def test_other_ends(paths: RunDir) -> None:
    assert read_status(paths, 0, 5).state is RunState.WAITING
    paths.events.touch()
    assert read_status(paths, 0, 5).state is RunState.ENDED and read_status(paths, 0, None).state is RunState.UNKNOWN
    paths.key.touch()
    assert read_status(paths, 2, 5).state is RunState.FAILED
    assert read_status(RunDir(paths.root / "none"), 2, 5).state is RunState.UNKNOWN


def test_the_error_of_the_launcher_comes_first(paths: RunDir) -> None:
    paths.error.write_text("Traceback\x00\nno heartbeat\n")
    open_log(paths.log("worker-1"), "worker-1").error("stopped")
    for n_done in (2, 5):
        status = read_status(paths, n_done, 5)
        assert status.state is RunState.FAILED and status.error.endswith("no heartbeat")
    paths.error.unlink()
    paths.error.mkdir()
    assert read_status(paths, 5, 5).state is RunState.DONE


def test_logs_that_are_no_files(paths: RunDir) -> None:
    paths.log("worker-0").mkdir(parents=True)
    assert first_error(paths.logs) == ""
