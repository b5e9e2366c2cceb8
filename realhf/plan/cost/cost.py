"""Cost of every instruction of a program: amounts of work times the speed of a machine."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial

from realhf.api.batch_meta import RowId
from realhf.api.config import GenerationConfig
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import Coord, Layout
from realhf.api.machine import Cost, EnvironmentLoad, Workload
from realhf.api.messages import PrepareCall
from realhf.api.model_config import ModelConfig
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.plan.compile.micro_batch import micro_batches
from realhf.plan.compile.pipeline import inference_schedule, train_schedule
from realhf.plan.cost.environment import rollout_seconds
from realhf.plan.cost.pipeline_time import makespan, uniform_makespan
from realhf.plan.cost.speed import (
    CollectiveKind,
    Speed,
    Stages,
    Traffic,
    Work,
    itemsize,
    optimizer_bytes,
    shard_numels,
    stage_shards,
)
from realhf.plan.cost.traffic import realloc_traffic, transfer_traffic
from realhf.plan.cost.zero import NO_LAYERS, LayerCollectives, layer_numels

NO_COST = Cost(0.0, 0.0)
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

    def price(self, plan: ExecutionPlan) -> Callable[[PrepareCall, Instruction], Cost]:
        """Return the cost function of a plan's instructions, for the simulator."""

        @cache
        def computed(mfc: str, ranks: tuple[BatchRows, ...]) -> Cost:
            return self.compute(self.graph[mfc], plan[mfc], ranks)

        def price(call: PrepareCall, step: Instruction) -> Cost:
            match step:
                case Transfer(keys, layout):
                    return self.exchange(transfer_traffic(call, keys, layout, self.node_size))
                case Compute(mfc):
                    return computed(mfc, rows_of(call))
                case Reallocate(role, src, _, dst, eta):
                    return self.reallocate(role, src, dst, eta)
                case Load(role, layout) | Offload(role, layout):
                    return self.host_copy(role, layout)
                case Release():
                    return NO_COST

        return price

    def compute(self, mfc: MFC, placement: Placement, ranks: Sequence[BatchRows]) -> Cost:
        """Return the cost of an MFC's computation on the rows of every data-parallel rank."""
        method = f"{mfc.interface.name}/{METHODS[mfc.kind]}"
        interface = [self.speed.interface(method, len(r.ids), sum(r.lengths)) for r in ranks]
        if mfc.role is None:
            return Cost(max(interface), sum(interface))
        layout = placement.layout
        copies = layout.strategy.tp * layout.strategy.pp
        own = Cost(max(interface), sum(interface) * copies)  # every rank of a replica runs the interface

        def passes(replicas: Iterable[Rows], update: float = 0.0) -> Cost:
            cost = _concurrent([self._passes(mfc, placement, d, rows) for d, rows in enumerate(replicas)])
            return Cost(cost.seconds + update, cost.core_seconds + update * layout.strategy.world)

        match mfc.kind:
            case Kind.TRAIN:
                update = max(self._update(mfc, layout, stage) for stage in range(layout.strategy.pp))
                costs = [passes((r.of_minibatch(n) for r in ranks), update) for n in range(mfc.n_minibatches)]
            case Kind.INFERENCE:
                costs = [passes((r.ids, r.lengths) for r in ranks)]
            case Kind.GENERATE:
                costs = [_concurrent([self._generate(mfc, placement, d, r) for d, r in enumerate(ranks)])]
                if placement.backend is not Backend.native:  # weights are pushed; its speed is assumed equal
                    costs.append(self.host_copy(mfc.role, layout))
        return Cost(own.seconds + sum(c.seconds for c in costs), own.core_seconds + sum(c.core_seconds for c in costs))

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
        numel = max(shard_numels(self.models[role], strategy.tp, strategy.pp))
        seconds = self.speed.host_copy(numel * itemsize(self.roles[role]))
        return Cost(seconds, seconds * strategy.world)

    def _stages(self, mfc: MFC, layout: Layout, dp: int) -> Stages:
        assert mfc.role is not None
        shards = stage_shards(self.models[mfc.role], self.roles[mfc.role], layout.strategy)
        return [(s, tuple(layout.rank(Coord(p, dp, t)) for t in range(s.tp))) for p, s in enumerate(shards)]

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
        trains, tp, stages = mfc.is_train, placement.layout.strategy.tp, self._stages(mfc, placement.layout, dp)
        works = mfc_works(mfc, self.models[mfc.role], placement, rows, self.workload, self.share_prompts)
        schedule = train_schedule if trains else inference_schedule
        seconds_of = self.speed.train if trains else lambda *args: (self.speed.forward(*args), 0.0)
        sp = tp if trains and self.roles[mfc.role].spec.sequence_parallel else 1
        n, counts = len(stages), Counter(works)
        times = {work: [seconds_of(shard, work, ranks) for shard, ranks in stages] for work in counts}
        busy = sum(count * (f + b) for work, count in counts.items() for f, b in times[work])
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
            seconds = uniform_makespan(schedule, len(works), forward, backward, sends[works[0]])
        else:
            steps = [schedule(stage, n, len(works)) for stage in range(n)]
            forward_s = lambda s, i: times[works[i]][s][0]
            backward_s = lambda s, i: times[works[i]][s][1]
            seconds = makespan(steps, forward_s, backward_s, lambda s, i: sends[works[i]][s])
        return Cost(seconds, busy * tp)

    def _layer_collectives(self, mfc: MFC, layout: Layout, stages: Stages) -> list[LayerCollectives] | None:
        """Return the collectives of each stage's layers in a pass; None without ZeRO-2 and ZeRO-3."""
        assert mfc.role is not None
        role, strategy = self.roles[mfc.role], layout.strategy
        stage = role.zero_stage(strategy)
        if stage == 1 or (stage == 2 and not mfc.is_train):
            return None
        numels, found = layer_numels(self.models[mfc.role], strategy.tp, strategy.pp), list[LayerCollectives]()
        for (_, ranks), of_stage in zip(stages, numels, strict=True):
            replicas = layout.axis("dp", ranks[0])
            gathered = of_stage.map(partial(self._collective, CollectiveKind.ALL_GATHER, replicas, itemsize(role)))
            reduced = of_stage.map(partial(self._collective, CollectiveKind.REDUCE_SCATTER, replicas, 4))
            found.append(LayerCollectives(gathered if stage == 3 else NO_LAYERS, reduced))
        return found

    def _collective(self, kind: CollectiveKind, ranks: Sequence[int], size: int, numel: float) -> float:
        return self.speed.collective(kind, size * numel, ranks) if numel else 0.0

    def _update(self, mfc: MFC, layout: Layout, stage: int) -> float:
        """Reduce-scatter gradients, update a range per replica, all-gather weights.

        With ZeRO-2 gradients are reduced in the passes; with ZeRO-3 the share that is updated is all that is stored.
        """
        assert mfc.role is not None
        shard, group = self._stages(mfc, layout, 0)[stage]
        strategy = layout.strategy
        numel = shard_numels(shard.model, strategy.tp, strategy.pp)[stage]
        replicas = layout.axis("dp", group[0])
        seconds = self.speed.optimizer(shard, numel // strategy.dp)
        if self.roles[mfc.role].spec.optimizer.offload:  # copies in both directions overlap
            nbytes = numel // strategy.dp * optimizer_bytes(self.roles[mfc.role])
            seconds = max(seconds, self.speed.host_copy(nbytes))
        zero_stage = self.roles[mfc.role].zero_stage(strategy)
        if strategy.dp > 1 and zero_stage == 1:
            seconds += self.speed.collective(CollectiveKind.REDUCE_SCATTER, 4 * numel, replicas)
        if strategy.dp > 1 and zero_stage < 3:
            seconds += self.speed.collective(
                CollectiveKind.ALL_GATHER, itemsize(self.roles[mfc.role]) * numel, replicas
            )
        # the denominator of the loss, and the decision to skip the step
        seconds += 2 * self.speed.collective(CollectiveKind.ALL_REDUCE, 64, replicas)
        for axis in ("dp", "tp", "pp"):  # gradient norm
            seconds += self.speed.collective(CollectiveKind.ALL_REDUCE, 8, layout.axis(axis, group[0]))
        return seconds

    def _generate(self, mfc: MFC, placement: Placement, dp: int, rows: BatchRows) -> Cost:
        if not rows.ids:
            return NO_COST
        assert self.sampling is not None and mfc.role is not None
        stages = self._stages(mfc, placement.layout, dp)
        limit = placement.micro_batching.max_tokens_per_mb
        n_sampled = 1 if mfc.per_prompt else None
        queue = [(length, response) for row, length in zip(rows.ids, rows.lengths, strict=True)
                 for response in self.workload.responses_at(row.prompt)[:n_sampled]]  # fmt: skip
        slots = min(placement.micro_batching.limit_num_seqs(self.sampling.max_num_seqs), len(queue))
        n = len(queue) // len(rows.ids)
        is_fused = self.share_prompts and stages[0][0].is_fused
        send = (lambda tokens: self._send(stages, tokens, 0)) if len(stages) > 1 else lambda tokens: 0.0
        simulation = _DecodeSimulation(self.speed, stages, slots, limit, n if is_fused else 0, send)
        seconds = simulation.run(queue, n)
        if self.environment is not None and not mfc.per_prompt:
            seconds = rollout_seconds(self.environment, len(queue), slots, seconds)
        return Cost(seconds, simulation.busy * placement.layout.strategy.tp)


@dataclass
class _DecodeSimulation:
    """Timing of one replica's generation, as in models/engine/decode/generate.py.

    Prompts are prefilled once for all their responses. ``group_size`` rows read the cached tokens of their prompt once
    and their own; 0: all rows read as many tokens as the longest.
    """

    speed: Speed
    stages: Stages
    n_slots: int
    token_limit: int
    group_size: int
    send: Callable[[int], float]
    busy: float = 0.0

    def __post_init__(self) -> None:
        # the head computes only the last token of a prompt
        self._bodies = [replace(shard, last=False) for shard, _ in self.stages]
        self._heads = [replace(shard, n_blocks=0, first=False) for shard, _ in self.stages]

    def run(self, queue: list[tuple[int, int]], n: int) -> float:
        """Return the seconds to sample (prompt, response) lengths, of which ``n`` in succession share a prompt."""
        seconds, queue = 0.0, list(reversed(queue))
        live: list[tuple[int, int, int]] = []  # tokens: prompt, sampled, remaining
        while queue or live:
            free = self.n_slots - len(live)
            if queue and (free * 8 >= self.n_slots or free >= len(queue)):
                fresh = [queue.pop() for _ in range(min(free, len(queue)))]
                seconds += self._prefill([prompt for prompt, _ in fresh[::n]], len(fresh))
                live += [(prompt, 1, response - 1) for prompt, response in fresh]
            else:
                steps = max(1, min(left for *_, left in live))
                context: float = max(prompt + sampled for prompt, sampled, _ in live)
                if self.group_size:
                    context = sum(prompt / self.group_size + sampled for prompt, sampled, _ in live) / len(live)
                seconds += self._decode(steps, len(live), context + steps / 2)
                live = [(prompt, sampled + steps, left - steps) for prompt, sampled, left in live]
            live = [row for row in live if row[2] > 0]
        return seconds

    def _prefill(self, prompts: list[int], n_rows: int) -> float:
        work = Work.of(prompts)
        passes = max(1, -(-work.tokens // self.token_limit))
        times = [
            self.speed.forward(body, work, ranks) + self.speed.decode(head, n_rows, 0, ranks)
            for body, head, (_, ranks) in zip(self._bodies, self._heads, self.stages, strict=True)
        ]
        self.busy += sum(times)
        bubble = sum(times) / passes + (passes - 1) / passes * max(times)
        return bubble + (len(times) - 1) * self.send(-(-work.tokens // passes))

    def _decode(self, n: int, n_rows: int, context: float) -> float:
        """Return the seconds of ``n`` tokens for all rows; groups of rows are pipelined over the stages."""
        n_groups = min(len(self.stages), n_rows)
        rows = -(-n_rows // n_groups)
        times = [self.speed.decode(shard, rows, context, ranks) for shard, ranks in self.stages]
        self.busy += n * n_groups * sum(times)
        if len(times) == 1:
            return n * times[0]
        round_trip = sum(times) + len(times) * self.send(rows)
        return n * max(round_trip, n_groups * max(times))


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
    (ids, lengths), pp, limits = rows, placement.layout.strategy.pp, placement.micro_batching
    min_mbs = 2 * pp if mfc.is_train and pp > 1 else pp
    if limits.n_mbs < min_mbs:
        limits = replace(limits, n_mbs=min_mbs)
    share = share_prompts and not (mfc.is_train and model.n_experts)
    prompts = workload.prompt_lengths([i.prompt for i in ids]) if workload.is_generated else ()
    return works_of(ids if share_prompts else (), lengths, limits, prompts, share)


@lru_cache(maxsize=16384)
def works_of(
    ids: tuple[RowId, ...],
    lengths: tuple[int, ...],
    limits: MicroBatching,
    prompts: tuple[int, ...] = (),
    share_prompts: bool = False,
) -> tuple[Work, ...]:
    """Return the micro-batches of rows; tokens of ``prompts`` (lengths, if known) have no loss.

    With ``ids``, rows of a prompt are put into the same micro-batch if possible; with ``share_prompts`` too, the prompt
    is computed once for all of them.
    """
    works = []
    for rows in micro_batches(ids, lengths, limits, prefer_prompts_together=bool(ids)):
        trained = sum(lengths[i] - prompts[i] for i in rows) if prompts else None
        own, before = [lengths[i] for i in rows], list[int]()
        if share_prompts and prompts:
            own, before = _deduplicated(rows, ids, lengths, prompts)
        works.append(Work.of(own, trained, before))
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
