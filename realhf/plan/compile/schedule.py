"""What the master does next, as a pure machine: events in, actions out. No IO, no clock, no torch.

The list of events determines everything: the same events give the same actions, in a run and in a simulation.
A call starts when its rows have their inputs, the MFC is not running already, and its weights are fresh enough.
Where a call picks prompts (``Graph.picker``), a step is drawn on until enough are kept or the resamples are used up; then
the calls that read what it keeps begin, with the first so many of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import MFC, Graph
from realhf.api.messages import PrepareCall, State
from realhf.plan.compile.dp_partition import partition_rows
from realhf.plan.compile.row_locations import (
    NO_ROWS,
    ColumnIndex,
    PromptRows,
    RowHolders,
    record_transfer,
    row_bytes,
    row_lengths,
    rows_with_all_inputs,
    sorted_rows,
)


@dataclass(frozen=True)
class PromptRange:
    """Prompts of one step: positions ``start <= p < stop`` of the data stream."""

    step: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowsReady:
    """Rows came to be: by a fetch (``mfc`` is None) or a call. ``outputs[rank]`` is what each worker now holds."""

    mfc: str | None
    span: PromptRange
    outputs: dict[int, BatchMeta]
    state: State | None = None


@dataclass(frozen=True)
class FetchRows:
    span: PromptRange


@dataclass(frozen=True)
class Dispatch:
    span: PromptRange
    call: PrepareCall


@dataclass(frozen=True)
class FinishStep:
    """Every MFC has seen every row of the step: report it, then drop its rows."""

    span: PromptRange


Action = FetchRows | Dispatch | FinishStep


@dataclass(frozen=True)
class TrainSchedule:
    """Prompts per step, prompts in all (the last step may be smaller), steps in all; it begins with ``first_step``.

    A step may draw prompts ``resamples`` times more, each time a batch at the most: their numbers are left free.
    """

    batch_size: int
    n_prompts: int
    n_steps: int
    first_step: int = 0
    resamples: int = 0

    @property
    def stride(self) -> int:
        """From the number of a step's first prompt to that of the next step's."""
        return self.batch_size * (1 + self.resamples)

    def span(self, step: int) -> PromptRange:
        """Return a step's own prompts, those that it begins with."""
        start = step * self.stride
        return PromptRange(step, start, start + min(self.batch_size, self.n_prompts - step * self.batch_size))


def make_train_schedule(
    batch_size: int, n_rows: int, epochs: int, max_steps: int | None, resamples: int = 0
) -> TrainSchedule:
    """Return how long a run is: ``epochs`` passes over ``n_rows``, or ``max_steps`` where that is fewer steps."""
    total = n_rows * epochs
    steps = -(-total // batch_size)
    return TrainSchedule(batch_size, total, steps if max_steps is None else min(steps, max_steps), resamples=resamples)


def next_resample(n_drawn: int, n_kept: int, n_wanted: int, most: int) -> int:
    """Return how many prompts to draw so that, kept at the rate so far, what is missing is there; ``most`` at most."""
    missing = n_wanted - n_kept
    return min(most, -(-missing * n_drawn // n_kept)) if n_kept else most


class MasterState:
    """The scheduler of one run. ``handle`` is its only mutator."""

    def __init__(
        self,
        graph: Graph,
        plan: ExecutionPlan,
        schedule: TrainSchedule,
        max_staleness: int = 0,
        strict_step_order: bool = False,
    ) -> None:
        self.graph, self.plan, self.schedule, self.max_staleness = graph, plan, schedule, max_staleness
        self.strict_step_order = (
            strict_step_order  # nothing is trained on a step before the last one is finished: it may be saved then
        )
        self.versions: dict[str, int] = dict.fromkeys(graph.roles, schedule.first_step)
        self.states: dict[str, State] = {m.role or m.name: {} for m in graph.mfcs}
        self.finished_steps = schedule.first_step
        self._tables: dict[str, ColumnIndex] = {k: ColumnIndex() for m in graph.mfcs for k in (*m.inputs, *m.outputs)}
        first = schedule.first_step, schedule.first_step * schedule.stride
        self._next = {m.name: first for m in graph.mfcs}  # step and number of the first prompt not yet issued
        self._done: dict[str, int] = {m.name: first[1] for m in graph.mfcs}
        self._drawn: dict[int, list[PromptRange]] = {}  # what a step drew beyond its own prompts
        self._picked: dict[int, frozenset[int]] = {}  # prompts that are trained on, of steps that draw no more
        self._running: set[str] = set()
        self._fetched = self._fetching = schedule.first_step
        self._stale: list[PromptRange] = []  # finished steps whose rows are still on record

    @property
    def is_over(self) -> bool:
        return self.finished_steps >= self.schedule.n_steps

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key of the graph."""
        return tuple(self._tables)

    def start(self) -> list[Action]:
        return self._fetch_ahead()

    def handle(self, event: RowsReady) -> list[Action]:
        """Take one event in and return what to do now, in order."""
        self._forget_finished()
        self._store(event)
        actions: list[Action] = []
        if event.mfc is not None:
            self._complete(self.graph[event.mfc], event)
            picker = self.graph.filter_mfc
            actions += self._resample(picker, event.span.step) if picker and picker.name == event.mfc else []
        elif event.span == self.schedule.span(event.span.step):
            self._fetched += 1
        actions += [*self._finish_steps(), *self._fetch_ahead()]
        for mfc in self.graph.topological:
            if (dispatch := self._try_issue(mfc)) is not None:
                actions.append(dispatch)
        return actions

    def _store(self, event: RowsReady) -> None:
        made = self.graph.dataset_keys if event.mfc is None else self.graph[event.mfc].outputs
        through = dict.fromkeys(range(event.span.start, event.span.stop), NO_ROWS)
        for key in made:
            self._tables[key].prompts |= through
        for rank, meta in event.outputs.items():
            producer, meta = RowHolders((rank,)), sorted_rows(meta)
            known = [(self._tables[key], column) for key, column in meta.columns.items() if key in self._tables]
            for table, column in known:
                table.dtype = column.dtype
            firsts = [i for i, row in enumerate(meta.ids) if not i or row.prompt != meta.ids[i - 1].prompt]
            for start, stop in pairwise((*firsts, len(meta.ids))):
                prompt, ids = meta.ids[start].prompt, meta.ids[start:stop]
                for table, column in known:
                    assert not table.prompts[prompt].ids, f"two workers made rows of prompt {prompt}"
                    table.prompts[prompt] = PromptRows(ids, column.lengths[start:stop], producer)

    def _complete(self, mfc: MFC, event: RowsReady) -> None:
        self._running.discard(mfc.name)
        self._done[mfc.name] = event.span.stop
        if event.state is not None:
            self.states[mfc.role or mfc.name] = event.state
        if event.span.stop == self._span(event.span.step).stop:
            for role in self.graph.roles:
                if self.graph.updater(role) is mfc:
                    self.versions[role] = event.span.step + 1

    def _span(self, step: int) -> PromptRange:
        """Return a step's prompts as far as they are drawn."""
        own, further = self.schedule.span(step), self._drawn.get(step, [])
        return replace(own, stop=further[-1].stop) if further else own

    def _resample(self, picker: MFC, step: int) -> list[Action]:
        """When all of a step's prompts were looked at, draw more of them, or settle which ones are trained on."""
        span, further = self._span(step), self._drawn.setdefault(step, [])
        if self._done[picker.name] < span.stop:
            return []
        own = self.schedule.span(step)
        wanted, kept = own.stop - own.start, self._kept(picker, span)
        if len(kept) < wanted and len(further) < self.schedule.resamples:
            n = next_resample(span.stop - span.start, len(kept), wanted, self.schedule.batch_size)
            further.append(PromptRange(step, span.stop, span.stop + n))
            return [FetchRows(further[-1])]
        self._picked[step] = frozenset(kept[:wanted])
        for name, at in self._next.items():
            if at == (step, span.stop):
                self._next[name] = self._begin(step + 1)
        return []

    def _kept(self, picker: MFC, span: PromptRange) -> list[int]:
        """Return the prompts of which the picker kept rows."""
        table = self._tables[picker.outputs[0]]
        return [prompt for prompt in range(span.start, span.stop) if table.prompts[prompt].ids]

    def _begin(self, step: int) -> tuple[int, int]:
        return step, step * self.schedule.stride

    def _is_drawn(self, step: int) -> bool:
        return self.graph.filter_mfc is None or step in self._picked

    def _finish_steps(self) -> list[Action]:
        actions: list[Action] = []
        while not self.is_over:
            span = self._span(self.finished_steps)
            if self._fetched <= span.step or not self._is_drawn(span.step):
                break
            if any(done < span.stop for done in self._done.values()):
                break
            self._drawn.pop(span.step, None)
            self._picked.pop(span.step, None)
            self._stale.append(span)
            self.finished_steps += 1
            actions.append(FinishStep(span))
        return actions

    def _forget_finished(self) -> None:
        for span in self._stale:
            for table in self._tables.values():
                for prompt in range(span.start, span.stop):
                    table.prompts.pop(prompt, None)
        self._stale = []

    def _fetch_ahead(self) -> list[Action]:
        """Keep one step of data in hand beyond the one that is being worked on."""
        actions: list[Action] = []
        wanted = min(self.finished_steps + 2 + self.max_staleness, self.schedule.n_steps)
        while self._fetching < wanted:
            actions.append(FetchRows(self.schedule.span(self._fetching)))
            self._fetching += 1
        return actions

    def _try_issue(self, mfc: MFC) -> Dispatch | None:
        step, position = self._next[mfc.name]
        if mfc.name in self._running or step >= min(self.schedule.n_steps, self._fetched):
            return None
        span = self._span(step)
        if position == span.stop or (mfc.name in self.graph.after_filter and not self._is_drawn(step)):
            return None
        stop = self._cut(mfc, span, position)
        if self.strict_step_order and mfc.is_train and step > self.finished_steps:
            return None
        changes = mfc.role is not None and self.graph.updater(mfc.role) is not None
        if changes and self.versions[mfc.role or ""] < step - mfc.allowed_staleness(self.max_staleness):
            return None
        prompts = set(range(position, stop))
        if not all(prompts <= self._tables[key].prompts.keys() for key in mfc.inputs):
            return None
        self._running.add(mfc.name)
        self._next[mfc.name] = (step, stop) if stop < span.stop or not self._is_drawn(step) else self._begin(step + 1)
        part = PromptRange(step, position, stop)
        return Dispatch(part, self._call(mfc, part))

    def _cut(self, mfc: MFC, span: PromptRange, position: int) -> int:
        """Return where a call stops that begins with a step's prompt ``position`` and has room for ``batch_size``."""
        prompts = self._prompts(mfc, replace(span, start=position))
        return span.stop if len(prompts) <= mfc.batch_size else prompts[mfc.batch_size]

    def _prompts(self, mfc: MFC, span: PromptRange) -> Sequence[int]:
        """Return the prompts of a span that a call is about."""
        every = range(span.start, span.stop)
        if mfc.name not in self.graph.after_filter:
            return every
        return [prompt for prompt in every if prompt in self._picked[span.step]]

    def _call(self, mfc: MFC, span: PromptRange) -> PrepareCall:
        prompts = self._prompts(mfc, span)
        found = {key: [*map(self._tables[key].prompts.__getitem__, prompts)] for key in mfc.inputs}
        first = {key: next((rows.ids[0] for rows in of_prompts if rows.ids), None) for key, of_prompts in found.items()}
        shared = tuple(key for key, row in first.items() if row and row.sample == PROMPT)  # a key's rows are all alike
        kept = rows_with_all_inputs(
            prompts, [*found.values()], [rows for key, rows in found.items() if key not in shared]
        )
        ids = tuple(chain.from_iterable(kept))
        columns = {
            key: ColumnMeta(self._tables[key].dtype or "uint8", row_lengths(rows, kept, key in shared))
            for key, rows in found.items()
        }
        weights = row_bytes(columns.values()) if columns else [1] * len(ids)
        layout = self.plan[mfc.name].layout
        assignment, minibatches = partition_rows(ids, weights, layout.strategy.dp, mfc.n_minibatches)
        return PrepareCall(
            request=0,
            mfc=mfc.name,
            step=span.step,
            version=self.versions.get(mfc.role or "", 0),
            inputs=BatchMeta(ids, columns),
            holders=record_transfer(found, kept, assignment, layout),
            shared=shared,
            assignment=assignment,
            minibatches=minibatches,
            state=self.states[mfc.role or mfc.name],
        )

    def holders_of(self, prompts: range, keys: tuple[str, ...]) -> dict[int, list[RowId]]:
        """Return the workers that hold any of ``keys`` for these prompts, with the rows they hold.

        A finished step's rows are on record until the next event.
        """
        found: dict[int, set[RowId]] = {}
        for key in keys:
            for rows in filter(None, map(self._tables[key].prompts.get, prompts)):
                if rows.ids:
                    found.setdefault(rows.holders.ranks[0], set()).update(rows.ids)
        return {rank: sorted(rows) for rank, rows in found.items()}
