"""A worker's part of a checkpoint, written in the background."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from realhf.base.atomic_io import Digests, fsync_and_hash


def file_name(role: str, rank: int) -> str:
    return f"{role}.{rank}.safetensors"


class CheckpointWriter:
    """Writes one checkpoint at a time in a separate thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._digests: Digests = {}
        self._error: BaseException | None = None

    def start(self, folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Start writing ``files`` into ``folder``. The caller must not modify the tensors afterwards."""
        assert self._thread is None, "the previous checkpoint is incomplete"
        self._digests, self._error = {}, None
        self._thread = threading.Thread(target=self._write, args=(folder, files), daemon=True)
        self._thread.start()

    def wait(self) -> Digests:
        """Wait until all files are on disk and return their digests; ``OSError`` with the folder on failure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        return self._digests

    def _write(self, folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, tensors in files.items():
                save_file(dict(tensors), folder / name)
                self._digests[name] = fsync_and_hash(folder / name)
        except Exception as error:
            self._error = OSError(f"the checkpoint in {folder} cannot be written: {error}")


@dataclass(frozen=True)
class RoleCheckpoint:
    """The files of one role in a checkpoint."""

    folder: Path
    role: str

    def __call__(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors of a worker."""
        with safe_open(self.folder / file_name(self.role, rank), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
