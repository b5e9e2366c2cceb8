"""Signals that end a command, limits of this process, and the cores next to a device."""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PCI_DEVICES = Path("/sys/bus/pci/devices")


def interrupt_once() -> None:
    """Raise ``KeyboardInterrupt`` at the first signal that ends a process, and ignore later ones: cleanup is bounded.

    Signals that are ignored, as under nohup, stay ignored.
    """

    def interrupt(number: int, frame: object) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals that end a process until the context ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_fd_limit() -> None:
    """Allow as many open files as the hard limit: connections and logs of a thousand workers exceed the soft one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # not permitted in some containers
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def local_cores(domain: int, bus: int, device: int, devices: Path = PCI_DEVICES) -> set[int]:
    """Return the cores of the NUMA node of a PCI device; empty if the system does not know them."""
    file = devices / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "local_cpulist"
    return parse_cores(file.read_text()) if file.is_file() else set()


def parse_cores(text: str) -> set[int]:
    """Parse a list of cores as in ``/sys``: ``0-2,8`` is 0, 1, 2 and 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
