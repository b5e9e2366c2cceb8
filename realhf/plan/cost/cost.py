"""What every instruction of a program costs: the one place where counts of work meet the speed of a machine."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from realhf.api.batch_meta import RowId
from realhf.api.config import GenerationConfig
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import Coord, Layout
from realhf.api.machine import Cost, Workload
from realhf.api.messages import PrepareCall
from realhf.api.model_config import ModelConfig
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.plan.compile.micro_batch import micro_batches
from realhf.plan.compile.pipeline import StageStep, inference_schedule, train_schedule
from realhf.plan.cost.pipeline_time import makespan, uniform_makespan
from realhf.plan.cost.speed import CollectiveKind, Speed, StageShard, Traffic, Work
from realhf.plan.cost.stage import decodes_in_one_call, shard_numels, stage_shards
from realhf.plan.cost.traffic import realloc_traffic, transfer_traffic

NO_COST = Cost(0.0, 0.0)
Stages = Sequence[tuple[StageShard, tuple[int, ...]]]
"""Each stage's share of a model, and the tensor-parallel group that computes it."""


@dataclass(frozen=True)
class BatchRows:
    """What one data-parallel rank computes in a call: ids and lengths, and the mini-batch of every row."""

    ids: tuple[RowId, ...]
    lengths: tuple[int, ...]
    minibatches: tuple[int, ...]

    def of_minibatch(self, number: int) -> tuple[tuple[RowId, ...], tuple[int, ...]]:
        """Return ids and lengths of the rows of a mini-batch."""
        return self._by_minibatch.get(number, ((), ()))

    @cached_property
    def _by_minibatch(self) -> dict[int, tuple[tuple[RowId, ...], tuple[int, ...]]]:
        found: dict[int, list[int]] = {}
        for i, number in enumerate(self.minibatches):
            found.setdefault(number, []).append(i)
        return {
            number: (tuple(self.ids[i] for i in mine), tuple(self.lengths[i] for i in mine))
            for number, mine in found.items()
        }


@dataclass(frozen=True)
class CostModel:
    """Prices the instructions of one experiment on one machine. ``models`` and ``roles`` are by role.

    ``shares``: engines compute what the rows of a prompt share once (``models/engine/packing.py``).
    """

    graph: Graph
    models: Mapping[str, ModelConfig]
    roles: Mapping[str, RoleSpec]
    speed: Speed
    workload: Workload
    node_size: int
    sampling: GenerationConfig | None = None
    shares: bool = False

    def price(self, plan: ExecutionPlan) -> Callable[[PrepareCall, Instruction], Cost]:
        """Return what the instructions of a plan's calls cost, for the simulator."""

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
        """Return the cost of an MFC's own work on the rows of every data-parallel rank."""
        outside = [self.speed.interface(_interface(mfc), len(r.ids), sum(r.lengths)) for r in ranks]
        if mfc.role is None:
            return Cost(max(outside), sum(outside))
        layout = placement.layout
        copies = layout.strategy.tp * layout.strategy.pp
        own = Cost(max(outside), sum(outside) * copies)  # interfaces run alike on every rank of a replica
        match mfc.kind:
            case Kind.TRAIN:
                update = max(self._update(mfc, layout, stage) for stage in range(layout.strategy.pp))
                costs = [self._minibatch(mfc, placement, ranks, n, update) for n in range(mfc.n_minibatches)]
            case Kind.INFERENCE:
                costs = [_together([self._forward(mfc, placement, d, rows) for d, rows in enumerate(ranks)])]
            case Kind.GENERATE:
                costs = [_together([self._generate(mfc, placement, d, rows) for d, rows in enumerate(ranks)])]
                if placement.backend is not Backend.native:  # it copies the weights, and is taken to be as fast
                    costs.append(self.host_copy(mfc.role, layout))
        return Cost(own.seconds + sum(c.seconds for c in costs), own.core_seconds + sum(c.core_seconds for c in costs))

    def exchange(self, traffic: Traffic) -> Cost:
        seconds = self.speed.exchange(traffic) if traffic.n_parts else 0.0
        return Cost(seconds, seconds * traffic.total / max(traffic.copied, 1))

    def reallocate(self, role: str, src: Layout, dst: Layout, eta: float = 1.0) -> Cost:
        """Return the cost of moving a role's weights; a blend reads and writes its target once more."""
        itemsize = 2 if self.roles[role].spec.bf16 else 4
        traffic = realloc_traffic(self.models[role], src, dst, itemsize, self.node_size)
        if eta < 1.0:
            again = 2 * max(traffic.node + traffic.cluster, traffic.local)
            traffic = replace(traffic, copied=traffic.copied + again, total=traffic.total + again * dst.strategy.world)
        return self.exchange(traffic)

    def host_copy(self, role: str, layout: Layout) -> Cost:
        """Return the cost of bringing a role's weights to host memory, or back."""
        strategy = layout.strategy
        numel = max(shard_numels(self.models[role], strategy.tp, strategy.pp))
        seconds = self.speed.host_copy(numel * (2 if self.roles[role].spec.bf16 else 4))
        return Cost(seconds, seconds * strategy.world)

    def _stages(self, mfc: MFC, layout: Layout, dp: int) -> Stages:
        """Each stage's share of the model, and its tensor-parallel group in replica ``dp``."""
        assert mfc.role is not None
        parts = stage_shards(self.models[mfc.role], self.roles[mfc.role], layout.strategy)
        seats = range(layout.strategy.tp)
        return [(part, tuple(layout.rank(Coord(p, dp, t)) for t in seats)) for p, part in enumerate(parts)]

    def _hop(self, stages: Stages, tokens: int, stage: int, share: int = 1) -> float:
        """Seconds of activations of ``tokens`` from a stage to the next one (or to the one before, for the last)."""
        part, ranks = stages[stage]
        other = stages[stage + 1][1] if stage + 1 < len(stages) else stages[stage - 1][1]
        return self.speed.send(tokens * part.model.hidden * (2 if part.bf16 else 4) / share, ranks[0], other[0])

    def _forward(self, mfc: MFC, placement: Placement, dp: int, rows: BatchRows) -> Cost:
        if not rows.ids:
            return NO_COST
        stages = self._stages(mfc, placement.layout, dp)
        n = len(stages)
        limits = _at_least(placement.micro_batching, n)
        prompts = prompts_of(self.workload, rows.ids)
        works = works_of(rows.ids, rows.lengths, limits, prompts, self.shares)
        seconds, busy = self._stream(
            stages, works, inference_schedule, lambda *given: (self.speed.forward(*given), 0.0), share=1
        )
        return Cost(seconds, busy * placement.layout.strategy.tp)

    def _stream(
        self,
        stages: Stages,
        works: tuple[Work, ...],
        schedule: Callable[[int, int, int], Sequence[StageStep]],
        seconds_of: Callable[[StageShard, Work, Sequence[int]], tuple[float, float]],
        share: int,
    ) -> tuple[float, float]:
        """Return the seconds of micro-batches going through all stages, and the sum of the stages' own."""
        n, counts = len(stages), Counter(works)
        kinds = list(counts)
        times = {work: [seconds_of(part, work, ranks) for part, ranks in stages] for work in kinds}
        busy = sum(count * (f + b) for work, count in counts.items() for f, b in times[work])
        if n == 1:
            return busy, busy
        hops = {work: tuple(self._hop(stages, work.tokens, s, share) for s in range(n)) for work in kinds}
        if len(kinds) == 1:
            forward, backward = zip(*times[kinds[0]], strict=True)
            return uniform_makespan(schedule, len(works), forward, backward, hops[kinds[0]]), busy
        steps = [schedule(stage, n, len(works)) for stage in range(n)]
        seconds = makespan(
            steps,
            lambda s, i: times[works[i]][s][0],
            lambda s, i: times[works[i]][s][1],
            lambda s, i: hops[works[i]][s],
        )
        return seconds, busy

    def _minibatch(
        self, mfc: MFC, placement: Placement, ranks: Sequence[BatchRows], number: int, update: float
    ) -> Cost:
        """One optimizer step: forward and backward of every replica, then what they do together, the update."""
        own = _together([self._train(mfc, placement, d, *rows.of_minibatch(number)) for d, rows in enumerate(ranks)])
        return Cost(own.seconds + update, own.core_seconds + update * placement.layout.strategy.world)

    def _train(self, mfc: MFC, placement: Placement, dp: int, ids: tuple[RowId, ...], lengths: tuple[int, ...]) -> Cost:
        if not ids:
            return NO_COST
        assert mfc.role is not None
        stages = self._stages(mfc, placement.layout, dp)
        n = len(stages)
        limits = _at_least(placement.micro_batching, 2 * n if n > 1 else 1)
        shares = self.shares and not self.models[mfc.role].n_experts
        works = works_of(ids, lengths, limits, prompts_of(self.workload, ids), shares, near=self.shares)
        tp = placement.layout.strategy.tp
        share = tp if self.roles[mfc.role].spec.sequence_parallel else 1
        seconds, busy = self._stream(stages, works, train_schedule, self.speed.train, share)
        return Cost(seconds, busy * tp)

    def _update(self, mfc: MFC, layout: Layout, stage: int) -> float:
        """Gradients are reduced over replicas, each updates its range, and the new weights are gathered (ZeRO-1)."""
        part, group = self._stages(mfc, layout, 0)[stage]
        strategy = layout.strategy
        numel = shard_numels(part.model, strategy.tp, strategy.pp)[stage]
        replicas = layout.axis("dp", group[0])
        seconds = self.speed.optimizer(part, numel // strategy.dp)
        if strategy.dp > 1:
            seconds += self.speed.collective(CollectiveKind.REDUCE_SCATTER, 4 * numel, replicas)
            seconds += self.speed.collective(CollectiveKind.ALL_GATHER, (2 if part.bf16 else 4) * numel, replicas)
        # the denominator of the loss, and what may veto the step
        seconds += 2 * self.speed.collective(CollectiveKind.ALL_REDUCE, 64, replicas)
        for axis in ("dp", "tp", "pp"):  # the norm of the gradient
            seconds += self.speed.collective(CollectiveKind.ALL_REDUCE, 8, layout.axis(axis, group[0]))
        return seconds

    def _generate(self, mfc: MFC, placement: Placement, dp: int, rows: BatchRows) -> Cost:
        """Prompts are computed once for all their answers, then one token at a time until the last row ends."""
        if not rows.ids:
            return NO_COST
        assert self.sampling is not None and mfc.role is not None
        stages = self._stages(mfc, placement.layout, dp)
        limit = placement.micro_batching.max_tokens_per_mb
        n_drawn = 1 if mfc.per_prompt else None
        queue = [(length, answer) for row, length in zip(rows.ids, rows.lengths, strict=True)
                 for answer in self.workload.answers_to(row.prompt)[:n_drawn]]  # fmt: skip
        slots = min(placement.micro_batching.slots(self.sampling.max_num_seqs), len(queue))
        n = len(queue) // len(rows.ids)
        is_fused = decodes_in_one_call(self.models[mfc.role], placement.layout.strategy, self.shares)
        clock = _Decoding(self.speed, stages, slots, limit, n if is_fused else 0,
                          lambda tokens: self._hop(stages, tokens, 0) if len(stages) > 1 else 0.0)  # fmt: skip
        seconds = clock.run(queue, n)
        return Cost(seconds, clock.busy * placement.layout.strategy.tp)


class _Decoding:
    """The clock of one replica's generation, as models/engine/decode/generate.py goes about it.

    ``alike`` rows of a prompt read its cached tokens once, and each its own; 0: all rows read as many as the longest.
    """

    def __init__(
        self,
        speed: Speed,
        stages: Stages,
        n_slots: int,
        token_limit: int,
        alike: int,
        hop: Callable[[int], float],
    ) -> None:
        self.speed, self.stages, self.n_slots, self.limit, self.hop = speed, stages, n_slots, token_limit, hop
        self.alike = alike
        self.busy = 0.0
        # of a prompt, one row goes on to the head
        self._bodies = [replace(part, last=False) for part, _ in stages]
        self._heads = [replace(part, n_blocks=0, first=False) for part, _ in stages]

    def run(self, queue: list[tuple[int, int]], n: int) -> float:
        """Return the seconds until every (prompt, answer) of the queue is drawn, ``n`` to each prompt in turn."""
        seconds, queue = 0.0, list(reversed(queue))
        live: list[tuple[int, int, int]] = []  # tokens of the prompt, of the answer so far and to come
        while queue or live:
            free = self.n_slots - len(live)
            if queue and (free * 8 >= self.n_slots or free >= len(queue)):
                fresh = [queue.pop() for _ in range(min(free, len(queue)))]
                seconds += self._prefill([prompt for prompt, _ in fresh[::n]], len(fresh))
                live += [(prompt, 1, answer - 1) for prompt, answer in fresh]
            else:
                steps = max(1, min(left for *_, left in live))
                seconds += self._turns(steps, len(live), self._read(live) + steps / 2)
                live = [(prompt, drawn + steps, left - steps) for prompt, drawn, left in live]
            live = [row for row in live if row[2] > 0]
        return seconds

    def _read(self, live: list[tuple[int, int, int]]) -> float:
        """Return the cached tokens that a row reads, on average."""
        if not self.alike:
            return max(prompt + drawn for prompt, drawn, _ in live)
        return sum(prompt / self.alike + drawn for prompt, drawn, _ in live) / len(live)

    def _prefill(self, prompts: list[int], n_rows: int) -> float:
        work = Work.of(prompts)
        passes = max(1, -(-work.tokens // self.limit))
        times = [
            self.speed.forward(body, work, ranks) + self.speed.decode(head, n_rows, 0, ranks)
            for body, head, (_, ranks) in zip(self._bodies, self._heads, self.stages, strict=True)
        ]
        self.busy += sum(times)
        bubble = sum(times) / passes + (passes - 1) / passes * max(times)
        return bubble + (len(times) - 1) * self.hop(-(-work.tokens // passes))

    def _turns(self, n: int, n_rows: int, context: float) -> float:
        """``n`` tokens for all live rows: groups of them follow one another through the stages."""
        n_groups = min(len(self.stages), n_rows)
        rows = -(-n_rows // n_groups)
        times = [self.speed.decode(part, rows, context, ranks) for part, ranks in self.stages]
        self.busy += n * n_groups * sum(times)
        if len(times) == 1:
            return n * times[0]
        around = sum(times) + len(times) * self.hop(rows)
        return n * max(around, n_groups * max(times))


def rows_of(call: PrepareCall) -> tuple[BatchRows, ...]:
    """Return what each data-parallel rank computes in a call, by the lengths of the column that a model reads."""
    columns = call.inputs.columns
    lengths = columns["tokens" if "tokens" in columns else "prompts" if "prompts" in columns else next(iter(columns))]
    return tuple(
        BatchRows(
            tuple(call.inputs.ids[i] for i in mine),
            tuple(lengths.lengths[i] for i in mine),
            tuple(call.minibatches[i] for i in mine),
        )
        for mine in call.assignment
    )


def prompts_of(workload: Workload, ids: tuple[RowId, ...]) -> tuple[int, ...]:
    """Return how much of every row is its prompt; empty where rows have none."""
    return workload.prompt_lengths([i.prompt for i in ids]) if workload.sampled else ()


def works_of(
    ids: tuple[RowId, ...],
    lengths: tuple[int, ...],
    limits: MicroBatching,
    prompts: tuple[int, ...] = (),
    shares: bool = False,
    near: bool | None = None,
) -> tuple[Work, ...]:
    """Return the micro-batches of some rows; tokens of ``prompts`` (lengths, where they are known) have no loss.

    ``shares``: a prompt is computed once for all its rows in a micro-batch; ``near`` (default: where they share) keeps
    them together.
    """
    near = shares if near is None else near
    return _works(ids if near or shares else (), lengths, limits, prompts, shares, near)


@lru_cache(maxsize=16384)
def _works(
    ids: tuple[RowId, ...],
    lengths: tuple[int, ...],
    limits: MicroBatching,
    prompts: tuple[int, ...],
    shares: bool,
    near: bool,
) -> tuple[Work, ...]:
    """Return the same; ``ids`` only where it matters whose rows they are, so that ranks with rows alike are one."""
    found = []
    for part in micro_batches(ids, lengths, limits, prefer_prompts_together=near):
        trained = sum(lengths[i] - prompts[i] for i in part) if prompts else None
        own, before = [lengths[i] for i in part], list[int]()
        if shares and prompts:
            own, before = _without_repeats(part, ids, lengths, prompts)
        found.append(Work.of(own, trained, before))
    return tuple(found)


def _without_repeats(
    part: Sequence[int], ids: Sequence[RowId], lengths: Sequence[int], prompts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the lengths of a micro-batch's rows where those of one prompt share it, and what precedes each."""
    times = Counter(ids[i].prompt for i in part)
    own, before = [], []
    for i in part:
        several = times[ids[i].prompt] > 1
        own.append(lengths[i] - prompts[i] * several)
        before.append(prompts[i] * several)
    shared = {ids[i].prompt: prompts[i] for i in part if times[ids[i].prompt] > 1}
    return [*shared.values(), *own], [*[0] * len(shared), *before]


def _at_least(limits: MicroBatching, n: int) -> MicroBatching:
    return replace(limits, n_mbs=max(limits.n_mbs, n))


def _together(costs: Sequence[Cost]) -> Cost:
    """Replicas side by side: the slowest decides when they go on."""
    return Cost(max(c.seconds for c in costs), sum(c.core_seconds for c in costs))


def _interface(mfc: MFC) -> str:
    """The name under which the time of an interface's method is known."""
    method = {Kind.GENERATE: "generate", Kind.INFERENCE: "inference", Kind.TRAIN: "train_step"}[mfc.kind]
    return f"{mfc.interface.name}/{method}"
