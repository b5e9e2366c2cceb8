"""Cost of every instruction of a program: amounts of work times the speed of a machine."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

from realhf.api.batch_meta import RowId
from realhf.api.config import GenerationConfig
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import Coord, Layout
from realhf.api.machine import Cost, EnvironmentLoad, RewardLoad, Workload
from realhf.api.messages import PrepareCall
from realhf.api.model_config import ModelConfig
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.plan.compile.micro_batch import micro_batches
from realhf.plan.compile.pipeline import inference_schedule, train_schedule
from realhf.plan.cost.decode_time import CacheReads, DecodeTimer, decode_schedule
from realhf.plan.cost.environment import rollout_seconds
from realhf.plan.cost.judges import judging_cost
from realhf.plan.cost.overlap import overlaps_grad_reduce, reduction_seconds
from realhf.plan.cost.pipeline_time import makespan, uniform_makespan
from realhf.plan.cost.speed import (
    CollectiveKind,
    Speed,
    Stages,
    StageShard,
    Traffic,
    Work,
    chunk_shards,
    expert_numels,
    itemsize,
    optimizer_bytes,
    shard_numels,
    slowest_of,
    stage_shards,
    updated_numels,
)
from realhf.plan.cost.token_exchange import with_exchanges
from realhf.plan.cost.traffic import realloc_traffic, transfer_traffic
from realhf.plan.cost.zero import NO_LAYERS, LayerCollectives, layer_numels

NO_COST = Cost(0.0, 0.0)
VERIFIER = "verifier"  # the interface that judges responses
METHODS = {Kind.GENERATE: "generate", Kind.INFERENCE: "inference", Kind.TRAIN: "train_step"}
Rows = tuple[tuple[RowId, ...], tuple[int, ...]]  # ids and lengths


@dataclass(frozen=True)
class BatchRows:
    """Rows of one data-parallel rank in a call: ids, lengths and mini-batch numbers."""

    ids: tuple[RowId, ...]
    lengths: tuple[int, ...]
    minibatches: tuple[int, ...]

    def of_minibatch(self, number: int) -> Rows:
        return self._by_minibatch.get(number, ((), ()))

    @cached_property
    def _by_minibatch(self) -> dict[int, Rows]:
        rows: dict[int, list[int]] = {}
        for i, number in enumerate(self.minibatches):
            rows.setdefault(number, []).append(i)
        return {n: (tuple(self.ids[i] for i in own), tuple(self.lengths[i] for i in own)) for n, own in rows.items()}


@dataclass(frozen=True)
class CostModel:
    """Costs of the instructions of one experiment on one machine. ``models`` and ``roles`` are by role.

    ``share_prompts``: engines compute a prompt once for all its rows in a micro-batch (``models/engine/packing.py``).
    ``pads_cache``: a decoding step reads as much cache for every row as for the longest, unless the kernel is fused (on
    CPUs; kernels of GPUs read each row's own, ``ops/varlen.py``). ``rollouts_at_once``: rows of so many steps decode
    together, in systems that start rollouts of further steps before the last rows of one end (1: this project).
    """

    graph: Graph
    models: Mapping[str, ModelConfig]
    roles: Mapping[str, RoleSpec]
    speed: Speed
    workload: Workload
    node_size: int
    sampling: GenerationConfig | None = None
    share_prompts: bool = False
    environment: EnvironmentLoad | None = None
    pads_cache: bool = False
    rewards: RewardLoad | None = None
    rollouts_at_once: int = 1
    _known: dict[Hashable, Cost] = field(default_factory=dict, init=False, repr=False, compare=False)

    def price(self, plan: ExecutionPlan) -> Callable[[PrepareCall, Instruction], Cost]:
        """Return the cost function of a plan's instructions, for the simulator."""

        def price(call: PrepareCall, step: Instruction) -> Cost:
            match step:
                case Transfer(keys, layout):
                    return self.exchange(transfer_traffic(call, (*keys, *call.forwarded), layout, self.node_size))
                case Compute(mfc):
                    return self.known(self.graph[mfc], plan[mfc], rows_of(call))
                case Reallocate(role, src, _, dst, eta):
                    return self.reallocate(role, src, dst, eta)
                case Load(role, layout) | Offload(role, layout):
                    return self.host_copy(role, layout)
                case Release():
                    return NO_COST

        return price

    def known(self, mfc: MFC, placement: Placement, ranks: tuple[BatchRows, ...]) -> Cost:
        """Return ``compute``, once per argument: the plans of a search share most calls."""
        key = mfc.name, placement, ranks
        if key not in self._known:
            self._known[key] = self.compute(mfc, placement, ranks)
        return self._known[key]

    def compute(self, mfc: MFC, placement: Placement, ranks: Sequence[BatchRows]) -> Cost:
        """Return the cost of an MFC's computation on the rows of every data-parallel rank."""
        if self.rewards is not None and mfc.interface.name == VERIFIER:
            return _concurrent([judging_cost(self.rewards, len(r.ids)) for r in ranks])
        method = f"{mfc.interface.name}/{METHODS[mfc.kind]}"
        interface = [self.speed.interface(method, len(r.ids), sum(r.lengths)) for r in ranks]
        if mfc.role is None:
            return Cost(max(interface), sum(interface))
        layout = placement.layout
        copies = layout.strategy.tp * layout.strategy.pp
        own = Cost(max(interface), sum(interface) * copies)  # every rank of a replica runs the interface

        def passes(replicas: Sequence[Rows]) -> Cost:
            cost = _concurrent([self._passes(mfc, placement, d, rows) for d, rows in enumerate(replicas)])
            update = self._update(mfc, placement, replicas) if mfc.is_train else 0.0
            return Cost(cost.seconds + update, cost.core_seconds + update * layout.strategy.world)

        match mfc.kind:
            case Kind.TRAIN:
                costs = [passes([r.of_minibatch(n) for r in ranks]) for n in range(mfc.n_minibatches)]
            case Kind.INFERENCE:
                costs = [passes([(r.ids, r.lengths) for r in ranks])]
            case Kind.GENERATE:
                costs = [_concurrent([self._generate(mfc, placement, d, r) for d, r in enumerate(ranks)])]
                if placement.backend is not Backend.native:  # weights are pushed; its speed is assumed equal
                    costs.append(self.host_copy(mfc.role, layout))
        # a call ends with its slowest worker; collectives of tensor parallelism were measured with their waiting
        n_alone = layout.strategy.world // layout.strategy.tp
        seconds = slowest_of(n_alone, self.speed.jitter) * (own.seconds + sum(c.seconds for c in costs))
        return Cost(seconds, own.core_seconds + sum(c.core_seconds for c in costs))

    def exchange(self, traffic: Traffic) -> Cost:
        seconds = self.speed.exchange(traffic) if traffic.n_parts else 0.0
        return Cost(seconds, seconds * traffic.total / max(traffic.copied, 1))

    def reallocate(self, role: str, src: Layout, dst: Layout, eta: float = 1.0) -> Cost:
        """Return the cost of moving a role's weights; an EMA update (eta < 1) also reads and writes its target."""
        traffic = realloc_traffic(self.models[role], src, dst, itemsize(self.roles[role]), self.node_size)
        if eta < 1.0:
            extra = 2 * max(traffic.node + traffic.cluster, traffic.local)
            traffic = replace(traffic, copied=traffic.copied + extra, total=traffic.total + extra * dst.strategy.world)
        return self.exchange(traffic)

    def host_copy(self, role: str, layout: Layout) -> Cost:
        strategy = layout.strategy
        numel = max(shard_numels(self.models[role], strategy))
        seconds = self.speed.host_copy(numel * itemsize(self.roles[role]))
        return Cost(seconds, seconds * strategy.world)

    def _role(self, mfc: MFC, placement: Placement) -> RoleSpec:
        assert mfc.role is not None
        return self.roles[mfc.role].with_choices(placement.saving)

    def _stages(self, mfc: MFC, placement: Placement, dp: int) -> Stages:
        assert mfc.role is not None
        layout = placement.layout
        shards = stage_shards(self.models[mfc.role], self._role(mfc, placement), layout.strategy)
        return [(s, tuple(layout.rank(Coord(p, dp, t)) for t in range(s.tp))) for p, s in enumerate(shards)]

    def _chunks(self, mfc: MFC, placement: Placement, dp: int) -> Stages:
        """Return the shard and the tensor-parallel group of each chunk of layers; a stage may have several."""
        assert mfc.role is not None
        layout = placement.layout
        groups = [ranks for _, ranks in self._stages(mfc, placement, dp)]
        shards = chunk_shards(self.models[mfc.role], self._role(mfc, placement), layout.strategy)
        return [*zip(shards, groups * layout.strategy.vpp, strict=True)]

    def _send(self, stages: Stages, tokens: int, stage: int, sp: int = 1) -> float:
        """Seconds to send activations to the next stage (from the last: to the previous); ``sp``: sequence parallel."""
        shard, ranks = stages[stage]
        other = stages[stage + 1][1] if stage + 1 < len(stages) else stages[stage - 1][1]
        return self.speed.send(tokens * shard.model.hidden * shard.itemsize / sp, ranks[0], other[0])

    def _passes(self, mfc: MFC, placement: Placement, dp: int, rows: Rows) -> Cost:
        """A pipeline of the micro-batches of a replica's rows: forward and, in training, backward passes."""
        if not rows[0]:
            return NO_COST
        assert mfc.role is not None
        trains, strategy, stages = mfc.is_train, placement.layout.strategy, self._chunks(mfc, placement, dp)
        tp, pp, vpp = strategy.tp, strategy.pp, strategy.vpp
        works = mfc_works(mfc, self.models[mfc.role], placement, rows, self.workload, self.share_prompts)
        schedule = train_schedule if trains else inference_schedule
        seconds_of = self.speed.train if trains else lambda *args: (self.speed.forward(*args), 0.0)
        sp = tp if trains and self.roles[mfc.role].spec.sequence_parallel else 1
        n, counts = len(stages), Counter(works)
        times = {work: [seconds_of(shard, work, ranks) for shard, ranks in stages] for work in counts}
        busy = sum(count * (f + b) for work, count in counts.items() for f, b in times[work])
        if strategy.expert_dp > 1 or strategy.context:
            times = {work: [with_exchanges(self.speed, placement.layout, work, *stage, seconds) for stage, seconds in
                     zip(stages, of_stages, strict=True)] for work, of_stages in times.items()}  # fmt: skip
        if (layers := self._layer_collectives(mfc, placement.layout, stages)) is not None:
            shards = [shard for shard, _ in stages]
            busy += len(works) * sum(c.total(shard.n_blocks, trains) for c, shard in zip(layers, shards, strict=True))
            times = {work: [c.overlapped(f, b, shard.n_blocks) for c, shard, (f, b) in zip(layers, shards, of_stages,
                     strict=True)] for work, of_stages in times.items()}  # fmt: skip
        if n == 1:
            return Cost(sum(count * sum(times[work][0]) for work, count in counts.items()), busy * tp)
        sends = {work: tuple(self._send(stages, work.tokens, s, sp) for s in range(n)) for work in counts}
        if len(counts) == 1:
            forward, backward = zip(*times[works[0]], strict=True)
            seconds = uniform_makespan(schedule, len(works), forward, backward, sends[works[0]], vpp)
        else:
            steps = [schedule(stage, pp, len(works), vpp) for stage in range(pp)]
            forward_s = lambda s, i: times[works[i]][s][0]
            backward_s = lambda s, i: times[works[i]][s][1]
            seconds = makespan(steps, forward_s, backward_s, lambda s, i: sends[works[i]][s])
        return Cost(seconds, busy * tp)

    def _layer_collectives(self, mfc: MFC, layout: Layout, stages: Stages) -> list[LayerCollectives] | None:
        """Return the collectives of each chunk's layers in a pass; None without ZeRO-2 and ZeRO-3."""
        assert mfc.role is not None
        role, strategy = self.roles[mfc.role], layout.strategy
        stage = role.zero_stage(strategy)
        if stage == 1 or (stage == 2 and not mfc.is_train):
            return None
        by_chunk = replace(strategy, pp=strategy.pp * strategy.vpp, vpp=1)
        numels, found = layer_numels(self.models[mfc.role], by_chunk), list[LayerCollectives]()
        for (_, ranks), of_stage in zip(stages, numels, strict=True):
            replicas = layout.axis("dp", ranks[0])
            gathered = of_stage.map(partial(self._collective, CollectiveKind.ALL_GATHER, replicas, itemsize(role)))
            reduced = of_stage.map(partial(self._collective, CollectiveKind.REDUCE_SCATTER, replicas, 4))
            found.append(LayerCollectives(gathered if stage == 3 else NO_LAYERS, reduced))
        return found

    def _collective(self, kind: CollectiveKind, ranks: Sequence[int], size: int, numel: float) -> float:
        return self.speed.collective(kind, size * numel, ranks) if numel else 0.0

    def _update(self, mfc: MFC, placement: Placement, replicas: Sequence[Rows]) -> float:
        """Seconds of an optimizer step after the passes of a mini-batch, on the slowest stage."""
        role, stages, backward = self._role(mfc, placement), self._stages(mfc, placement, 0), list[float]()
        strategy = placement.layout.strategy
        if overlaps_grad_reduce(role, strategy) and role.zero_stage(strategy) == 1:
            # the replica with most tokens is the last to have the gradients of a bucket
            rows = max(replicas, key=lambda rows: sum(rows[1]))
            works = mfc_works(mfc, stages[0][0].model, placement, rows, self.workload, self.share_prompts)
            backward = [self.speed.train(shard, works[-1], ranks)[1] if works else 0.0 for shard, ranks in stages]
        return max(
            self._stage_update(role, placement.layout, stage, *stages[stage], backward[stage] if backward else 0.0)
            for stage in range(len(stages))
        )

    def _stage_update(
        self, role: RoleSpec, layout: Layout, stage: int, shard: StageShard, group: Sequence[int], backward_s: float
    ) -> float:
        """Reduce-scatter gradients, update a range per replica, all-gather weights.

        With ZeRO-2 gradients are reduced in the passes; with ZeRO-3 the share that is updated is all that is stored.
        """
        strategy = layout.strategy
        experts, updated = expert_numels(shard.model, strategy)[stage], updated_numels(shard.model, strategy)[stage]
        numel = shard_numels(shard.model, strategy)[stage] - experts
        replicas, same_experts = (layout.axis(axis, group[0]) for axis in ("replicas", "edp"))
        seconds = self.speed.optimizer(shard, int(updated))
        if role.spec.optimizer.offload is True:  # copies in both directions overlap
            seconds = max(seconds, self.speed.host_copy(int(updated) * optimizer_bytes(role)))
        zero_stage = role.zero_stage(strategy)
        if strategy.weight_dp > 1 and zero_stage == 1:
            seconds += reduction_seconds(self.speed, shard, role, strategy, stage, numel, replicas, backward_s)
        if strategy.weight_dp > 1 and zero_stage < 3:
            seconds += self.speed.collective(CollectiveKind.ALL_GATHER, itemsize(role) * numel, replicas)
        if experts:
            seconds += self.speed.collective(CollectiveKind.REDUCE_SCATTER, 4 * experts, same_experts)
            seconds += self.speed.collective(CollectiveKind.ALL_GATHER, itemsize(role) * experts, same_experts)
        # the denominator of the loss, and the decision to skip the step
        seconds += 2 * self.speed.collective(CollectiveKind.ALL_REDUCE, 64, replicas)
        for axis in ("dp", "tp", "pp"):  # gradient norm
            seconds += self.speed.collective(CollectiveKind.ALL_REDUCE, 8, layout.axis(axis, group[0]))
        return seconds

    def sampled(self, mfc: MFC, rows: BatchRows) -> tuple[int, ...]:
        """Return the lengths of the responses that a generating call samples to prompts, in their order."""
        n = 1 if mfc.per_prompt else None
        return tuple(length for row in rows.ids for length in self.workload.responses_at(row.prompt)[:n])

    def _generate(self, mfc: MFC, placement: Placement, dp: int, rows: BatchRows) -> Cost:
        if not rows.ids:
            return NO_COST
        assert self.sampling is not None and mfc.role is not None
        n, stages = self.rollouts_at_once, self._stages(mfc, placement, dp)
        responses = n * self.sampled(mfc, rows)
        environment = None if mfc.per_prompt else self.environment
        n_open = environment.n_open(len(responses)) if environment else len(responses)
        slots = min(placement.micro_batching.limit_num_seqs(self.sampling.max_num_seqs), n_open)
        reads = CacheReads.PADDED if self.pads_cache else CacheReads.OWN
        if self.share_prompts and stages[0][0].shares_prompts:
            reads = CacheReads.SHARED
        send = (lambda tokens: self._send(stages, tokens, 0)) if len(stages) > 1 else lambda tokens: 0.0
        timer = DecodeTimer(self.speed, stages, placement.micro_batching.max_tokens_per_mb, send)
        seconds = timer.seconds(decode_schedule(n * rows.lengths, responses, slots, reads)) / n
        if environment is not None:
            seconds = rollout_seconds(environment, len(responses), slots, seconds)
        return Cost(seconds, timer.busy / n * placement.layout.strategy.tp)


def rows_of(call: PrepareCall) -> tuple[BatchRows, ...]:
    """Return the rows of each data-parallel rank in a call, with the lengths of the column that a model reads."""
    columns = call.inputs.columns
    column = columns["tokens" if "tokens" in columns else "prompts" if "prompts" in columns else next(iter(columns))]
    return split_rows(call.inputs.ids, column.lengths, call.minibatches, call.assignment)


def split_rows(
    ids: Sequence[RowId], lengths: Sequence[int], minibatches: Sequence[int], assignment: Sequence[Sequence[int]]
) -> tuple[BatchRows, ...]:
    """Return the rows of each data-parallel rank; ``assignment`` has the row numbers of each."""
    return tuple(
        BatchRows(tuple(ids[i] for i in own), tuple(lengths[i] for i in own), tuple(minibatches[i] for i in own))
        for own in assignment
    )


def mfc_works(
    mfc: MFC, model: ModelConfig, placement: Placement, rows: Rows, workload: Workload, share_prompts: bool
) -> tuple[Work, ...]:
    """Return the micro-batches of an inference or training call, at least as many as its pipeline needs."""
    (ids, lengths), limits, strategy = rows, placement.micro_batching, placement.layout.strategy
    pp, multiple_of = strategy.pp, strategy.pp if mfc.is_train and strategy.vpp > 1 else 1
    min_mbs = 2 * pp if mfc.is_train and pp > 1 else pp
    if limits.n_mbs < min_mbs:
        limits = replace(limits, n_mbs=min_mbs)
    share = share_prompts and not (mfc.is_train and model.n_experts)
    prompts = workload.prompt_lengths([i.prompt for i in ids]) if workload.is_generated else ()
    strategy = placement.layout.strategy
    share = share and not strategy.context
    works = works_of(ids if share_prompts else (), lengths, limits, prompts, share, multiple_of)
    return tuple(work.divided(strategy.tp) for work in works) if strategy.context else works


@lru_cache(maxsize=16384)
def works_of(
    ids: tuple[RowId, ...],
    lengths: tuple[int, ...],
    limits: MicroBatching,
    prompts: tuple[int, ...] = (),
    share_prompts: bool = False,
    multiple_of: int = 1,
) -> tuple[Work, ...]:
    """Return the micro-batches of rows; no call reads what ``prompts`` (lengths, if known) predict.

    With ``ids``, rows of a prompt are put into the same micro-batch if possible; with ``share_prompts`` too, the prompt
    is computed once for all of them. The number of micro-batches is a ``multiple_of`` another one if possible.
    """
    works = []
    for rows in micro_batches(ids, lengths, limits, prefer_prompts_together=bool(ids), multiple_of=multiple_of):
        predicted = sum(lengths[i] - prompts[i] for i in rows) if prompts else None
        own, before = [lengths[i] for i in rows], list[int]()
        if share_prompts and prompts:
            own, before = _deduplicated(rows, ids, lengths, prompts)
        works.append(Work.of(own, predicted, before))
    return tuple(works)


def _deduplicated(
    rows: Sequence[int], ids: Sequence[RowId], lengths: Sequence[int], prompts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return row lengths with shared prompts as rows of their own, and the length of the shared prompt of each row."""
    times = Counter(ids[i].prompt for i in rows)
    shared = {ids[i].prompt: prompts[i] for i in rows if times[ids[i].prompt] > 1}
    before = [shared.get(ids[i].prompt, 0) for i in rows]
    own = [lengths[i] - prefix for i, prefix in zip(rows, before, strict=True)]
    return [*shared.values(), *own], [*[0] * len(shared), *before]


def _concurrent(costs: Sequence[Cost]) -> Cost:
    return Cost(max(c.seconds for c in costs), sum(c.core_seconds for c in costs))
