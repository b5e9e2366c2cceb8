"""Bytes on every device: what lies there between calls, and what a call takes on top while it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from realhf.api.config import GenerationConfig, OptimizerType
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.machine import Workload
from realhf.api.model_config import ModelConfig
from realhf.plan.compile.program import home_layout
from realhf.plan.cost.cost import BatchRows, prompts_of, works_of
from realhf.plan.cost.speed import Footprint, StageShard, Work
from realhf.plan.cost.stage import decodes_in_one_call, kv_numel, shard_numels, stage_shards
from realhf.plan.cost.traffic import realloc_rings

SERVER_BYTES = 1e9
"""What a process of vLLM takes before it has weights and cache: measured on a CPU, about."""


@dataclass(frozen=True)
class Bytes:
    """A device's memory by purpose."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    borrowed: float = 0.0  # weights in the layout of one call
    activations: float = 0.0
    kv_cache: float = 0.0
    buffers: float = 0.0  # logits, collectives, rows
    runtime: float = 0.0
    server: float = 0.0  # a backend's own process

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(*map(add, vars(self).values(), vars(other).values()))

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryModel:
    """Counts bytes of one experiment. ``runtime`` is what a worker takes before it has any model.

    ``shares`` is as in ``CostModel``. ``server_cache`` is what a served call's process keeps keys and values in.
    """

    graph: Graph
    models: Mapping[str, ModelConfig]
    roles: Mapping[str, RoleSpec]
    workload: Workload
    footprint: Footprint
    runtime: float
    device: str
    sampling: GenerationConfig | None = None
    shares: bool = False
    node_size: int = 8
    server_cache: float = 0.0

    def weights(self, role: str, strategy: ParallelStrategy) -> float:
        """Return the bytes of a role's weights on each of its devices, at the heaviest stage."""
        numel = max(shard_numels(self.models[role], strategy.tp, strategy.pp))
        return float(numel * (2 if self.roles[role].spec.bf16 else 4))

    def rings(self, role: str, src: Layout, dst: Layout) -> float:
        """Return the bytes of shared memory that moving a role's weights leaves with workers that take part."""
        if self.device != "cpu" or src == dst:
            return 0.0
        itemsize = 2 if self.roles[role].spec.bf16 else 4
        return float(realloc_rings(self.models[role], src, dst, itemsize, self.node_size))

    def resident(self, role: str, strategy: ParallelStrategy) -> Bytes:
        """Return what a role's home keeps on each of its devices, at the heaviest stage (of one that rests: awake)."""
        bf16 = self.roles[role].spec.bf16
        numel, weights = max(shard_numels(self.models[role], strategy.tp, strategy.pp)), self.weights(role, strategy)
        if bf16 and any(sync.target == role for sync in self.graph.syncs):
            weights += 4 * numel  # the average lives in float32 beside its short copy
        if not self._learns(role):
            return Bytes(weights=weights)
        share = numel / strategy.dp
        state = share * (8 + (4 if bf16 else 0))  # two moments; a float32 copy of short weights
        return Bytes(weights=weights, gradients=4 * numel, optimizer=state)

    def transient(self, mfc: MFC, placement: Placement, ranks: Sequence[BatchRows], keeper: Layout | None) -> Bytes:
        """Return what a call takes on each of its devices; ``keeper`` is where its role's weights live."""
        if mfc.role is None:
            return Bytes()
        config, role, strategy = self.models[mfc.role], self.roles[mfc.role], placement.layout.strategy
        if placement.backend is Backend.vllm:  # its weights lie in memory that its process maps, wherever their home is
            return Bytes(borrowed=self.weights(mfc.role, strategy))
        borrowed = 0.0 if keeper == placement.layout else self.weights(mfc.role, strategy)
        parts = stage_shards(config, role, strategy)
        match mfc.kind:
            case Kind.TRAIN:
                least = 2 * strategy.pp if strategy.pp > 1 else 1
                works = [self._largest(mfc, placement, r, n, least) for r in ranks for n in range(mfc.n_minibatches)]
                work = max(works, key=lambda w: w.tokens)
                peaks = []
                for stage, part in enumerate(parts):  # 1F1B: stage s has begun pp - s micro-batches
                    kept, peak = self.footprint.train_bytes(part, work)
                    peaks.append((strategy.pp - stage - 1) * kept + peak)
                return Bytes(borrowed=borrowed, activations=max(peaks))
            case Kind.INFERENCE:
                least = strategy.pp
                work = max((self._largest(mfc, placement, r, None, least) for r in ranks), key=lambda w: w.tokens)
                return Bytes(borrowed=borrowed, activations=max(self.footprint.forward_bytes(p, work) for p in parts))
            case Kind.GENERATE:
                n = 1 if mfc.per_prompt else self.workload.samples
                taken = self._generation(placement, ranks, parts, n)
                if decodes_in_one_call(config, strategy, self.shares):  # which copies its matrices
                    taken += Bytes(buffers=self.weights(mfc.role, strategy))
                return replace(taken, borrowed=borrowed)

    def devices(self, plan: ExecutionPlan, calls: Mapping[str, Sequence[BatchRows]]) -> dict[int, Bytes]:
        """Return the peak of every worker: a worker does one thing at a time, so its calls do not add up.

        ``calls`` holds the rows of every data-parallel rank of every MFC.
        """
        homes = {role: home_layout(self.graph, plan, role) for role in self.graph.roles}
        at_home = {role: self.resident(role, at.strategy) for role, at in homes.items()}
        residents = dict.fromkeys(range(plan.n_workers), Bytes(runtime=self.runtime))
        for role, at in homes.items():
            if not self._rests(role):
                residents |= {rank: residents[rank] + at_home[role] for rank in at.mesh.ranks}
        peaks = dict.fromkeys(range(plan.n_workers), Bytes())
        for mfc in self.graph.mfcs:
            taken = self.transient(mfc, plan[mfc.name], calls[mfc.name], homes.get(mfc.role or ""))
            needed = dict.fromkeys(plan[mfc.name].layout.mesh.ranks, taken)
            if mfc.role and self._rests(mfc.role):
                awake = homes[mfc.role].mesh.ranks
                needed |= {rank: needed.get(rank, Bytes()) + at_home[mfc.role] for rank in awake}
            for rank, some in needed.items():
                peaks[rank] = max(peaks[rank], some, key=lambda bytes_: bytes_.total)
        rings, servers = self._rings(plan, homes), self._servers(plan)
        beside = {rank: Bytes(buffers=rings[rank], server=servers[rank]) for rank in residents}
        return {rank: residents[rank] + peaks[rank] + beside[rank] for rank in residents}

    def _servers(self, plan: ExecutionPlan) -> dict[int, float]:
        """Return what processes of backends keep beside every worker: weights of their own, a cache, libraries."""
        found = dict.fromkeys(range(plan.n_workers), 0.0)
        for mfc in self.graph.mfcs:
            placement = plan[mfc.name]
            if mfc.role is not None and placement.backend is Backend.vllm:
                taken = self.weights(mfc.role, placement.layout.strategy) + self.server_cache + SERVER_BYTES
                found |= {rank: found[rank] + taken for rank in placement.layout.mesh.ranks}
        return found

    def _rings(self, plan: ExecutionPlan, homes: Mapping[str, Layout]) -> dict[int, float]:
        """Return what the moves of a plan leave with every worker; the next one uses the same rings."""
        found = dict.fromkeys(range(plan.n_workers), 0.0)
        for mfc in self.graph.mfcs:
            if mfc.role is not None:
                src, dst = homes[mfc.role], plan[mfc.name].layout
                left = self.rings(mfc.role, src, dst)
                found |= {rank: max(found[rank], left) for rank in {*src.mesh.ranks, *dst.mesh.ranks}}
        return found

    def _rests(self, role: str) -> bool:
        """Tell whether a role's weights leave the device between calls; on CPU they rest where they are."""
        return role in self.graph.offloaded and self.device != "cpu"

    def _learns(self, role: str) -> bool:
        return self.graph.trainer(role) is not None and (self.roles[role].spec.optimizer.type is not OptimizerType.none)

    def _largest(self, mfc: MFC, placement: Placement, rows: BatchRows, minibatch: int | None, at_least: int) -> Work:
        """Return a rank's largest micro-batch."""
        assert mfc.role is not None
        ids, lengths = (rows.ids, rows.lengths) if minibatch is None else rows.of_minibatch(minibatch)
        limits = placement.micro_batching
        if limits.n_mbs < at_least:
            limits = replace(limits, n_mbs=at_least)
        shares = self.shares and not (mfc.kind is Kind.TRAIN and self.models[mfc.role].n_experts)
        works = works_of(ids, lengths, limits, prompts_of(self.workload, ids), shares, near=self.shares)
        return max(works, key=lambda work: work.tokens, default=Work.of(()))

    def _generation(
        self, placement: Placement, ranks: Sequence[BatchRows], parts: Sequence[StageShard], n: int
    ) -> Bytes:
        """Return what drawing ``n`` answers to every row takes."""
        assert self.sampling is not None
        config, size = parts[0].model, 2 if parts[0].bf16 else 4
        most = max(len(r.ids) for r in ranks) * n
        slots = min(placement.micro_batching.slots(self.sampling.max_num_seqs), most)
        longest = max((n for r in ranks for n in r.lengths), default=0) + self.sampling.max_new_tokens
        prompts = max((_prefill(r.lengths, placement.micro_batching.max_tokens_per_mb) for r in ranks),
                      key=lambda work: work.tokens)  # fmt: skip
        cache = max(kv_numel(config, part.tp, part.n_blocks) for part in parts)
        work = max(self.footprint.forward_bytes(replace(part, last=False), prompts) for part in parts)
        logits = 8.0 * slots * config.vocab  # once as they are, once while they are sampled from
        return Bytes(activations=work, kv_cache=float(cache * slots * longest * size), buffers=logits)


def _prefill(lengths: Sequence[int], limit: int) -> Work:
    """Return the prompts that are computed at a time."""
    taken: list[int] = []
    total = 0
    for length in lengths:
        if taken and total + length > limit:
            break
        taken.append(length)
        total += length
    return Work.of(taken)
