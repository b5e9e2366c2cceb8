"""Memory of every device: resident bytes of roles, and additional bytes of a running call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import ceil
from operator import add

from realhf.api.config import GenerationConfig, OptimizerType
from realhf.api.config.choices import Backend, WeightType
from realhf.api.execution_plan import ExecutionPlan, MemorySaving, Placement
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.machine import Workload
from realhf.api.model_config import ModelConfig
from realhf.arch.hot_adapters import merge_reason, padded_rank
from realhf.arch.quantization import largest_product_nbytes
from realhf.plan.compile.pipeline import Backward, Forward, train_schedule
from realhf.plan.compile.program import home_layout
from realhf.plan.cost.cost import BatchRows, Rows, mfc_works
from realhf.plan.cost.speed import (
    Footprint,
    StageShard,
    Work,
    base_bytes,
    chunk_shards,
    itemsize,
    model_itemsize,
    optimizer_bytes,
    shard_numels,
    stage_shards,
    updated_numels,
)
from realhf.plan.cost.traffic import realloc_ring_bytes
from realhf.plan.cost.zero import PerLayer, layer_numels

OPTIMIZER_CHUNK_NUMEL = 1 << 24  # of two chunks of offloaded state (models/engine/optimizer_offload.py)
SERVER_BYTES = 1e9  # a vLLM process without weights and cache, measured on a CPU


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

    ``share_prompts`` is as in ``CostModel``; ``server_cache`` is the key/value cache of a vLLM process in bytes. With
    ``server_sleeps`` the process has weights and cache during calls only. ``max_episodes`` is the number of episodes of
    multi-turn rollouts whose cache is kept between turns; ``merge_lora`` is vLLM's option.
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
    server_sleeps: bool = False
    max_episodes: int = 0
    merge_lora: bool = False

    def weights(self, role: str, strategy: ParallelStrategy) -> float:
        """Return the bytes of the parameters that a role owns per device at the largest stage."""
        return self._stored_numel(role, strategy) * itemsize(self.roles[role])

    def _stored_numel(self, role: str, strategy: ParallelStrategy) -> float:
        """Return the number of parameters that a role owns per device at the largest stage."""
        numel = max(shard_numels(self.models[role], strategy))
        return numel / strategy.dp if strategy.zero3 else numel

    def base(self, role: str, strategy: ParallelStrategy) -> float:
        """Return the bytes of the frozen weights below a role's adapters per device at the largest stage."""
        size = model_itemsize(self.roles[role])
        return float(max(base_bytes(self.models[role], strategy, size)))

    def model(self, role: str, strategy: ParallelStrategy) -> float:
        """Return the bytes of a role's whole model per device at the largest stage."""
        config = replace(self.models[role], lora=None)
        numel = max(shard_numels(config, strategy))
        return float(numel * model_itemsize(self.roles[role]))

    def _packed(self, role: str, strategy: ParallelStrategy) -> float:
        """Return the bytes of the copy of a role's model for decoding per device at the largest stage."""
        assert self.sampling is not None
        size = {WeightType.bfloat16: 2, WeightType.int8: 1}.get(self.sampling.weight_dtype)
        whole, config = self.model(role, strategy), self.models[role]
        if size is None:
            return whole
        head = (
            config.vocab * config.hidden * model_itemsize(self.roles[role]) / strategy.weight_tp
        )  # has the model's type
        return head + max(0.0, whole - head) * size / model_itemsize(self.roles[role])

    def ring_bytes(self, role: str, src: Layout, dst: Layout) -> float:
        """Return the shared memory that stays mapped per worker after moving a role's weights."""
        if self.device != "cpu" or src == dst:
            return 0.0
        return float(realloc_ring_bytes(self.models[role], src, dst, itemsize(self.roles[role]), self.node_size))

    def resident(
        self, role: str, strategy: ParallelStrategy, with_base: bool = True, saving: MemorySaving | None = None
    ) -> Bytes:
        """Return the resident bytes of a role per device of the largest stage (of an offloaded role: while loaded).

        A base of adapters that other roles have in memory counts again. ``saving`` is that of the training call.
        """
        bf16 = self.roles[role].spec.bf16
        config = self.models[role]
        numel = max(shard_numels(config, strategy))
        updated, weights = max(updated_numels(config, strategy)), self.weights(role, strategy)
        weights += self.base(role, strategy) if with_base else 0.0
        if bf16 and any(sync.target == role for sync in self.graph.syncs):
            weights += 4 * self._stored_numel(role, strategy)  # a float32 master of the moving average
        if self.graph.trainer(role) is None or self.roles[role].spec.optimizer.type is OptimizerType.none:
            return Bytes(weights=weights)
        state = updated * optimizer_bytes(self.roles[role])
        if self.roles[role].with_choices(saving).spec.optimizer.offload:
            state = 0.0
        has_share = self.roles[role].zero_stage(strategy) > 1
        return Bytes(weights=weights, gradients=4 * numel / (strategy.dp if has_share else 1), optimizer=state)

    def transient(
        self, mfc: MFC, placement: Placement, ranks: Sequence[BatchRows], home_layout: Layout | None
    ) -> Bytes:
        """Return the additional bytes of a running call per device; ``home_layout`` is that of its role's weights."""
        if mfc.role is None:
            return Bytes()
        config, strategy = self.models[mfc.role], placement.layout.strategy
        role = self.roles[mfc.role].with_choices(placement.saving)
        borrowed = 0.0 if home_layout == placement.layout else self.weights(mfc.role, strategy)
        if placement.backend is Backend.vllm:
            if config.lora is not None:
                borrowed += 0.0 if self._serves_adapters(mfc.role) else self.model(mfc.role, strategy)
            elif self.device == "cpu":  # the weights are in shared memory
                borrowed = self.model(mfc.role, strategy)
            return Bytes(borrowed=borrowed, server=self._server_contents(mfc.role, strategy, self.server_sleeps))
        shards = stage_shards(config, role, strategy)
        buffers = largest_product_nbytes(config, strategy.weight_tp, shards[0].itemsize) + self._layers(mfc, strategy)
        common = Bytes(borrowed=borrowed, buffers=buffers)
        match mfc.kind:
            case Kind.TRAIN:
                rows = [r.of_minibatch(n) for r in ranks for n in range(mfc.n_minibatches)]
                work = self._largest(mfc, placement, rows)
                chunks = chunk_shards(config, role, strategy)
                activations = max(pipelined_bytes(self.footprint, chunks, work, strategy.vpp))
                return common + Bytes(activations=activations, optimizer=self._chunks(mfc.role, role, strategy))
            case Kind.INFERENCE:
                work = self._largest(mfc, placement, [(r.ids, r.lengths) for r in ranks])
                return common + Bytes(activations=max(self.footprint.forward_bytes(p, work) for p in shards))
            case Kind.GENERATE:
                n = 1 if mfc.per_prompt else self.workload.samples
                needed = self._generation(placement, ranks, shards, n)
                if self.share_prompts and shards[0].packs_weights:  # it keeps packed copies of the weights
                    needed += Bytes(buffers=self._packed(mfc.role, strategy))
                return common + needed

    def _layers(self, mfc: MFC, strategy: ParallelStrategy) -> float:
        """Return the bytes of the layers that a pass has in memory with ZeRO-2 or ZeRO-3, at the largest stage."""
        assert mfc.role is not None
        role, stages = self.roles[mfc.role], layer_numels(self.models[mfc.role], strategy)
        return max(sharded_layer_bytes(layers, itemsize(role), role.zero_stage(strategy), mfc.is_train)
                   for layers in stages)  # fmt: skip

    def devices(self, plan: ExecutionPlan, calls: Mapping[str, Sequence[BatchRows]]) -> dict[int, Bytes]:
        """Return the peak of every worker, in its largest call; ``calls`` are the rows of each replica by MFC."""
        homes = {role: home_layout(self.graph, plan, role) for role in self.graph.roles}
        savings = {role: plan[mfc.name].saving for role in homes if (mfc := self.graph.trainer(role))}
        resident = {role: self.resident(role, layout.strategy, False, savings.get(role))
                    for role, layout in homes.items()}  # fmt: skip
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
        others, bases = self._shared_memory_and_servers(plan, homes), self._bases(plan)
        return {rank: totals[rank] + peaks[rank] + others[rank] + bases[rank] for rank in totals}

    def _bases(self, plan: ExecutionPlan) -> dict[int, Bytes]:
        """Return the bytes of frozen weights per worker: one copy for all roles that read the same shard."""
        found: dict[int, dict[tuple, float]] = {rank: {} for rank in range(plan.n_workers)}
        for mfc in self.graph.mfcs:
            if mfc.role is None or (lora := self.models[mfc.role].lora) is None:
                continue
            spec, layout = self.roles[mfc.role].spec, plan[mfc.name].layout
            cuts = layout.strategy.cuts, layout.strategy.pp, layout.strategy.vpp
            key = spec.path, spec.config, lora.bits, lora.group_size, cuts
            for rank in layout.mesh.ranks:
                found[rank][key] = max(found[rank].get(key, 0.0), self.base(mfc.role, layout.strategy))
        return {rank: Bytes(weights=sum(bases.values())) for rank, bases in found.items()}

    def _shared_memory_and_servers(self, plan: ExecutionPlan, homes: Mapping[str, Layout]) -> dict[int, Bytes]:
        """Return the bytes of rings (all moves use the same ones) and of vLLM processes per worker."""
        rings, servers = (dict.fromkeys(range(plan.n_workers), 0.0) for _ in range(2))
        for mfc in self.graph.mfcs:
            if mfc.role is None:
                continue
            home_layout, layout = homes[mfc.role], plan[mfc.name].layout
            nbytes = self.ring_bytes(mfc.role, home_layout, layout)
            rings |= {rank: max(rings[rank], nbytes) for rank in {*home_layout.mesh.ranks, *layout.mesh.ranks}}
            if plan[mfc.name].backend is Backend.vllm:
                nbytes = SERVER_BYTES + self._server_contents(mfc.role, layout.strategy, not self.server_sleeps)
                servers |= {rank: servers[rank] + nbytes for rank in layout.mesh.ranks}
        return {rank: Bytes(buffers=rings[rank], server=servers[rank]) for rank in rings}

    def _server_contents(self, role: str, strategy: ParallelStrategy, allocated: bool) -> float:
        """Return the bytes of weights and cache of a vLLM process at a time at which it has ``allocated`` them."""
        if not allocated:
            return 0.0
        adapters, lora = 0.0, self.models[role].lora
        if lora is not None and self._serves_adapters(role):  # with zeros up to vLLM's rank, and as they were loaded
            numel = max(shard_numels(self.models[role], strategy))
            adapters = numel * (padded_rank(lora.rank) / lora.rank + 1) * model_itemsize(self.roles[role])
        return self.model(role, strategy) + adapters + self.server_cache

    def _serves_adapters(self, role: str) -> bool:
        """Return True if vLLM has the role's adapters beside the base, False if it gets merged weights."""
        return merge_reason(self.models[role], self.merge_lora) is None

    def _is_offloaded(self, role: str) -> bool:
        return role in self.graph.offloaded and self.device != "cpu"

    def _chunks(self, name: str, role: RoleSpec, strategy: ParallelStrategy) -> float:
        """Return the bytes of optimizer state that pass through a device at a time."""
        if not role.spec.optimizer.offload:
            return 0.0
        numel = max(updated_numels(self.models[name], strategy))
        chunk = min(numel, OPTIMIZER_CHUNK_NUMEL)
        return min(2, ceil(numel / chunk)) * chunk * optimizer_bytes(role)

    def _largest(self, mfc: MFC, placement: Placement, parts: Sequence[Rows]) -> Work:
        assert mfc.role is not None
        config = self.models[mfc.role]
        works = (mfc_works(mfc, config, placement, rows, self.workload, self.share_prompts) for rows in parts)
        return max(chain.from_iterable(works), key=lambda work: work.tokens, default=Work.of(()))

    def _generation(
        self, placement: Placement, ranks: Sequence[BatchRows], shards: Sequence[StageShard], n: int
    ) -> Bytes:
        assert self.sampling is not None
        config, size = shards[0].model, shards[0].itemsize
        max_rows = max(len(r.ids) for r in ranks) * n
        slots = min(placement.micro_batching.limit_num_seqs(self.sampling.max_num_seqs), max_rows)
        longest = max((n for r in ranks for n in r.lengths), default=0) + self.sampling.max_new_tokens
        prompts = max((_first_prefill(r.lengths, placement.micro_batching.max_tokens_per_mb) for r in ranks),
                      key=lambda work: work.tokens)  # fmt: skip
        size = 2 if self.sampling.has_bf16_cache else size
        cache = max(shard.kv_numel * longest * size + shard.slot_bytes for shard in shards)
        n_cached = slots + min(self.max_episodes, max_rows)
        work = max(self.footprint.forward_bytes(replace(shard, last=False), prompts) for shard in shards)
        logits = 8.0 * slots * config.vocab  # logits and the sampler's copy
        return Bytes(activations=work, kv_cache=float(cache * n_cached), buffers=logits)


def pipelined_bytes(footprint: Footprint, chunks: Sequence[StageShard], work: Work, n_chunks: int = 1) -> list[float]:
    """Return the peak of activations per stage, which has ``n_chunks`` of the ``chunks`` of layers of the model.

    With one chunk, stage ``s`` has ``pp - s`` micro-batches in flight (1F1B).
    """
    n_stages, peaks = len(chunks) // n_chunks, list[float]()
    sizes = [footprint.train_bytes(chunk, work) for chunk in chunks]
    for stage in range(n_stages):
        in_flight = most = 0.0
        for step in train_schedule(stage, n_stages, 2 * n_stages, n_chunks):  # more micro-batches need no more
            kept, peak = sizes[step.chunk * n_stages + stage]
            if isinstance(step, Forward):
                most = max(most, in_flight + peak)
                in_flight += kept
            elif isinstance(step, Backward):
                in_flight -= kept
                most = max(most, in_flight + peak)
        peaks.append(most)
    return peaks


def sharded_layer_bytes(layers: PerLayer, itemsize: int, zero_stage: int, trains: bool) -> float:
    """Return the bytes of a stage's layers that a pass has in memory with ZeRO-2 or ZeRO-3 (models/zero).

    Weights: one layer and the message with the next one. Gradients: of one layer, and what is being reduced.
    """
    gathered = itemsize * (layers.largest + layers.block) if zero_stage == 3 else 0.0
    reduced = 2 * 4 * layers.largest if zero_stage > 1 and trains else 0.0
    return gathered + reduced


def _first_prefill(lengths: tuple[int, ...], limit: int) -> Work:
    n_fitting = sum(total <= limit for total in accumulate(lengths))
    return Work.of(lengths[: max(1, n_fitting)])
