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
from realhf.plan.parts import kv_numel, parts_of, shard_numels
from realhf.plan.program import home
from realhf.plan.speed import Footprint, Part, Work


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
    footprint: Footprint
    runtime: float
    device: str
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
        config, role, strategy = self.models[mfc.role], self.roles[mfc.role], placement.layout.strategy
        borrowed = 0.0
        if keeper != placement.layout:
            borrowed = max(shard_numels(config, strategy.tp, strategy.pp)) * (2 if role.spec.bf16 else 4)
        parts = parts_of(config, role, strategy)
        match mfc.kind:
            case Kind.TRAIN:
                least = 2 * strategy.pp if strategy.pp > 1 else 1
                works = [_largest(placement, r, n, least) for r in ranks for n in range(mfc.n_minibatches)]
                work = max(works, key=lambda w: w.tokens)
                peaks = []
                for stage, part in enumerate(parts):  # 1F1B: stage s has begun pp - s micro-batches
                    kept, peak = self.footprint.train_bytes(part, work)
                    peaks.append((strategy.pp - stage - 1) * kept + peak)
                return Bytes(borrowed=borrowed, activations=max(peaks))
            case Kind.INFERENCE:
                work = max((_largest(placement, r, None, strategy.pp) for r in ranks), key=lambda w: w.tokens)
                return Bytes(borrowed=borrowed, activations=max(self.footprint.forward_bytes(p, work) for p in parts))
            case Kind.GENERATE:
                return replace(self._generation(placement, ranks, parts), borrowed=borrowed)

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

    def _generation(self, placement: Placement, ranks: Sequence[Rows], parts: Sequence[Part]) -> Bytes:
        assert self.sampling is not None
        config, size = parts[0].model, 2 if parts[0].bf16 else 4
        most = max(len(r.ids) for r in ranks) * self.workload.samples
        slots = min(placement.micro_batching.slots(self.sampling.max_slots), most)
        longest = max((n for r in ranks for n in r.lengths), default=0) + self.sampling.max_new_tokens
        prompts = max((_prefill(r.lengths, placement.micro_batching.max_tokens_per_mb) for r in ranks),
                      key=lambda work: work.tokens)  # fmt: skip
        cache = max(kv_numel(config, part.tp, part.n_blocks) for part in parts)
        work = max(self.footprint.forward_bytes(replace(part, last=False), prompts) for part in parts)
        logits = 8.0 * slots * config.vocab  # once as they are, once while they are sampled from
        return Bytes(activations=work, kv_cache=float(cache * slots * longest * size), buffers=logits)


def _largest(placement: Placement, rows: Rows, minibatch: int | None, at_least: int) -> Work:
    """Return a rank's largest micro-batch."""
    ids, lengths = (rows.ids, rows.lengths) if minibatch is None else rows.of_minibatch(minibatch)
    limits = placement.micro_batching
    limits = replace(limits, n_mbs=max(limits.n_mbs, at_least))
    return max(works_of(ids, lengths, limits), key=lambda work: work.tokens, default=Work.of(()))


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
