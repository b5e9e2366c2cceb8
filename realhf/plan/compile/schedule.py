"""The scheduler of the master as a pure state machine: events in, actions out. No IO, no clock, no torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.curriculum import PromptResult
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import MFC, Graph
from realhf.api.messages import Holders, PrepareCall, State
from realhf.plan.compile import transfer
from realhf.plan.compile.forwarding import busy_ranks, forwarded_keys, rollouts_ahead
from realhf.plan.compile.micro_batch import partition_rows
from realhf.plan.train_schedule import PromptRange, TrainSchedule


@dataclass(frozen=True)
class FetchRows:
    span: PromptRange


@dataclass(frozen=True)
class StartCall:
    mfc: str
    span: PromptRange


@dataclass(frozen=True)
class FinishStep:
    """All calls of the step are done: report the step, then free its rows."""

    span: PromptRange


Decision = FetchRows | StartCall | FinishStep


def next_resample(n_sampled: int, n_kept: int, n_wanted: int, limit: int) -> int:
    """Return how many prompts (at most ``limit``) to sample next, given the fraction that was kept so far."""
    missing = n_wanted - n_kept
    return min(limit, -(-missing * n_sampled // n_kept)) if n_kept else limit


class Scheduler:
    """Decides when calls start, by prompts alone. ``fetch_ahead``, ``advance`` and ``resume_training`` change it.

    A call starts when all its input rows exist, no other call of its MFC is running, and the weights of its role are
    recent enough. With ``strict_step_order``, a step is trained only after the previous step has finished, so that the
    state after a step can be saved, and the age of a call's weights does not depend on timing: rollouts of a step's own
    prompts use weights that are exactly ``max_staleness`` steps old, those of resampled prompts one step less, and
    generating calls that read other calls' rows current ones. The MFCs after a filter MFC run on the first of the kept
    prompts. With ``pauses_training``, the training calls of every step wait for ``resume_training``.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: TrainSchedule,
        max_staleness: int = 0,
        strict_step_order: bool = False,
        pauses_training: bool = False,
    ) -> None:
        self.graph, self.schedule, self.max_staleness = graph, schedule, max_staleness
        self.strict_step_order = strict_step_order
        self.pauses_training = self.is_paused = pauses_training
        self.versions: dict[str, int] = dict.fromkeys(graph.roles, schedule.first_step)
        self.finished_steps = schedule.first_step
        self._updaters = {role: mfc.name for role in graph.roles if (mfc := graph.updater(role))}
        self._parents = {m.name: [p.name for p in graph.parents(m)] for m in graph.mfcs}
        self._ahead = rollouts_ahead(graph)
        if strict_step_order and self._filters_by_current_weights():
            self.max_staleness = min(max_staleness, 1)  # two steps ahead, training and sampling would await each other
        self._reads_data = {m.name for m in graph.mfcs if not graph.producer.keys() >= {*m.inputs}}
        first = self._start_of(schedule.first_step)
        self._next = dict.fromkeys(self._parents, first)  # step and position of the next call
        self._done = dict.fromkeys(self._parents, first[1])
        self._resampled: dict[int, list[PromptRange]] = {}  # additional prompts by step
        self._kept: dict[int, frozenset[int]] = {}  # prompts to train on, of steps with complete sampling
        self._running: set[str] = set()
        self._fetched = self._fetching = schedule.first_step
        self._fetched_stop: dict[int, int] = {}  # end of the fetched prompts by step

    @property
    def fetch_lag(self) -> int:
        """Steps from the last finished one, when the data of a step is requested, to that step."""
        return 2 + self.max_staleness

    @property
    def is_over(self) -> bool:
        return self.finished_steps >= self.schedule.n_steps

    def advance(self, mfc: str | None, span: PromptRange) -> list[Decision]:
        """Return the decisions, in order, after a call of an MFC or a fetch (None) has finished."""
        decisions: list[Decision] = []
        if mfc is None:
            self._fetched_stop[span.step] = span.stop
            self._fetched += span == self.schedule.span(span.step)
        else:
            self._complete(mfc, span)
            if self.graph.filter_mfc and self.graph.filter_mfc.name == mfc:
                decisions += self._resample(mfc, span.step)
        decisions += [*self._finish_steps(), *self.fetch_ahead()]
        return decisions + [call for candidate in self.graph.topological if (call := self._try_start(candidate))]

    def resume_training(self) -> list[StartCall]:
        """Return the training calls that have waited for this."""
        self.is_paused = False
        return [call for mfc in self.graph.mfcs if mfc.is_train and (call := self._try_start(mfc))]

    def has_started(self, roles: Collection[str]) -> bool:
        """Return True if all calls of these roles have started."""
        names = [mfc.name for mfc in self.graph.mfcs if mfc.role in roles]
        return all(self._next[name][0] >= self.schedule.n_steps for name in names)

    def is_kept(self, prompt: int) -> bool:
        """Return True if the filter MFC has kept rows of a prompt."""
        return True

    def prompts(self, mfc: MFC, span: PromptRange) -> Sequence[int]:
        """Return the prompts of a range that a call of the MFC processes."""
        positions = range(span.start, span.stop)
        if mfc.name not in self.graph.after_filter:
            return positions
        return [prompt for prompt in positions if prompt in self._kept[span.step]]

    def _complete(self, mfc: str, span: PromptRange) -> None:
        self._running.discard(mfc)
        self._done[mfc] = span.stop
        if span.stop == self._span(span.step).stop:
            self.versions |= {role: span.step + 1 for role, updater in self._updaters.items() if updater == mfc}

    def _span(self, step: int) -> PromptRange:
        """Return the prompts of a step, including those resampled so far."""
        own, resampled = self.schedule.span(step), self._resampled.get(step, [])
        return replace(own, stop=resampled[-1].stop) if resampled else own

    def _resample(self, filter_mfc: str, step: int) -> list[FetchRows]:
        """Once all prompts of a step are filtered, sample more of them or fix the prompts to train on."""
        span, resampled = self._span(step), self._resampled.setdefault(step, [])
        if self._done[filter_mfc] < span.stop:
            return []
        own = self.schedule.span(step)
        wanted, kept = own.stop - own.start, [*filter(self.is_kept, range(span.start, span.stop))]
        if len(kept) < wanted and len(resampled) < self.schedule.resamples:
            n = next_resample(span.stop - span.start, len(kept), wanted, self.schedule.batch_size)
            resampled.append(PromptRange(step, span.stop, span.stop + n))
            return [FetchRows(resampled[-1])]
        self._kept[step] = frozenset(kept[:wanted])
        for name, position in self._next.items():
            if position == (step, span.stop):
                self._next[name] = self._start_of(step + 1)
        return []

    def _start_of(self, step: int) -> tuple[int, int]:
        return step, step * self.schedule.stride

    def _is_sampled(self, step: int) -> bool:
        """Return True if no more prompts will be sampled for a step."""
        return self.graph.filter_mfc is None or step in self._kept

    def _finish_steps(self) -> list[FinishStep]:
        finished = []
        while not self.is_over:
            span = self._span(self.finished_steps)
            is_prepared = span.step < self._fetched and self._is_sampled(span.step)
            if not is_prepared or min(self._done.values()) < span.stop:
                break
            for by_step in (self._resampled, self._kept, self._fetched_stop):
                by_step.pop(span.step, None)
            self.finished_steps += 1
            self.is_paused = self.pauses_training
            finished.append(FinishStep(span))
        return finished

    def fetch_ahead(self) -> list[FetchRows]:
        """Prefetch the data of one step more than the steps in progress need."""
        first = self._fetching
        self._fetching = max(first, min(self.finished_steps + self.fetch_lag, self.schedule.n_steps))
        return [FetchRows(self.schedule.span(step)) for step in range(first, self._fetching)]

    def _allowed_staleness(self, mfc: MFC, step: int, position: int) -> int:
        if not self.strict_step_order:
            return mfc.allowed_staleness(self.max_staleness)
        is_resampled = position >= self.schedule.span(step).stop
        return max(0, self.max_staleness - is_resampled) if mfc in self._ahead else 0

    def _has_readers(self, trainer: MFC, step: int) -> bool:
        """Return True if rollouts that use the weights before this update have not all started."""
        ahead, n_steps = step + self.max_staleness, self.schedule.n_steps
        started = (ahead, self.schedule.span(ahead).stop) if ahead < n_steps else (n_steps, 0)
        readers = [m.name for m in self._ahead if self._updaters.get(m.role or "") == trainer.name]
        return ahead > step and any(self._next[name] < started for name in readers)

    def _filters_by_current_weights(self) -> bool:
        needed = {self.graph.filter_mfc.name} if self.graph.filter_mfc else set()
        for mfc in reversed(self.graph.topological):
            needed |= {*self._parents[mfc.name]} if mfc.name in needed else set()
        return any(m.name in needed and m not in self._ahead and m.role in self._updaters for m in self.graph.mfcs)

    def _try_start(self, mfc: MFC) -> StartCall | None:
        step, position = self._next[mfc.name]
        if mfc.name in self._running or step >= min(self.schedule.n_steps, self._fetched):
            return None
        if self.is_paused and mfc.is_train:
            return None
        if self.strict_step_order and mfc.is_train and (step > self.finished_steps or self._has_readers(mfc, step)):
            return None
        oldest_version = step - self._allowed_staleness(mfc, step, position)
        if mfc.role in self._updaters and self.versions[mfc.role] < oldest_version:
            return None
        span = self._span(step)
        if position == span.stop or (mfc.name in self.graph.after_filter and not self._is_sampled(step)):
            return None
        prompts = self.prompts(mfc, PromptRange(step, position, span.stop))
        stop = span.stop if len(prompts) <= mfc.batch_size else prompts[mfc.batch_size]
        if mfc.name in self._reads_data and self._fetched_stop.get(step, 0) < stop:
            return None
        if any(self._done[parent] < stop for parent in self._parents[mfc.name]):
            return None
        self._running.add(mfc.name)
        is_last = stop == span.stop and self._is_sampled(step)
        self._next[mfc.name] = self._start_of(step + 1) if is_last else (step, stop)
        return StartCall(mfc.name, PromptRange(step, position, stop))


@dataclass(frozen=True)
class RowsReady:
    """A fetch (``mfc`` is None) or a call has finished; ``outputs[rank]`` describes the rows now stored on a worker.

    ``carried[rank]`` are those of prompts of the next step. ``results`` are for the curriculum.
    """

    mfc: str | None
    span: PromptRange
    outputs: dict[int, BatchMeta]
    state: State | None = None
    carried: dict[int, BatchMeta] = field(default_factory=dict)
    results: tuple[PromptResult, ...] = ()


@dataclass(frozen=True)
class Dispatch:
    span: PromptRange
    call: PrepareCall


Action = FetchRows | Dispatch | FinishStep


class MasterState(Scheduler):
    """The scheduler of one run, with the locations of all rows. ``start``, ``handle`` and ``resume`` change it.

    ``replayed`` are calls whose results are known: they are not executed, and so their inputs are not transferred.
    ``carried`` are rows on worker 0 for the prompts of the first step.
    """

    def __init__(
        self,
        graph: Graph,
        plan: ExecutionPlan,
        schedule: TrainSchedule,
        max_staleness: int = 0,
        strict_step_order: bool = False,
        replayed: Collection[tuple[str, PromptRange]] = (),
        carried: BatchMeta | None = None,
        pauses_training: bool = False,
    ) -> None:
        super().__init__(graph, schedule, max_staleness, strict_step_order, pauses_training)
        self.plan, self.replayed = plan, frozenset(replayed)
        self.states: dict[str, State] = {m.role or m.name: {} for m in graph.mfcs}
        keys = dict.fromkeys(key for m in graph.mfcs for key in (*m.inputs, *m.outputs, *m.carried))
        self._columns = {key: transfer.ColumnIndex() for key in keys}
        self._forwarded = forwarded_keys(graph, plan, self.max_staleness)
        self._busy = busy_ranks(graph, plan, self.max_staleness)
        self._stale: list[PromptRange] = []  # finished steps whose rows are still in the index
        if carried is not None:
            self._put(0, carried)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def start(self) -> list[Action]:
        return [*self.fetch_ahead()]

    def handle(self, event: RowsReady) -> list[Action]:
        """Process an event and return the resulting actions in order."""
        self._forget_finished()
        self._store(event)
        if event.mfc is not None and event.state is not None:
            self.states[self.graph[event.mfc].role or event.mfc] = event.state
        decisions = self.advance(event.mfc, event.span)
        self._stale = [decision.span for decision in decisions if isinstance(decision, FinishStep)]
        return [self._call(d) if isinstance(d, StartCall) else d for d in decisions]

    def resume(self) -> list[Action]:
        """Return the training calls that have waited, as ``resume_training``."""
        return [self._call(start) for start in self.resume_training()]

    def is_kept(self, prompt: int) -> bool:
        assert self.graph.filter_mfc is not None
        return bool(self._columns[self.graph.filter_mfc.outputs[0]].prompts[prompt].ids)

    def _store(self, event: RowsReady) -> None:
        keys = self.graph.dataset_keys if event.mfc is None else self.graph[event.mfc].outputs
        no_rows = dict.fromkeys(range(event.span.start, event.span.stop), transfer.NO_ROWS)
        for key in keys:
            self._columns[key].prompts |= no_rows
        for rank, meta in chain(event.outputs.items(), event.carried.items()):
            self._put(rank, meta)

    def _put(self, rank: int, meta: BatchMeta) -> None:
        """Record rows that are stored on a worker."""
        producer, meta = transfer.RowHolders((rank,)), transfer.sorted_rows(meta)
        known = [(self._columns[key], column) for key, column in meta.columns.items() if key in self._columns]
        for index, column in known:
            index.dtype = column.dtype
        firsts = [i for i, row in enumerate(meta.ids) if not i or row.prompt != meta.ids[i - 1].prompt]
        for start, stop in pairwise((*firsts, len(meta.ids))):
            prompt, ids = meta.ids[start].prompt, meta.ids[start:stop]
            for index, column in known:
                before = index.prompts.get(prompt, transfer.NO_ROWS)
                assert not before.ids, f"two workers produced rows of prompt {prompt}"
                index.prompts[prompt] = transfer.PromptRows(ids, column.lengths[start:stop], producer)

    def carried_rows(self, step: int) -> BatchMeta | None:
        """Return the rows that calls of earlier steps have left for the prompts of a step."""
        span, parts = self.schedule.span(step), list[BatchMeta]()
        for key in dict.fromkeys(key for mfc in self.graph.mfcs for key in mfc.carried):
            index = self._columns[key]
            found = [rows for prompt in range(span.start, span.stop) if (rows := index.prompts.get(prompt))]
            ids = tuple(chain.from_iterable(rows.ids for rows in found))
            lengths = tuple(chain.from_iterable(rows.lengths for rows in found))
            parts += [BatchMeta(ids, {key: ColumnMeta(index.dtype or "uint8", lengths)})] if ids else []
        assert len(parts) < 2, "calls carry rows under one key"
        return parts[0] if parts else None

    def _forget_finished(self) -> None:
        for span, index in product(self._stale, self._columns.values()):
            for prompt in range(span.start, span.stop):
                index.prompts.pop(prompt, None)

    def _call(self, start: StartCall) -> Dispatch:
        mfc, span = self.graph[start.mfc], start.span
        prompts = self.prompts(mfc, span)
        carried = [key for key in mfc.carried if all(prompt in self._columns[key].prompts for prompt in prompts)]
        rows_of = lambda key: [*map(self._columns[key].prompts.__getitem__, prompts)]
        inputs = {key: rows_of(key) for key in (*mfc.inputs, *carried)}
        moved = inputs | {key: rows_of(key) for key in self._forwarded.get(mfc.name, ())}
        first = {key: next((rows.ids[0] for rows in of_key if rows.ids), None) for key, of_key in moved.items()}
        shared = tuple(key for key, row in first.items() if row and row.sample == PROMPT)  # all rows of a key agree
        own = [rows for key, rows in inputs.items() if key not in shared]
        kept = transfer.rows_with_all_inputs(prompts, [*inputs.values()], own)
        ids = tuple(chain.from_iterable(kept))
        columns = {
            key: ColumnMeta(self._columns[key].dtype or "uint8", transfer.row_lengths(rows, kept, key in shared))
            for key, rows in moved.items()
        }
        forwarded = {key: columns.pop(key) for key in moved.keys() - inputs.keys()}
        weights = transfer.row_bytes(columns.values()) if columns else [1] * len(ids)
        layout = self.plan[mfc.name].layout
        assignment, minibatches = partition_rows(ids, weights, layout.strategy.dp, mfc.n_minibatches)
        is_replayed = (mfc.name, span) in self.replayed
        holders = Holders((), {})
        if not is_replayed:
            holders = transfer.record_transfer(moved, kept, assignment, layout, self._busy)
        call = PrepareCall(request=0, mfc=mfc.name, step=span.step, version=self.versions.get(mfc.role or "", 0),
                           inputs=BatchMeta(ids, columns), shared=shared,
                           holders=holders, assignment=assignment, minibatches=minibatches,
                           state=self.states[mfc.role or mfc.name], forwarded=forwarded)  # fmt: skip
        return Dispatch(span, call)

    def holders_of(self, prompts: range, keys: tuple[str, ...]) -> dict[int, list[RowId]]:
        """Return the rows of ``prompts`` with any of ``keys`` by worker; finished steps count until the next event."""
        held: dict[int, set[RowId]] = {}
        for key in keys:
            for rows in filter(None, map(self._columns[key].prompts.get, prompts)):
                if rows.ids:
                    held.setdefault(rows.holders.ranks[0], set()).update(rows.ids)
        return {rank: sorted(rows) for rank, rows in held.items()}
