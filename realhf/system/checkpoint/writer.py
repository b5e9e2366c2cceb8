"""A worker's part of a checkpoint, written in the background."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from realhf.base.atomic_io import Digests, fsync_and_hash

ROWS = "@rows"  # in place of a role: the generated rows of later steps


def file_name(role: str, rank: int) -> str:
    return f"{role}.{rank}.safetensors"


class CheckpointWriter:
    """Writes one checkpoint at a time in a separate thread."""

    def __init__(self) -> None:
        self._pending: Future[Digests] | None = None

    def start(self, folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Start writing ``files`` into ``folder``. The caller must not modify the tensors afterwards."""
        assert self._pending is None, "the previous checkpoint is incomplete"
        self._pending = Future()
        threading.Thread(target=_write, args=(self._pending, folder, files), daemon=True).start()

    def wait(self) -> Digests:
        """Wait until all files are on disk and return their digests; ``OSError`` with the folder on failure."""
        assert self._pending is not None, "no checkpoint has been started"
        pending, self._pending = self._pending, None
        return pending.result()


def _write(pending: Future[Digests], folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    digests: Digests = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in files.items():
            save_file(dict(tensors), folder / name)
            digests[name] = fsync_and_hash(folder / name)
    except Exception as error:
        pending.set_exception(OSError(f"the checkpoint in {folder} cannot be written: {error}"))
    else:
        pending.set_result(digests)


@dataclass(frozen=True)
class RoleCheckpoint:
    """The files of one role in a checkpoint."""

    folder: Path
    role: str

    def __call__(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors of a worker."""
        with safe_open(self.folder / file_name(self.role, rank), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
