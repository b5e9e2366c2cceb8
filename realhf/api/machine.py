"""What the planner knows of machines and of the data: plain values, from a YAML file, a profile or a data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from realhf.api.batch_meta import PROMPT, RowId

MEMORY_RESERVE_FRACTION = 0.05
"""Share of a device's memory that plans leave, where a machine does not say otherwise: a run that needs more than there
is ends."""


@dataclass(frozen=True)
class Link:
    """A way between two memories: bytes per second in one direction and seconds before the first byte."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal devices, by named limits (the YAML files beside plan/cost/hardware.py give their sources).

    ``flops`` is what large matrix products reach, in operations per second; ``memory_bandwidth`` what a copy reaches,
    in bytes per second; ``kernel`` seconds of the smallest kernel, its launch included; ``call`` seconds from the
    master to a worker and back. ``cores`` is how many workers of a node compute at full speed at a time: workers on CPU
    share them (0: every device is its own). ``memory`` is bytes of one device, ``reserved`` what runtime and libraries
    take of it, ``memory_reserve_fraction`` the share of it that plans leave. Links are per device: ``node`` to a device of the same
    node, ``cluster`` to another node, ``host`` to the memory that offloaded weights rest in. ``peak_flops`` and
    ``peak_bandwidth`` are what a data sheet says, of which MFU and MBU are shares (0: they are not told).
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
    memory_reserve_fraction: float = MEMORY_RESERVE_FRACTION
    cores: int = 0
    peak_flops: float = 0.0
    peak_bandwidth: float = 0.0

    @property
    def usable(self) -> float:
        """Bytes of a device that a plan may fill."""
        return self.memory * (1.0 - self.memory_reserve_fraction)

    def link(self, src: int, dst: int) -> Link:
        """Return the way between two workers: the device's own memory, the node's link, or the network."""
        if src == dst:
            return Link(self.memory_bandwidth / 2)  # a copy reads and writes
        return self.node if src // self.node_size == dst // self.node_size else self.cluster


@dataclass(frozen=True)
class Cost:
    """What an instruction takes: seconds on its workers when nothing else runs, and core-seconds over all of them.

    ``work / seconds`` is how many of its workers compute at a time: less than all of them in a pipeline's bubbles, and
    where loads are uneven. It matters only where workers share cores.
    """

    seconds: float
    core_seconds: float


@dataclass(frozen=True)
class Workload:
    """What the rows of a run will look like; ``prompts`` and ``answers`` are used in turns, by number.

    ``prompts[i]`` holds the lengths of what the data set has at a position: one prompt (``sampled``), else whole
    sequences. A generating call draws ``samples`` answers to each prompt, of ``answers`` tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    response_lengths: tuple[int, ...] = ()
    samples: int = 1

    @property
    def is_generated(self) -> bool:
        return bool(self.response_lengths)

    def dataset_rows(self, position: int) -> tuple[tuple[RowId, int], ...]:
        """Return the rows that the data set has at a position of the stream, with their lengths."""
        lengths = self.prompts[position % len(self.prompts)]
        if self.is_generated:
            return ((RowId(position, PROMPT), lengths[0]),)
        return tuple((RowId(position, sample), n) for sample, n in enumerate(lengths))

    def prompt_length(self, position: int) -> int:
        """Return the length of what the data set has first at a position."""
        return self.prompts[position % len(self.prompts)][0]

    def prompt_lengths(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Return ``prompt_length`` of each position; a search asks for millions."""
        n = len(self.prompts)
        return self._firsts * len(positions) if n == 1 else tuple(self._firsts[i % n] for i in positions)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(lengths[0] for lengths in self.prompts)

    def sampled_rows(self, position: int) -> tuple[tuple[RowId, int], ...]:
        """Return the rows that are sampled for a position, with the lengths of prompt and answer together."""
        prompt, answers = self.prompt_length(position), self.responses_at(position)
        return tuple((RowId(position, sample), prompt + answer) for sample, answer in enumerate(answers))

    def responses_at(self, position: int) -> tuple[int, ...]:
        """Return the lengths of what is sampled for a position."""
        n = len(self.response_lengths)
        first = position * self.samples % n
        rounds = -(-(first + self.samples) // n)
        return (self.response_lengths * rounds)[first : first + self.samples]
