"""Signals that end a command, and limits of this process."""

import contextlib
import resource
import signal
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


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
