"""Atomic file replacement, and locks that end with their process."""

import subprocess
import sys
from pathlib import Path

from realhf.base.atomic_io import atomic_write, is_locked, remove_folder, try_lock
from tests.conftest import TIMEOUT_S

HOLDER = """
import sys
from pathlib import Path
from realhf.base.atomic_io import try_lock
with try_lock(Path(sys.argv[1])) as is_acquired:
    print(is_acquired, flush=True)
    sys.stdin.read()
"""


def test_atomic_write_replaces_the_text_and_leaves_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for text in ("one", "two"):
        atomic_write(file, text)
        assert file.read_text() == text and list(tmp_path.iterdir()) == [file]


def test_remove_folder_also_removes_an_unfinished_removal(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "a.unfinished"):
        (folder / "b").mkdir(parents=True)
    remove_folder(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_has_one_holder_and_ends_with_the_process(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_locked(lock) and not lock.exists()
    with try_lock(lock) as is_acquired:
        assert is_acquired and is_locked(lock)
        with try_lock(lock, 0.0) as is_acquired_twice:
            assert not is_acquired_twice
    assert not is_locked(lock)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"True\n" and is_locked(lock)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    assert not is_locked(lock)
