"""Anonymous shared memory (memfd) that other processes of the same user can map."""

import mmap
import os


class SharedBuffer:
    """A zero-initialized buffer of ``size`` bytes; other processes can open it while this process lives."""

    def __init__(self, size: int, name: str) -> None:
        self._fd = os.memfd_create(f"realhf-{name}")
        os.ftruncate(self._fd, max(size, mmap.PAGESIZE))
        self.map = mmap.mmap(self._fd, 0)

    @property
    def handle(self) -> tuple[int, int]:
        """Process id and file descriptor, for ``fd_path``; two integers can be sent through a collective."""
        return os.getpid(), self._fd

    def release_pages(self) -> None:
        """Free the memory; the buffer reads as zeros afterwards."""
        self.map.madvise(mmap.MADV_REMOVE)


def fd_path(pid: int, fd: int) -> str:
    """Return the path under which other processes of this machine can open a descriptor."""
    return f"/proc/{pid}/fd/{fd}"
