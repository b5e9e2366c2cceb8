"""The child's side of a process that runs the user's code and replies in JSON lines on its standard output."""

import json
import math
import os
import re
import resource
import select
import signal
import time
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
MAX_TRACEBACK = 4000  # characters
SURROGATE = re.compile("[\ud800-\udfff]")


def error_reply(error: BaseException) -> dict[str, object]:
    """Return the reply for an exception; its traceback starts in the user's code, and is cut at its start."""
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return {"error": describe(error), "traceback": clean_text(text[-MAX_TRACEBACK:])}


def clean_text(text: str) -> str:
    """Replace surrogates, which are in texts that were decoded with errors and which no other format encodes."""
    return SURROGATE.sub("\ufffd", text)


def take_over_streams() -> tuple[int, int]:
    """Return private copies of stdin and stdout, so that judged code cannot read requests or write replies."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def die_with_parent(requests: int, seconds: float) -> None:
    """Kill this process group ``seconds`` after the parent has closed its end of ``requests``."""
    poll = select.poll()
    poll.register(requests, 0)
    poll.poll()  # no events requested: returns only on POLLHUP
    time.sleep(seconds)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def limit_cpu(seconds: float) -> None:
    """Limit the CPU time of the next response; this ends an orphan whose watchdog thread never gets the GIL."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + (seconds + 1) * (os.cpu_count() or 1)))


def limit(what: int, value: int) -> None:
    """Set the soft limit ``what`` to ``value``, or to the hard limit if that is lower."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def send(replies: int, message: dict[str, object]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # the user's own method
        text = "it has no text, since its __str__ failed"
    return clean_text(f"{type(error).__name__}: {text}"[:1000])
