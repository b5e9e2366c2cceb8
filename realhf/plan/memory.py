"""Bytes on every device: what lies there between calls, and what a call takes on top while it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add

from realhf.api.config import GenerationConfig, OptimizerType
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.hardware import Workload
from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.model import ModelConfig
from realhf.api.plan import ExecutionPlan, Placement
from realhf.plan.cost import Rows, works_of
from realhf.plan.parts import kept_numel, kv_numel, parts_of, shard_numels
from realhf.plan.program import home
from realhf.plan.speed import Part

LOGITS_BYTES = {"cpu": 24 << 20}
"""Logits that the log-prob head holds at once (ops/logprobs.py); elsewhere a quarter of a gigabyte."""
ON_GPU = 256 << 20


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

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(*map(add, astuple(self), astuple(other)))

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class MemoryModel:
    """Counts bytes of one experiment. ``runtime`` is what a worker takes before it has any model."""

    graph: Graph
    models: Mapping[str, ModelConfig]
    roles: Mapping[str, RoleSpec]
    workload: Workload
    device: str
    runtime: float
    sampling: GenerationConfig | None = None

    def resident(self, role: str, strategy: ParallelStrategy) -> Bytes:
        """Return what a role's home keeps on each of its devices, at the heaviest stage."""
        spec = self.roles[role].spec
        numel = max(shard_numels(self.models[role], strategy.tp, strategy.pp))
        size = 2 if spec.bf16 else 4
        weights = 0.0 if role in self.graph.offloaded and self.device != "cpu" else numel * size
        if not self._learns(role):
            return Bytes(weights=weights)
        share = numel / strategy.dp
        # two moments; a float32 copy of short weights; this rank's part of the gradient where it is reduced
        state = share * (8 + (4 if spec.bf16 else 0) + (4 if strategy.dp > 1 else 0))
        return Bytes(weights=weights, gradients=4 * numel, optimizer=state)

    def transient(self, mfc: MFC, placement: Placement, ranks: Sequence[Rows], keeper: Layout | None) -> Bytes:
        """Return what a call takes on each of its devices; ``keeper`` is where its role's weights live."""
        if mfc.role is None:
            return Bytes()
        config, spec, strategy = self.models[mfc.role], self.roles[mfc.role].spec, placement.layout.strategy
        size = 2 if spec.bf16 else 4
        borrowed = 0.0
        if keeper != placement.layout:
            borrowed = max(shard_numels(config, strategy.tp, strategy.pp)) * size
        parts = parts_of(config, self.roles[mfc.role], strategy)
        match mfc.kind:
            case Kind.TRAIN:
                tokens = max(
                    self._largest(placement, r, n, 2 * strategy.pp if strategy.pp > 1 else 1)
                    for r in ranks
                    for n in range(mfc.n_minibatches)
                )
                kept = max(self._kept(mfc.role, part, strategy, stage) for stage, part in enumerate(parts))
                return Bytes(borrowed=borrowed, activations=kept * tokens * size, buffers=self._logits(config, tokens))
            case Kind.INFERENCE:
                tokens = max(self._largest(placement, r, None, strategy.pp) for r in ranks)
                work = self._working(config, strategy.tp) * tokens * size
                return Bytes(borrowed=borrowed, activations=work, buffers=self._logits(config, tokens))
            case Kind.GENERATE:
                return self._generation(placement, ranks, parts, borrowed, size)

    def devices(self, plan: ExecutionPlan, calls: Mapping[str, Sequence[Rows]]) -> dict[int, Bytes]:
        """Return the peak of every worker: a worker does one thing at a time, so its calls do not add up.

        ``calls`` holds the rows of every data-parallel rank of every MFC.
        """
        at_home = Bytes(runtime=self.runtime)
        residents = dict.fromkeys(range(plan.n_workers), at_home)
        for role in self.graph.roles:
            at = home(self.graph, plan, role)
            share = self.resident(role, at.strategy)
            residents |= {rank: residents[rank] + share for rank in at.mesh.ranks}
        peaks = dict.fromkeys(range(plan.n_workers), Bytes())
        for mfc in self.graph.mfcs:
            keeper = home(self.graph, plan, mfc.role) if mfc.role else None
            taken = self.transient(mfc, plan[mfc.name], calls[mfc.name], keeper)
            for rank in plan[mfc.name].layout.mesh.ranks:
                peaks[rank] = max(peaks[rank], taken, key=lambda some: some.total)
        return {rank: residents[rank] + peaks[rank] for rank in residents}

    def _learns(self, role: str) -> bool:
        return self.graph.trainer(role) is not None and (
            self.roles[role].spec.optimizer.type is not OptimizerType.empty
        )

    def _largest(self, placement: Placement, rows: Rows, minibatch: int | None, at_least: int) -> int:
        """Tokens of a rank's largest micro-batch."""
        ids, lengths = (rows.ids, rows.lengths) if minibatch is None else rows.of_minibatch(minibatch)
        if not ids:
            return 0
        limits = placement.micro_batching
        limits = replace(limits, n_mbs=max(limits.n_mbs, at_least))
        return max(work.tokens for work in works_of(ids, lengths, limits))

    def _kept(self, role: str, part: Part, strategy: ParallelStrategy, stage: int) -> float:
        """Elements per token that a stage keeps: of every micro-batch under way in 1F1B, plus a block's backward."""
        config, spec = self.models[role], self.roles[role].spec
        in_flight = strategy.pp - stage
        sequence = spec.sequence_parallel and strategy.tp > 1
        block = kept_numel(config, strategy.tp, sequence)
        outside = config.hidden * (2.0 * part.first + 3.0 * part.last)
        if spec.gradient_checkpointing:
            share = strategy.tp if sequence else 1
            return in_flight * (part.n_blocks * config.hidden / share + outside) + block
        return in_flight * (part.n_blocks * block + outside) + self._working(config, strategy.tp)

    def _working(self, config: ModelConfig, tp: int) -> float:
        """Elements per token that live at a time inside a block, nothing being kept."""
        wide = (2 if config.mlp == "gated" else 1) * (
            config.intermediate or config.expert_intermediate * config.experts_per_token
        )
        heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        return 3 * config.hidden + max(1.5 * wide, 2 * heads) / tp

    def _logits(self, config: ModelConfig, tokens: int) -> float:
        limit = LOGITS_BYTES.get(self.device, ON_GPU)
        return min(limit, 4.0 * tokens * config.vocab) if config.head == "lm" else 0.0

    def _generation(
        self, placement: Placement, ranks: Sequence[Rows], parts: Sequence[Part], borrowed: float, size: int
    ) -> Bytes:
        assert self.sampling is not None
        strategy, config = placement.layout.strategy, parts[0].model
        most = max(len(r.ids) for r in ranks) * self.workload.samples
        slots = min(placement.micro_batching.slots(self.sampling.max_slots), most)
        longest = max((n for r in ranks for n in r.lengths), default=0)
        prompts = min(max((sum(r.lengths) for r in ranks), default=0), placement.micro_batching.max_tokens_per_mb)
        cache = max(kv_numel(config, strategy.tp, part.n_blocks) for part in parts)
        work = self._working(config, strategy.tp) * max(prompts, slots)
        return Bytes(
            borrowed=borrowed,
            activations=work * size,
            kv_cache=float(cache * slots * (longest + self.sampling.max_new_tokens) * size),
            buffers=8.0 * slots * config.vocab,
        )
