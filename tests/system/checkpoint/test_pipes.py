"""A named pipe in place of a file of a checkpoint is damage, and does not wait for a writer."""

import os
from pathlib import Path

import pytest

from realhf.system.checkpoint.manifest import CHECKSUM, MANIFEST, read_undamaged


@pytest.mark.parametrize("name", [MANIFEST, CHECKSUM])
def test_a_pipe_is_reported(name: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_3"
    checkpoint.mkdir()
    for other in (MANIFEST, CHECKSUM):
        if other == name:
            os.mkfifo(checkpoint / other)
        else:
            (checkpoint / other).write_text("{}")
    (problem,) = read_undamaged(checkpoint)  # type: ignore[misc]
    assert f"{name} is not a regular file" in problem
