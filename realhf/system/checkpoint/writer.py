"""A worker's part of a checkpoint: its tensors go to disk while it computes, and come back from there."""

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


class Writer:
    """Writes tensors in a thread of its own, one checkpoint after the other."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._digests: Digests = {}
        self._error: BaseException | None = None

    def begin(self, folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Start writing ``files`` into ``folder``; the tensors belong to the writer from now on."""
        assert self._thread is None, "a checkpoint is settled before the next one begins"
        self._digests, self._error = {}, None
        self._thread = threading.Thread(target=self._write, args=(folder, files), daemon=True)
        self._thread.start()

    def settle(self) -> Digests:
        """Wait until everything is on the disk; raises what went wrong there, with the folder's name."""
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
class Saved:
    """The files of a checkpoint, one role's after the other."""

    folder: Path
    role: str

    def __call__(self, rank: int) -> dict[str, Tensor]:
        """Return what a worker wrote of the role; only what is used is read from the disk."""
        with safe_open(self.folder / file_name(self.role, rank), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
