"""What master and workers say to each other: a closed union of frozen structs, sent as msgpack, never pickled.

Structs are read straight into their types, which a master of thousands of workers does thousands of times a second.
Statistics travel as ``{name: (sum, count)}`` and are divided once, by the master.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from realhf.api.batch_meta import BatchMeta, RowId

Stats = dict[str, tuple[float, float]]
State = dict[str, Any]
"""What an interface remembers between calls of its role (KL coefficient, value statistics): small, plain, JSON-able."""


@dataclass(frozen=True)
class Holders:
    """Who has which rows: row ``i`` of ``key`` is with the workers ``groups[rows[key][i]]``, its sender first."""

    groups: tuple[tuple[int, ...], ...]
    rows: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        for key, numbers in self.rows.items():
            if numbers and not 0 <= min(numbers) <= max(numbers) < len(self.groups):
                raise ValueError(f"rows of '{key}' name holders that are not among {len(self.groups)} groups")

    def of(self, key: str) -> list[tuple[int, ...]]:
        """Return the holders of every row."""
        return [self.groups[number] for number in self.rows[key]]

    @property
    def ranks(self) -> frozenset[int]:
        """Every worker that has any of the rows."""
        return frozenset(chain.from_iterable(self.groups))


class Message(
    msgspec.Struct, frozen=True, tag=True, tag_field="type", omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """One message: a map with the name of its type, as strict as its annotations. None is part of a cycle."""


# master -> worker; where a request has a ``step``, it is the traversal of the graph that it belongs to
class Start(Message, frozen=True):
    """Join the other workers at the rendezvous, where rank 0 opened the store; go on from ``checkpoint``, if given."""

    host: str
    port: int
    checkpoint: str = ""


class Fetch(Message, frozen=True):
    """Load the prompts at positions ``start <= i < stop`` of the data stream into the row store."""

    request: int
    step: int
    start: int
    stop: int


class PrepareCall(Message, frozen=True):
    """Bring the rows of ``inputs`` to where ``mfc`` runs; ``Run`` with the same number starts it.

    ``request`` is numbered by whoever sends it. ``holders`` tells who has the rows of ``inputs``; ``shared`` names the
    keys that are held once per prompt; ``assignment[d]`` lists the rows of data-parallel rank ``d``;
    ``minibatches[i]`` numbers the mini-batch of row ``i``; ``state`` is the role's state.
    """

    request: int
    mfc: str
    step: int
    version: int
    inputs: BatchMeta
    holders: Holders
    shared: tuple[str, ...]
    assignment: tuple[tuple[int, ...], ...]
    minibatches: tuple[int, ...]
    state: State


class ExecuteCall(Message, frozen=True):
    """Carry out the rest of the program of a call, whose rows are here."""

    request: int


class ReadRows(Message, frozen=True):
    """Send back what this worker holds of these rows: decoded text for tokens, numbers for the rest."""

    request: int
    ids: tuple[RowId, ...]
    keys: tuple[str, ...]


class Save(Message, frozen=True):
    """Write the role's weights as a Hugging Face folder."""

    request: int
    step: int
    role: str
    path: str


class Checkpoint(Message, frozen=True):
    """Take a copy of what training has changed, and begin to write it into ``folder``."""

    request: int
    step: int
    folder: str


class AwaitCheckpoint(Message, frozen=True):
    """Reply when the checkpoint that was begun is on the disk, with its ``files``."""

    request: int
    step: int


class FreeRows(Message, frozen=True):
    """Forget every row of the prompts numbered ``start <= p < stop``."""

    start: int
    stop: int


class Shutdown(Message, frozen=True):
    """End the process with exit code 0."""


# worker -> master
class Hello(Message, frozen=True):
    """First word of a worker, which others reach at ``address``. Rank 0's rendezvous store listens at ``port``."""

    rank: int
    pid: int
    host: str
    port: int
    address: str = "127.0.0.1"


class Ready(Message, frozen=True):
    """Models are built and data is readable; ``info`` describes the worker."""

    rank: int
    info: dict[str, Any] = {}


class Done(Message, frozen=True):
    """A request is complete. ``metrics`` are worker metrics by name; ``trace`` holds the spans of the worker."""

    request: int
    rank: int
    outputs: BatchMeta | None = None
    stats: Stats = {}
    state: State | None = None
    values: dict[str, Any] = {}
    trace: bytes = b""
    metrics: dict[str, int] = {}

    @property
    def is_bare(self) -> bool:
        """Whether nothing came of the request but that it is done, as with most of a mesh."""
        return self.outputs is None and not self.stats and self.state is None and not self.values


class Heartbeat(Message, frozen=True):
    """A worker's process is alive; ``activity`` says what it is at, from the outermost in."""

    rank: int
    pid: int
    host: str
    activity: str


class Failed(Message, frozen=True):
    """The worker met an error and is about to exit."""

    rank: int
    during: str
    error: str
    traceback: str
    user_error: bool = False


ToWorker = (
    Start | Fetch | PrepareCall | ExecuteCall | ReadRows | Save | Checkpoint | AwaitCheckpoint | FreeRows | Shutdown
)
ToMaster = Hello | Ready | Done | Heartbeat | Failed

TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
TO_MASTER = msgspec.msgpack.Decoder(ToMaster)
