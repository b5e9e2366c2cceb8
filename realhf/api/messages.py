"""What master and workers say to each other: a closed union of frozen dataclasses, sent as msgpack, never pickled.

Statistics travel as ``{name: (sum, count)}`` and are divided once, by the master.
"""

from dataclasses import dataclass, field
from typing import Any

from realhf.api.batch import BatchMeta, RowId

Stats = dict[str, tuple[float, float]]
Holders = dict[str, tuple[tuple[int, ...], ...]]
SpanTuple = tuple[str, int, int]
State = dict[str, Any]
"""What an interface remembers between calls of its role (KL coefficient, value statistics): small, plain, JSON-able."""


# master -> worker
@dataclass(frozen=True)
class Start:
    """Join the other workers at the rendezvous, where rank 0 opened the store; go on from ``checkpoint``, if given."""

    host: str
    port: int
    checkpoint: str = ""


@dataclass(frozen=True)
class Fetch:
    """Load the prompts at positions ``start <= i < stop`` of the data stream into the row store."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """Bring the rows of ``inputs`` to where ``mfc`` runs; ``Run`` with the same number starts it.

    ``request`` is numbered by whoever sends it. ``holders[key][i]`` are ranks that hold row ``inputs.ids[i]`` of
    ``key``; ``shared`` names the keys that are held once per prompt; ``assignment[d]`` lists the rows of data-parallel
    rank ``d``; ``minibatches[i]`` numbers the mini-batch of row ``i``; ``state`` is the role's state, ``step`` the
    traversal that these rows belong to.
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


@dataclass(frozen=True)
class Run:
    """Carry out the rest of the program of a call, whose rows are here."""

    request: int


@dataclass(frozen=True)
class Collect:
    """Send back what this worker holds of these rows: decoded text for tokens, numbers for the rest."""

    request: int
    ids: tuple[RowId, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Save:
    """Write the role's weights as a Hugging Face folder."""

    request: int
    role: str
    path: str


@dataclass(frozen=True)
class Checkpoint:
    """Take a copy of what training has changed, and begin to write it into ``folder``."""

    request: int
    folder: str


@dataclass(frozen=True)
class Settle:
    """Reply when the checkpoint that was begun is on the disk, with its ``files``."""

    request: int


@dataclass(frozen=True)
class Drop:
    """Forget every row of the prompts numbered ``start <= p < stop``."""

    start: int
    stop: int


@dataclass(frozen=True)
class Stop:
    """End the process with exit code 0."""


# worker -> master
@dataclass(frozen=True)
class Hello:
    """First word of a worker, which others reach at ``address``. Rank 0's rendezvous store listens at ``port``."""

    rank: int
    pid: int
    host: str
    port: int
    address: str = "127.0.0.1"


@dataclass(frozen=True)
class Ready:
    """Models are built and data is readable; ``info`` describes the worker."""

    rank: int
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A request is done. ``spans`` are (name, start_us, duration_us); ``memory`` is (peak, present) resident bytes."""

    request: int
    rank: int
    outputs: BatchMeta | None = None
    stats: Stats = field(default_factory=dict)
    state: State | None = None
    values: dict[str, Any] = field(default_factory=dict)
    spans: tuple[SpanTuple, ...] = ()
    memory: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Beat:
    """A worker's process is alive; ``doing`` says what it is at, from the outermost in."""

    rank: int
    pid: int
    host: str
    doing: str


@dataclass(frozen=True)
class Failed:
    """The worker met an error and is about to exit."""

    rank: int
    during: str
    error: str
    traceback: str
    user_error: bool = False


ToWorker = Start | Fetch | Call | Run | Collect | Save | Checkpoint | Settle | Drop | Stop
ToMaster = Hello | Ready | Done | Beat | Failed
