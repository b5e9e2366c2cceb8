"""Answers of a language model on disk by the content of their requests, and the spending of a run.

Processes, also of different runs, may use one cache at the same time: files are replaced atomically, and a file that
is incomplete or of another form counts as missing.
"""

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

MAX_TOKENS = 10**9  # of one reply; more is not a number of tokens


@dataclass(frozen=True)
class ChatReply:
    """A reply with its numbers of tokens and of the retries before it; ``asked_by`` is the run and prompt it was for.

    ``finish`` is the endpoint's ``finish_reason``.
    """

    text: str
    finish: str
    tokens_in: int
    tokens_out: int
    retries: int
    asked_by: str


def request_key(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a request: model, messages and parameters."""
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ReplyCache:
    """The folder with one file per reply, ``ab/abcd....json``."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def get(self, key: str) -> ChatReply | None:
        try:
            stored = json.loads(self.path(key).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        match stored:
            case {"key": found, "reply": {"text": str(), "finish": str(), "asked_by": str(), "tokens_in": int(),
                                          "tokens_out": int(), "retries": int(), **others} as reply}:  # fmt: skip
                if found == key and not others and all(0 <= reply[n] <= MAX_TOKENS for n in COUNTS):
                    return ChatReply(**reply)
        return None

    def put(self, key: str, reply: ChatReply) -> None:
        """Store a reply; OSError if the file cannot be written."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, tmp = tempfile.mkstemp(dir=path.parent, suffix=".unfinished")
        try:
            with os.fdopen(fd, "w") as file:
                json.dump({"key": key, "reply": asdict(reply)}, file)
            os.replace(tmp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(tmp)
            raise


COUNTS = ("tokens_in", "tokens_out", "retries")


@dataclass
class Spending:
    """The cost in USD of all requests of a run, before and after a resume, on all workers.

    Each process appends to its own file of a folder of the run, ``spent_*.jsonl``, one line per request. Lines of a
    process that was killed while it wrote are ignored.
    """

    folder: Path
    _own: Path | None = None
    _read: dict[Path, int] = field(default_factory=dict)
    _total: float = 0.0

    def add(self, cost: float, tokens_in: int, tokens_out: int) -> None:
        if self._own is None:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd, name = tempfile.mkstemp(dir=self.folder, prefix="spent_", suffix=".jsonl")
            os.close(fd)
            self._own = Path(name)
        line = json.dumps({"usd": cost, "tokens_in": tokens_in, "tokens_out": tokens_out}) + "\n"
        with self._own.open("a") as file:
            file.write(line)

    def total(self) -> float:
        """Return the sum over all files; each call reads what was added since the last."""
        for path in self.folder.glob("spent_*.jsonl"):
            start = self._read.get(path, 0)
            if path.stat().st_size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                complete, end, _ = file.read().rpartition(b"\n")
            self._read[path] = start + len(complete) + len(end)
            self._total += sum(map(_usd, complete.split(b"\n")))
        return self._total


def _usd(line: bytes) -> float:
    try:
        value = json.loads(line)["usd"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0.0
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0
