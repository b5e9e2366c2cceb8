"""Speeds composed by responsibility: computation that a profile has measured, and links from a profile or a file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from typing import Protocol

from realhf.api.config.choices import Recompute
from realhf.plan.cost.speed import CollectiveKind, Footprint, Speed, StageShard, Traffic, Work
from realhf.plan.machines.profile import CLUSTER, Fit, Profile, ProfiledSpeed, message_counts

ALONE = (0,)  # ranks of a shard whose collectives are priced separately


class Links(Protocol):
    """The methods of ``Speed`` that depend on links."""

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float: ...

    def send(self, nbytes: float, src: int, dst: int) -> float: ...

    def exchange(self, traffic: Traffic) -> float: ...


@dataclass(frozen=True)
class TieredLinks:
    """Links of a cluster: within a node those of ``node``, between nodes those of ``cluster``."""

    node: Links
    cluster: Links
    node_size: int

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        return (self.cluster if self._n_nodes(ranks) > 1 else self.node).collective(kind, nbytes, ranks)

    def send(self, nbytes: float, src: int, dst: int) -> float:
        return (self.cluster if self._n_nodes((src, dst)) > 1 else self.node).send(nbytes, src, dst)

    def exchange(self, traffic: Traffic) -> float:
        """Seconds of the copies and messages within a node, then of the messages between nodes: no overlap."""
        seconds = self.node.exchange(replace(traffic, cluster=0))
        if traffic.cluster:
            share = traffic.cluster / (traffic.cluster + traffic.node + traffic.local)
            seconds += self.cluster.exchange(Traffic(cluster=traffic.cluster, n_parts=ceil(share * traffic.n_parts)))
        return seconds

    def _n_nodes(self, ranks: Sequence[int]) -> int:
        return len({rank // self.node_size for rank in ranks})


@dataclass(frozen=True)
class ProfiledClusterLinks:
    """Measured links between nodes of ``node_size`` workers.

    A group of another size takes the time of the measured one closest in size, times the ratio of the two in
    ``limits``. ValueError for missing measurements.
    """

    profile: Profile
    limits: Links
    node_size: int

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        n_nodes = len({rank // self.node_size for rank in ranks})
        per_node = ceil(len(ranks) / n_nodes)

        def distance(size: tuple[int, int]) -> float:
            return abs(log(size[0] / n_nodes)) + abs(log(size[1] / per_node))

        nodes, workers = min(self.profile.cluster_sizes, key=distance, default=(2, 1))
        seconds = self._fit(f"{kind.value}/{nodes}x{workers}")(message_counts(nbytes))
        if (nodes, workers) == (n_nodes, per_node):
            return seconds
        measured = [node * self.node_size + i for node in range(nodes) for i in range(workers)]
        return seconds * _ratio(*(self.limits.collective(kind, nbytes, each) for each in (ranks, measured)))

    def send(self, nbytes: float, src: int, dst: int) -> float:
        return self._fit("send")(message_counts(nbytes))

    def exchange(self, traffic: Traffic) -> float:
        """Seconds of messages between nodes, without copies in a worker's own memory."""
        counts = {"rendezvous": 1, "sent part": traffic.n_parts, "sent byte": traffic.cluster}
        return self._fit("exchange")(counts) if traffic.cluster else 0.0

    def _fit(self, name: str) -> Fit:
        if (fit := self.profile.fits.get(f"{CLUSTER}{name}")) is None:
            raise ValueError(f"the profile has no measurements of {CLUSTER}{name}; run 'realhf profile n_nodes=2 "
                             f"n_gpus_per_node={self.node_size} mode=slurm'")  # fmt: skip
        return fit


@dataclass(frozen=True)
class MixedSpeed:
    """``Speed`` and ``Footprint`` of a machine of which only a part was measured.

    Computation and collectives of tensor parallelism within a node are ``measured``, if its profile has the degree.
    For other degrees time and memory of the whole block count, times the ratio of shard and block in ``limits`` and
    ``memory``, and collectives are those of ``links``. Everything between workers is from ``links``.
    """

    measured: ProfiledSpeed
    links: Links
    limits: Speed
    memory: Footprint
    node_size: int

    @property
    def call(self) -> float:
        return self.measured.call

    @property
    def jitter(self) -> float:
        return self.measured.jitter

    def forward(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> float:
        part = self._measured(shard)
        ratio = _ratio(*(self.limits.forward(some, work, ALONE) for some in (shard, part)))
        return ratio * self.measured.forward(part, work, ranks) + self._all_reduces(shard, work.tokens, ranks)

    def train(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        part, reduces = self._measured(shard), self._all_reduces(shard, work.tokens, ranks)
        (forward, backward), (whole_forward, whole_backward) = (
            self.limits.train(some, work, ALONE) for some in (shard, part)
        )
        forward_s, backward_s = self.measured.train(part, work, ranks)
        n_backward = 2 if shard.recompute is Recompute.full else 1  # blocks run again
        return (_ratio(forward, whole_forward) * forward_s + reduces,
                _ratio(backward, whole_backward) * backward_s + n_backward * reduces)  # fmt: skip

    def decode(self, shard: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        part = self._measured(shard)
        ratio = _ratio(*(self.limits.decode(some, rows, context, ALONE) for some in (shard, part)))
        return ratio * self.measured.decode(part, rows, context, ranks) + self._all_reduces(shard, rows, ranks)

    def optimizer(self, shard: StageShard, numel: int) -> float:
        return self.measured.optimizer(shard, numel)

    def host_copy(self, nbytes: float) -> float:
        return self.measured.host_copy(nbytes)

    def interface(self, name: str, rows: int, tokens: int) -> float:
        return self.measured.interface(name, rows, tokens)

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        return self.links.collective(kind, nbytes, ranks) if len(ranks) > 1 else 0.0

    def send(self, nbytes: float, src: int, dst: int) -> float:
        return self.links.send(nbytes, src, dst) if src != dst else 0.0

    def exchange(self, traffic: Traffic) -> float:
        return self.links.exchange(traffic)

    def train_bytes(self, shard: StageShard, work: Work) -> tuple[float, float]:
        part = self._measured(shard)
        (kept, peak), (whole_kept, whole_peak) = (self.memory.train_bytes(some, work) for some in (shard, part))
        measured_kept, measured_peak = self.measured.train_bytes(part, work)
        return measured_kept * _ratio(kept, whole_kept), measured_peak * _ratio(peak, whole_peak)

    def forward_bytes(self, shard: StageShard, work: Work) -> float:
        part = self._measured(shard)
        ratio = _ratio(*(self.memory.forward_bytes(some, work) for some in (shard, part)))
        return ratio * self.measured.forward_bytes(part, work)

    def _has_degree(self, shard: StageShard) -> bool:
        return self.measured.covers(shard.model, shard.bf16, shard.tp)

    def _measured(self, shard: StageShard) -> StageShard:
        """Return the shard itself if its degree was measured, else the whole blocks."""
        return shard if self._has_degree(shard) else replace(shard, tp=1, sequence_parallel=False)

    def _all_reduces(self, shard: StageShard, tokens: int, ranks: Sequence[int]) -> float:
        """Seconds of a shard's collectives, two per block, that its measurement does not include.

        It includes those within a node; between nodes the difference is added.
        """
        nbytes = tokens * shard.model.hidden * shard.itemsize
        seconds = self.collective(CollectiveKind.ALL_REDUCE, nbytes, ranks)
        if self._has_degree(shard):
            if len({rank // self.node_size for rank in ranks}) == 1:
                return 0.0
            included = self.measured.collective(CollectiveKind.ALL_REDUCE, nbytes, range(shard.tp))
            seconds = max(0.0, seconds - included)
        return 2 * shard.n_blocks * seconds


def _ratio(numerator: float, denominator: float) -> float:
    """Return the ratio of two limits; 1 if a shard has no work."""
    return numerator / denominator if denominator else 1.0
