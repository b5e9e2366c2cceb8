"""Memory of every device: resident bytes of roles, and additional bytes of a running call."""

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
from realhf.plan.compile.program import home
from realhf.plan.cost.cost import BatchRows, prompts_of, works_of
from realhf.plan.cost.speed import Footprint, StageShard, Work
from realhf.plan.cost.stage import decodes_in_one_call, kv_numel, shard_numels, stage_shards
from realhf.plan.cost.traffic import realloc_ring_bytes

SERVER_BYTES = 1e9
"""A vLLM process without weights and cache, measured on a CPU."""


@dataclass(frozen=True)
class Bytes:
    """A device's memory by purpose."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    borrowed: float = 0.0  # weights in the layout of one call, other than their home
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
    """Memory of one experiment's plans. ``runtime`` is the bytes of a worker without any model.

    ``share_prompts`` is as in ``CostModel``; ``server_cache`` is the key/value cache of a vLLM process in bytes.
    """

    graph: Graph
    models: Mapping[str, ModelConfig]
    roles: Mapping[str, RoleSpec]
    workload: Workload
    footprint: Footprint
    runtime: float
    device: str
    sampling: GenerationConfig | None = None
    share_prompts: bool = False
    node_size: int = 8
    server_cache: float = 0.0

    def weights(self, role: str, strategy: ParallelStrategy) -> float:
        """Return the bytes of a role's weights per device at the largest stage."""
        numel = max(shard_numels(self.models[role], strategy.tp, strategy.pp))
        return float(numel * (2 if self.roles[role].spec.bf16 else 4))

    def ring_bytes(self, role: str, src: Layout, dst: Layout) -> float:
        """Return the shared memory that stays mapped per worker after moving a role's weights."""
        if self.device != "cpu" or src == dst:
            return 0.0
        itemsize = 2 if self.roles[role].spec.bf16 else 4
        return float(realloc_ring_bytes(self.models[role], src, dst, itemsize, self.node_size))

    def resident(self, role: str, strategy: ParallelStrategy) -> Bytes:
        """Return the bytes of a role at home, per device at the largest stage (of an offloaded role: while loaded)."""
        bf16 = self.roles[role].spec.bf16
        numel, weights = max(shard_numels(self.models[role], strategy.tp, strategy.pp)), self.weights(role, strategy)
        if bf16 and any(sync.target == role for sync in self.graph.syncs):
            weights += 4 * numel  # a float32 master of the moving average
        if not self._is_trained(role):
            return Bytes(weights=weights)
        share = numel / strategy.dp
        state = share * (8 + (4 if bf16 else 0))  # two moments; float32 master weights
        return Bytes(weights=weights, gradients=4 * numel, optimizer=state)

    def transient(
        self, mfc: MFC, placement: Placement, ranks: Sequence[BatchRows], home_layout: Layout | None
    ) -> Bytes:
        """Return the additional bytes of a running call per device; ``home_layout`` is that of its role's weights."""
        if mfc.role is None:
            return Bytes()
        config, role, strategy = self.models[mfc.role], self.roles[mfc.role], placement.layout.strategy
        if placement.backend is Backend.vllm:  # its weights are always copied to shared memory
            return Bytes(borrowed=self.weights(mfc.role, strategy))
        borrowed = 0.0 if home_layout == placement.layout else self.weights(mfc.role, strategy)
        shards = stage_shards(config, role, strategy)
        match mfc.kind:
            case Kind.TRAIN:
                min_mbs = 2 * strategy.pp if strategy.pp > 1 else 1
                works = [self._largest(mfc, placement, r, n, min_mbs) for r in ranks for n in range(mfc.n_minibatches)]
                work = max(works, key=lambda w: w.tokens)
                peaks = []
                for stage, shard in enumerate(shards):  # 1F1B: stage s has pp - s micro-batches in flight
                    kept, peak = self.footprint.train_bytes(shard, work)
                    peaks.append((strategy.pp - stage - 1) * kept + peak)
                return Bytes(borrowed=borrowed, activations=max(peaks))
            case Kind.INFERENCE:
                works = [self._largest(mfc, placement, r, None, strategy.pp) for r in ranks]
                work = max(works, key=lambda w: w.tokens)
                return Bytes(borrowed=borrowed, activations=max(self.footprint.forward_bytes(p, work) for p in shards))
            case Kind.GENERATE:
                n = 1 if mfc.per_prompt else self.workload.samples
                needed = self._generation(placement, ranks, shards, n)
                if decodes_in_one_call(config, strategy, self.share_prompts):  # it keeps packed copies of the weights
                    needed += Bytes(buffers=self.weights(mfc.role, strategy))
                return replace(needed, borrowed=borrowed)

    def devices(self, plan: ExecutionPlan, calls: Mapping[str, Sequence[BatchRows]]) -> dict[int, Bytes]:
        """Return the peak of every worker. Its calls run one at a time, so the largest one counts.

        ``calls`` holds the rows of every data-parallel rank of every MFC.
        """
        homes = {role: home(self.graph, plan, role) for role in self.graph.roles}
        resident = {role: self.resident(role, layout.strategy) for role, layout in homes.items()}
        totals = dict.fromkeys(range(plan.n_workers), Bytes(runtime=self.runtime))
        for role, layout in homes.items():
            if not self._is_offloaded(role):
                totals |= {rank: totals[rank] + resident[role] for rank in layout.mesh.ranks}
        peaks = dict.fromkeys(range(plan.n_workers), Bytes())
        for mfc in self.graph.mfcs:
            transient = self.transient(mfc, plan[mfc.name], calls[mfc.name], homes.get(mfc.role or ""))
            needed = dict.fromkeys(plan[mfc.name].layout.mesh.ranks, transient)
            if mfc.role and self._is_offloaded(mfc.role):  # it is loaded for the call
                at_home = homes[mfc.role].mesh.ranks
                needed |= {rank: needed.get(rank, Bytes()) + resident[mfc.role] for rank in at_home}
            for rank, nbytes in needed.items():
                peaks[rank] = max(peaks[rank], nbytes, key=lambda bytes_: bytes_.total)
        rings, servers = self._rings(plan, homes), self._servers(plan)
        others = {rank: Bytes(buffers=rings[rank], server=servers[rank]) for rank in totals}
        return {rank: totals[rank] + peaks[rank] + others[rank] for rank in totals}

    def _servers(self, plan: ExecutionPlan) -> dict[int, float]:
        """Return the bytes of vLLM processes per worker: weights, cache and libraries."""
        totals = dict.fromkeys(range(plan.n_workers), 0.0)
        for mfc in self.graph.mfcs:
            placement = plan[mfc.name]
            if mfc.role is not None and placement.backend is Backend.vllm:
                nbytes = self.weights(mfc.role, placement.layout.strategy) + self.server_cache + SERVER_BYTES
                totals |= {rank: totals[rank] + nbytes for rank in placement.layout.mesh.ranks}
        return totals

    def _rings(self, plan: ExecutionPlan, homes: Mapping[str, Layout]) -> dict[int, float]:
        """Return the ring bytes of every worker: the largest of its moves, since all moves use the same rings."""
        largest = dict.fromkeys(range(plan.n_workers), 0.0)
        for mfc in self.graph.mfcs:
            if mfc.role is not None:
                src, dst = homes[mfc.role], plan[mfc.name].layout
                nbytes = self.ring_bytes(mfc.role, src, dst)
                largest |= {rank: max(largest[rank], nbytes) for rank in {*src.mesh.ranks, *dst.mesh.ranks}}
        return largest

    def _is_offloaded(self, role: str) -> bool:
        return role in self.graph.offloaded and self.device != "cpu"

    def _is_trained(self, role: str) -> bool:
        return self.graph.trainer(role) is not None and (self.roles[role].spec.optimizer.type is not OptimizerType.none)

    def _largest(self, mfc: MFC, placement: Placement, rows: BatchRows, minibatch: int | None, min_mbs: int) -> Work:
        """Return a rank's largest micro-batch, of at least ``min_mbs``."""
        assert mfc.role is not None
        ids, lengths = (rows.ids, rows.lengths) if minibatch is None else rows.of_minibatch(minibatch)
        limits = placement.micro_batching
        if limits.n_mbs < min_mbs:
            limits = replace(limits, n_mbs=min_mbs)
        share = self.share_prompts and not (mfc.kind is Kind.TRAIN and self.models[mfc.role].n_experts)
        works = works_of(ids, lengths, limits, prompts_of(self.workload, ids), share, keep_groups=self.share_prompts)
        return max(works, key=lambda work: work.tokens, default=Work.of(()))

    def _generation(
        self, placement: Placement, ranks: Sequence[BatchRows], shards: Sequence[StageShard], n: int
    ) -> Bytes:
        """Return the bytes of sampling ``n`` responses per row."""
        assert self.sampling is not None
        config, size = shards[0].model, 2 if shards[0].bf16 else 4
        max_rows = max(len(r.ids) for r in ranks) * n
        slots = min(placement.micro_batching.slots(self.sampling.max_num_seqs), max_rows)
        longest = max((n for r in ranks for n in r.lengths), default=0) + self.sampling.max_new_tokens
        prompts = max((_prefill(r.lengths, placement.micro_batching.max_tokens_per_mb) for r in ranks),
                      key=lambda work: work.tokens)  # fmt: skip
        cache = max(kv_numel(config, shard.tp, shard.n_blocks) for shard in shards)
        work = max(self.footprint.forward_bytes(replace(shard, last=False), prompts) for shard in shards)
        logits = 8.0 * slots * config.vocab  # logits and the sampler's copy
        return Bytes(activations=work, kv_cache=float(cache * slots * longest * size), buffers=logits)


def _prefill(lengths: Sequence[int], limit: int) -> Work:
    """Return the first prefill micro-batch."""
    taken: list[int] = []
    total = 0
    for length in lengths:
        if taken and total + length > limit:
            break
        taken.append(length)
        total += length
    return Work.of(taken)
