"""Memory that another process of this user can map: it has no name in any file system, and vanishes with them."""

import mmap
import os


class SharedBuffer:
    """``size`` zero bytes; another process can open them at their place for as long as this one lives."""

    def __init__(self, size: int, name: str) -> None:
        self._fd = os.memfd_create(f"realhf-{name}")
        os.ftruncate(self._fd, max(size, mmap.PAGESIZE))
        self.map = mmap.mmap(self._fd, 0)

    @property
    def handle(self) -> tuple[int, int]:
        """Process and descriptor, of which ``path_of`` makes the path: two numbers that a collective can carry."""
        return os.getpid(), self._fd

    def release_pages(self) -> None:
        """Release the memory; it is zero when it is used again."""
        self.map.madvise(mmap.MADV_REMOVE)


def fd_path(pid: int, fd: int) -> str:
    """Return where another process of this machine opens the memory."""
    return f"/proc/{pid}/fd/{fd}"
