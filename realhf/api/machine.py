"""Hardware limits and workload of the cost model."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from realhf.api.batch_meta import PROMPT, RowId


@dataclass(frozen=True)
class Link:
    """A connection between two memories: bandwidth in bytes/s per direction, latency in seconds."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


SHARED_STORAGE = Link(122e6)
"""Storage of checkpoints, per device while all devices write or read: the 2 TB/s that the storage of Llama 3 405B
sustains, for 16,384 GPUs (arXiv 2407.21783, 3.3.1). Opening files takes no time: an assumption."""

GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities with a grouped product in torch; on others torch copies the sizes to the host."""


@dataclass(frozen=True)
class ExpectedErrors:
    """Expected relative errors of predictions, as standard deviations.

    ``compute`` is that of seconds of training and inference passes, ``decoding`` of generation, ``links`` of transfers
    and reallocations, ``memory`` of peak bytes.
    """

    compute: float = 0.25
    decoding: float = 0.25
    links: float = 0.3
    memory: float = 0.1


@dataclass(frozen=True)
class Hardware:
    """A cluster of identical devices. Units are bytes, seconds and operations per second.

    ``flops`` and ``memory_bandwidth`` are achievable by large matrix products and by copies, ``attention_flops`` by
    attention kernels on long rows (0: as ``flops``); ``peak_flops`` and ``peak_bandwidth`` are data-sheet values for
    MFU and MBU (0: not reported). ``kernel`` is the time of the smallest kernel in a CUDA graph, ``launch`` the time in
    which the host launches one outside of a graph, ``call`` a round trip from the master to a worker.
    ``compute_capability`` is that of CUDA. ``memory`` is per device; ``reserved`` is used by runtime and libraries.
    Plans keep ``memory_reserve_fraction`` free, because running out of memory ends the run; None: as much as peaks
    exceed predictions by ``errors.memory``. ``cores`` is the number of workers of a node that compute at full speed
    concurrently: CPU workers share cores (0: no sharing). Links are per device: ``node`` within a node, ``cluster``
    between nodes, ``host`` to the memory of offloaded weights, ``disk`` to the storage of checkpoints.

    ``sms`` is the number of multiprocessors (0: the shapes of products do not matter). ``nvls_bandwidth`` is message
    size / time of all-reduces inside the switches of a node (0: they have none). Links between pods of ``pod_nodes``
    nodes (0: one pod) have ``oversubscription`` times less bandwidth. ``errors`` are those of
    predictions by these limits.
    """

    name: str
    node_size: int
    memory: float
    flops: float
    memory_bandwidth: float
    node: Link
    cluster: Link
    host: Link
    kernel: float
    call: float
    reserved: float = 0.0
    memory_reserve_fraction: float | None = None
    cores: int = 0
    peak_flops: float = 0.0
    peak_bandwidth: float = 0.0
    attention_flops: float = 0.0
    launch: float = 0.0
    compute_capability: float = 0.0
    sms: int = 0
    nvls_bandwidth: float = 0.0
    pod_nodes: int = 0
    oversubscription: float = 1.0
    disk: Link = SHARED_STORAGE
    errors: ExpectedErrors = ExpectedErrors()

    @property
    def reserve_fraction(self) -> float:
        """Fraction of a device's memory that plans keep free: a predicted peak, times 1 + its error, fits."""
        if self.memory_reserve_fraction is not None:
            return self.memory_reserve_fraction
        return self.errors.memory / (1.0 + self.errors.memory)

    @property
    def usable(self) -> float:
        """Bytes of a device that a plan may allocate."""
        return self.memory * (1.0 - self.reserve_fraction)

    def link(self, src: int, dst: int) -> Link:
        """Return the link between two workers: the device's own memory, the node link, or the network."""
        if src == dst:
            return Link(self.memory_bandwidth / 2)  # a copy reads and writes
        first, second = src // self.node_size, dst // self.node_size
        return self.node if first == second else self.network((first, second))

    def network(self, nodes: Collection[int]) -> Link:
        """Return the link of a device to the network that connects these nodes."""
        if self.pod_nodes and min(nodes) // self.pod_nodes != max(nodes) // self.pod_nodes:
            return replace(self.cluster, bandwidth=self.cluster.bandwidth / self.oversubscription)
        return self.cluster


@dataclass(frozen=True)
class Cost:
    """Duration of an instruction without contention, and core-seconds summed over its workers.

    ``core_seconds / seconds`` is the mean number of computing workers: less than all in pipeline bubbles and under
    load imbalance. It matters only if workers share cores.
    """

    seconds: float
    core_seconds: float


@dataclass(frozen=True)
class EnvironmentLoad:
    """Waits of a replica's episodes for environments: calls per episode, seconds of a call, and calls at a time.

    ``max_open`` is the number of open episodes. An environment process makes ``per_process`` calls at a time.
    """

    turns: float
    latency: float
    workers: int
    per_process: int
    max_open: int

    @property
    def concurrency(self) -> int:
        return self.workers * self.per_process

    def n_open(self, n_episodes: int) -> int:
        """Return the number of open episodes of ``n_episodes``."""
        return max(1, min(self.max_open or n_episodes, n_episodes))


@dataclass(frozen=True)
class RewardLoad:
    """Judging of responses on one worker: seconds of a response, judge processes, and responses at a time in each.

    ``uses_cores``: judges compute on the cores of the worker; requests to a service and async functions wait.
    """

    latency: float
    processes: int
    per_process: int = 1
    uses_cores: bool = True

    @property
    def concurrency(self) -> int:
        return self.processes * self.per_process


@dataclass(frozen=True)
class Workload:
    """Expected lengths of the rows of a run; ``prompts`` and ``response_lengths`` are used cyclically.

    ``prompts[i]`` holds the lengths of the dataset rows at a position: one prompt if responses are generated,
    otherwise whole sequences. Every prompt gets ``samples`` responses. ``assumption`` states the origin of
    ``response_lengths``.
    """

    prompts: tuple[tuple[int, ...], ...]
    response_lengths: tuple[int, ...] = ()
    samples: int = 1
    assumption: str = ""

    @property
    def description(self) -> str:
        """One line about the assumed lengths of rows."""
        lengths = [sum(row) for row in self.prompts]
        rows = f"{sum(lengths) / len(lengths):,.0f} tokens per {'prompt' if self.is_generated else 'row'} on average"
        return f"{rows}; {self.assumption}" if self.assumption else rows

    @property
    def is_generated(self) -> bool:
        return bool(self.response_lengths)

    def dataset_rows(self, position: int) -> tuple[tuple[RowId, int], ...]:
        """Return ids and lengths of the dataset rows at a position of the data stream."""
        lengths = self.prompts[position % len(self.prompts)]
        if self.is_generated:
            return ((RowId(position, PROMPT), lengths[0]),)
        return tuple((RowId(position, sample), n) for sample, n in enumerate(lengths))

    def prompt_lengths(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt length at each position, fast: a plan search needs millions of them."""
        n = len(self.prompts)
        return self._first * len(positions) if n == 1 else tuple(self._first[i % n] for i in positions)

    @cached_property
    def _first(self) -> tuple[int, ...]:
        return tuple(lengths[0] for lengths in self.prompts)

    def sampled_rows(self, position: int) -> tuple[tuple[RowId, int], ...]:
        """Return ids of the samples of a position, with the length of prompt and response together."""
        prompt = self.prompts[position % len(self.prompts)][0]
        return tuple((RowId(position, i), prompt + length) for i, length in enumerate(self.responses_at(position)))

    def responses_at(self, position: int) -> tuple[int, ...]:
        """Return the lengths of the responses to the prompt at a position."""
        n = len(self.response_lengths)
        first = position * self.samples % n
        if first + self.samples <= n:
            return self.response_lengths[first : first + self.samples]
        return tuple(self.response_lengths[(first + i) % n] for i in range(self.samples))
