"""Messages between master and workers: two closed unions of frozen structs, encoded as msgpack, never pickled."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from realhf.api.batch_meta import BatchMeta, ColumnMeta, RowId
from realhf.api.curriculum import PromptResult

Stats = dict[str, tuple[float, float]]  # {name: (sum, count)}; the master divides them; count 0: a total
State = dict[str, Any]
"""JSON-serializable state of a role's interface between calls: KL coefficient, value statistics."""


@dataclass(frozen=True)
class Holders:
    """Locations of rows: the workers ``groups[rows[key][i]]`` hold row ``i`` of ``key``; the first one sends it."""

    groups: tuple[tuple[int, ...], ...]
    rows: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        for key, numbers in self.rows.items():
            if numbers and not 0 <= min(numbers) <= max(numbers) < len(self.groups):
                raise ValueError(f"rows of '{key}' have group numbers outside 0 to {len(self.groups) - 1}")

    def of(self, key: str) -> list[tuple[int, ...]]:
        return [self.groups[number] for number in self.rows[key]]

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(chain.from_iterable(self.groups))


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A map with the name of the message type; decoding validates every field."""


# master -> worker; ``step`` is the training step of a request
class Start(Message, frozen=True):
    """Join the rendezvous store that rank 0 has opened; load ``checkpoint``, if given."""

    host: str
    port: int
    checkpoint: str = ""


class Fetch(Message, frozen=True):
    """Load the prompts at positions ``start <= i < stop`` of the data stream into the row store.

    With a curriculum, ``rows`` are their rows in the data.
    """

    request: int
    step: int
    start: int
    stop: int
    rows: tuple[int, ...] = ()


class PrepareCall(Message, frozen=True):
    """Transfer the rows of ``inputs`` to the workers of ``mfc``; an ``ExecuteCall`` with the same number runs it.

    ``shared`` names the keys with one row per prompt; ``assignment[d]`` lists the rows of data-parallel rank ``d``;
    ``minibatches[i]`` is the mini-batch of row ``i``; ``state`` is the role's state. ``forwarded`` are columns of the
    same rows that the workers of ``mfc`` get for later calls.
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
    forwarded: dict[str, ColumnMeta] = msgspec.field(default_factory=dict)

    @property
    def transferred(self) -> dict[str, ColumnMeta]:
        """The columns that are transferred."""
        return self.inputs.columns | self.forwarded


class ExecuteCall(Message, frozen=True):
    """Execute the program of a call after its transfers."""

    request: int


class ReadRows(Message, frozen=True):
    """Return the worker's part of these rows: decoded text for tokens, numbers for other keys."""

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
    """Snapshot the training state, and write it into ``folder`` in the background."""

    request: int
    step: int
    folder: str


class AwaitCheckpoint(Message, frozen=True):
    """Reply with the ``files`` of the last checkpoint once they are on disk."""

    request: int
    step: int


class FreeRows(Message, frozen=True):
    """Delete all rows of the prompts ``start <= p < stop``."""

    start: int
    stop: int


class Shutdown(Message, frozen=True):
    """End the process with exit code 0."""


# worker -> master
class Hello(Message, frozen=True):
    """First message of a worker. ``address`` is its address for peers; rank 0's rendezvous store is at ``port``.

    ``digest`` is the SHA-256 of the run's files that the worker has read.
    """

    rank: int
    pid: int
    host: str
    port: int
    address: str = "127.0.0.1"
    digest: str = ""


class Ready(Message, frozen=True):
    """The models are built and the data is loaded; ``info`` describes the worker."""

    rank: int
    info: dict[str, Any] = {}


class Done(Message, frozen=True):
    """A request is complete. ``metrics`` are in the order of ``WORKER_METRICS``; ``trace`` holds the worker's spans.

    ``results`` are the rewards of the prompts, if the curriculum reads them.
    """

    request: int
    rank: int
    outputs: BatchMeta | None = None
    stats: Stats = {}
    state: State | None = None
    values: dict[str, Any] = {}
    trace: bytes = b""
    metrics: tuple[int, ...] = ()
    carried: BatchMeta | None = None
    results: tuple[PromptResult, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the reply has no results, as on most workers of a mesh."""
        return self.outputs is None and not self.stats and self.state is None and not (self.values or self.results)


class Heartbeat(Message, frozen=True):
    """The worker process is alive; ``activity`` lists its nested activities, outermost first."""

    rank: int
    pid: int
    host: str
    activity: str


class Failed(Message, frozen=True):
    """The worker raised an error and is about to exit."""

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
