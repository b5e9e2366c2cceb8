"""What the master does next, as a pure machine: events in, actions out. No IO, no clock, no torch.

The list of events determines everything: the same events give the same actions, in a run and in a simulation.
A call starts when its rows have their inputs, the MFC is not running already, and its weights are fresh enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from realhf.api.batch import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.graph import MFC, Graph
from realhf.api.layout import Layout
from realhf.api.messages import Call, State
from realhf.api.plan import ExecutionPlan
from realhf.plan.assign import deal_rows


@dataclass(frozen=True)
class Span:
    """Prompts of one step: positions ``start <= p < stop`` of the data stream."""

    step: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowsReady:
    """Rows came to be: by a fetch (``mfc`` is None) or a call. ``outputs[rank]`` is what each worker now holds."""

    mfc: str | None
    span: Span
    outputs: dict[int, BatchMeta]
    state: State | None = None


@dataclass(frozen=True)
class FetchRows:
    span: Span


@dataclass(frozen=True)
class Dispatch:
    span: Span
    call: Call


@dataclass(frozen=True)
class FinishStep:
    """Every MFC has seen every row of the step: report it, then drop its rows."""

    span: Span


Action = FetchRows | Dispatch | FinishStep


@dataclass(frozen=True)
class RunLength:
    """Prompts per step, prompts in all (the last step may be smaller), steps in all; it begins with ``first_step``."""

    batch_size: int
    n_prompts: int
    n_steps: int
    first_step: int = 0

    def span(self, step: int) -> Span:
        start = step * self.batch_size
        return Span(step, start, min(start + self.batch_size, self.n_prompts))


def run_length(batch_size: int, n_rows: int, epochs: int, max_steps: int | None) -> RunLength:
    """Return how long a run is: ``epochs`` passes over ``n_rows``, or ``max_steps`` where that is fewer steps."""
    total = n_rows * epochs
    steps = -(-total // batch_size)
    return RunLength(batch_size, total, steps if max_steps is None else min(steps, max_steps))


@dataclass(frozen=True, eq=False)
class _Holders:
    """Workers that hold the same rows, their producer first. One object for all these rows, told apart by identity."""

    ranks: tuple[int, ...]

    def passed_on(self, replica: tuple[int, ...]) -> "tuple[tuple[int, ...], _Holders]":
        """Return who of ``replica`` has the rows already, the sender first (the producer alone, where none has).

        Also return who has them when all of ``replica`` does.
        """
        before = set(self.ranks)
        if before.isdisjoint(replica):
            return self.ranks[:1], _Holders(self.ranks + replica)
        have = tuple(rank for rank in replica if rank in before)
        lack = tuple(rank for rank in replica if rank not in before)
        return have, _Holders(self.ranks + lack) if lack else self


@dataclass
class _Table:
    """Where the values of one key are: for every prompt its rows, for every row its holders and length."""

    dtype: str = ""
    prompts: dict[int, list[RowId]] = field(default_factory=dict)
    holders: dict[RowId, _Holders] = field(default_factory=dict)
    lengths: dict[RowId, int] = field(default_factory=dict)

    def drop(self, prompt: int) -> None:
        for row in self.prompts.pop(prompt, ()):
            del self.holders[row], self.lengths[row]


class MasterState:
    """The scheduler of one run. ``handle`` is its only mutator."""

    def __init__(
        self,
        graph: Graph,
        plan: ExecutionPlan,
        length: RunLength,
        max_staleness: int = 0,
        in_line: bool = False,
    ) -> None:
        self.graph, self.plan, self.length, self.max_staleness = graph, plan, length, max_staleness
        self.in_line = in_line  # nothing is trained on a step before the last one is finished: it may be saved then
        self.versions: dict[str, int] = dict.fromkeys(graph.roles, length.first_step)
        self.states: dict[str, State] = {m.role or m.name: {} for m in graph.mfcs}
        self.finished_steps = length.first_step
        self._tables: dict[str, _Table] = {k: _Table() for m in graph.mfcs for k in (*m.inputs, *m.outputs)}
        first = length.first_step * length.batch_size
        self._next: dict[str, int] = {m.name: first for m in graph.mfcs}  # position of the first prompt not yet issued
        self._done: dict[str, int] = {m.name: first for m in graph.mfcs}
        self._running: set[str] = set()
        self._fetched = self._fetching = length.first_step
        self._stale: list[Span] = []  # finished steps whose rows are still on record

    @property
    def is_over(self) -> bool:
        return self.finished_steps >= self.length.n_steps

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
        if event.mfc is None:
            self._fetched += 1
        else:
            self._complete(self.graph[event.mfc], event)
        actions: list[Action] = [*self._finish_steps(), *self._fetch_ahead()]
        for mfc in self.graph.topological:
            if (dispatch := self._try_issue(mfc)) is not None:
                actions.append(dispatch)
        return actions

    def _store(self, event: RowsReady) -> None:
        made = self.graph.dataset_keys if event.mfc is None else self.graph[event.mfc].outputs
        for key in made:
            table = self._tables[key]
            for prompt in range(event.span.start, event.span.stop):
                table.prompts.setdefault(prompt, [])
        for rank, meta in event.outputs.items():
            producer = _Holders((rank,))
            for key, column in meta.columns.items():
                if key not in self._tables:
                    continue
                table = self._tables[key]
                table.dtype = column.dtype
                for row in meta.ids:
                    table.prompts[row.prompt].append(row)
                table.holders.update(dict.fromkeys(meta.ids, producer))
                table.lengths.update(zip(meta.ids, column.lengths, strict=True))

    def _complete(self, mfc: MFC, event: RowsReady) -> None:
        self._running.discard(mfc.name)
        self._done[mfc.name] = event.span.stop
        if event.state is not None:
            self.states[mfc.role or mfc.name] = event.state
        if event.span.stop == self.length.span(event.span.step).stop:
            for role in self.graph.roles:
                if self.graph.updater(role) is mfc:
                    self.versions[role] = event.span.step + 1

    def _finish_steps(self) -> list[Action]:
        actions: list[Action] = []
        while not self.is_over:
            span = self.length.span(self.finished_steps)
            if self._fetched <= span.step or any(done < span.stop for done in self._done.values()):
                break
            self._stale.append(span)
            self.finished_steps += 1
            actions.append(FinishStep(span))
        return actions

    def _forget_finished(self) -> None:
        for span in self._stale:
            for table in self._tables.values():
                for prompt in range(span.start, span.stop):
                    table.drop(prompt)
        self._stale = []

    def _fetch_ahead(self) -> list[Action]:
        """Keep one step of data in hand beyond the one that is being worked on."""
        actions: list[Action] = []
        wanted = min(self.finished_steps + 2 + self.max_staleness, self.length.n_steps)
        while self._fetching < wanted:
            actions.append(FetchRows(self.length.span(self._fetching)))
            self._fetching += 1
        return actions

    def _try_issue(self, mfc: MFC) -> Dispatch | None:
        position = self._next[mfc.name]
        step = position // self.length.batch_size
        if mfc.name in self._running or position >= self.length.n_prompts:
            return None
        if step >= min(self.length.n_steps, self._fetched):
            return None
        stop = min(position + mfc.batch_size, self.length.span(step).stop)
        if self.in_line and mfc.is_train and step > self.finished_steps:
            return None
        changes = mfc.role is not None and self.graph.updater(mfc.role) is not None
        if changes and self.versions[mfc.role or ""] < step - mfc.lag(self.max_staleness):
            return None
        if any(p not in self._tables[key].prompts for key in mfc.inputs for p in range(position, stop)):
            return None
        self._running.add(mfc.name)
        self._next[mfc.name] = stop
        span = Span(step, position, stop)
        return Dispatch(span, self._call(mfc, span))

    def _call(self, mfc: MFC, span: Span) -> Call:
        prompts = range(span.start, span.stop)
        tables = {key: self._tables[key] for key in mfc.inputs}
        shared = tuple(k for k, t in tables.items() if any(r.sample == PROMPT for p in prompts for r in t.prompts[p]))
        ids = tuple(row for p in prompts for row in self._rows_of(p, tables, shared))
        of_prompts = tuple(RowId(row.prompt, PROMPT) for row in ids)
        found = {key: of_prompts if key in shared else ids for key in tables}
        columns = {
            key: ColumnMeta(table.dtype or "uint8", tuple(map(table.lengths.__getitem__, found[key])))
            for key, table in tables.items()
        }
        weights = [max(sizes) for sizes in zip(*(c.sizes for c in columns.values()), strict=True)] or [1] * len(ids)
        layout = self.plan[mfc.name].layout
        assignment, minibatches = deal_rows(ids, weights, layout.strategy.dp, mfc.n_minibatches)
        holders = _pass_on({key: table.holders for key, table in tables.items()}, found, assignment, layout)
        return Call(
            request=0,
            mfc=mfc.name,
            step=span.step,
            version=self.versions.get(mfc.role or "", 0),
            inputs=BatchMeta(ids, columns),
            holders=holders,
            shared=shared,
            assignment=assignment,
            minibatches=minibatches,
            state=self.states[mfc.role or mfc.name],
        )

    @staticmethod
    def _rows_of(prompt: int, tables: Mapping[str, _Table], shared: tuple[str, ...]) -> list[RowId]:
        """Rows of a prompt that have every input; a producer may have dropped some (best of n)."""
        if any(RowId(prompt, PROMPT) not in tables[key].holders for key in shared):
            return []
        own = [set(t.prompts[prompt]) for key, t in tables.items() if key not in shared]
        if not own:
            return [RowId(prompt, PROMPT)]
        return sorted(set.intersection(*own))

    def holders_of(self, prompts: range, keys: tuple[str, ...]) -> dict[int, list[RowId]]:
        """Return the workers that hold any of ``keys`` for these prompts, with the rows they hold.

        A finished step's rows are on record until the next event.
        """
        found: dict[int, list[RowId]] = {}
        for key in keys:
            table = self._tables[key]
            for prompt in prompts:
                for row in table.prompts.get(prompt, ()):
                    found.setdefault(table.holders[row].ranks[0], []).append(row)
        return {rank: sorted(set(rows)) for rank, rows in found.items()}


def _pass_on(
    holders: Mapping[str, dict[RowId, _Holders]],
    rows: Mapping[str, Sequence[RowId]],
    assignment: tuple[tuple[int, ...], ...],
    layout: Layout,
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return, for every key, who of its destinations has each row already, the sender first; else its producer.

    All destinations are put on record: a later call finds the row there, since inboxes are first in, first out.
    """
    chosen: dict[str, list[tuple[int, ...]]] = {key: [()] * len(at) for key, at in rows.items()}
    for d, part in enumerate(assignment):
        replica = layout.replica(d)
        known: dict[_Holders, tuple[tuple[int, ...], _Holders]] = {}
        for key, record in holders.items():
            at, senders = rows[key], chosen[key]
            for i in part:
                before = record[at[i]]
                if before not in known:
                    known[before] = before.passed_on(replica)
                senders[i], record[at[i]] = known[before]
    return {key: tuple(senders) for key, senders in chosen.items()}
