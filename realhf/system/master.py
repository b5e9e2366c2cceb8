"""The master worker: feeds events to ``MasterState`` and carries out the actions it answers with."""

import gc
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.messages import (
    AwaitCheckpoint,
    Checkpoint,
    Done,
    ExecuteCall,
    Fetch,
    FreeRows,
    Hello,
    PrepareCall,
    ReadRows,
    Ready,
    Save,
    Shutdown,
    Start,
    ToWorker,
)
from realhf.base.errors import RunStopped
from realhf.plan.compile.program import home_layout, layout_ranks
from realhf.plan.compile.schedule import Action, Dispatch, FetchRows, FinishStep, MasterState, PromptRange, RowsReady
from realhf.plan.run_spec import RunSpec
from realhf.system.checkpoint.best_models import Best, Record
from realhf.system.checkpoint.manifest import Manifest, aside, checkpoints_of, commit, flat_options
from realhf.system.metrics.telemetry import Telemetry
from realhf.system.transport.channel import MasterEnd, deadline
from realhf.system.transport.heartbeat import HeartbeatMonitor
from realhf.system.transport.reply_receiver import NODES_SETTLE_S, ReplyReceiver, Watch, listed


@dataclass
class _Request:
    """A request under way. ``then`` takes the replies that say more than "done", and may answer with an event."""

    what: str
    step: int
    mfc: str  # empty where it is about none
    is_due: bytearray  # 1 for every worker whose reply is awaited, 0 for others
    n_due: int
    left: Callable[[], float]
    then: Callable[[list[Done]], RowsReady | None]
    replies: list[Done] = field(default_factory=list)

    @property
    def waiting(self) -> list[int]:
        """The workers whose reply is awaited."""
        return [rank for rank, is_due in enumerate(self.is_due) if is_due]

    def take(self, reply: Done) -> bool:
        """Take a reply in; tell whether it was the last. Thousands come: nothing is kept of those that say no more."""
        self.n_due -= self.is_due[reply.rank]
        self.is_due[reply.rank] = 0
        if not reply.is_empty:
            self.replies.append(reply)
        return not self.n_due


class Master:
    """One run from start to end. ``watch`` tells of dead workers, ``telemetry`` writes down what happens."""

    def __init__(
        self,
        run: RunSpec,
        channel: MasterEnd,
        watch: Watch,
        telemetry: Telemetry,
        last: tuple[Path, Manifest] | None = None,
    ) -> None:
        """``last`` is the checkpoint to go on from, and its folder."""
        self.run, self.channel, self.telemetry = run, channel, telemetry
        pulses = HeartbeatMonitor(run.config.heartbeat_timeout or float("inf"))
        patience = NODES_SETTLE_S if run.config.n_nodes > 1 else 0.0
        self.mailbox = ReplyReceiver(channel, watch, self._activity, lambda rank: run.paths.log(f"worker-{rank}"),
                               nodes_settle_s=patience, pulses=pulses)  # fmt: skip
        self.checkpoint = str(last[0]) if last else ""
        length = replace(run.schedule, first_step=last[1].step) if last else run.schedule
        in_line = run.writes_checkpoints or bool(run.graph.evaluation)
        self.state = MasterState(run.graph, run.plan, length, run.config.max_staleness, in_line)
        self.state.states |= last[1].states if last else {}
        self.writing: Manifest | None = None  # a checkpoint that was begun
        self.requests: dict[int, _Request] = {}
        self.waiting: list[RowsReady] = []  # events that came while held-out rows were tried
        self.next_request = 0
        self.last_save = self.last_checkpoint = self.last_trial = time.monotonic()
        self.best = Best(run.paths.best, run.config.exp_ctrl.keep_best)

    def train(self) -> None:
        """Run the experiment; ``RunFailed`` when it ends in any other way than by doing all of its steps.

        ``Stopped`` where it was asked to end before, with a checkpoint of the step that it was at.
        """
        self._gather_workers()
        if self.run.graph.evaluation and self.run.config.exp_ctrl.eval_at_start and not self.checkpoint:
            self._evaluate(0)
        self._perform(self.state.start())
        while self.requests or self.waiting or self.writing:
            if not self.requests and not self.waiting:
                self._settle()  # the last step's
            elif (event := self.waiting.pop(0) if self.waiting else self._next_event()) is not None:
                self.telemetry.event(event)
                self._perform(self.state.handle(event))
        assert self.state.is_over, "nothing is under way, and the run is not over"
        self._tell_all(Shutdown())

    def _gather_workers(self) -> None:
        ranks, patience = range(self.run.plan.n_workers), self.run.config.startup_timeout
        hello = self.mailbox.receive_all(Hello, ranks, patience, "to come up")
        self._tell_all(Start(hello[0].address, hello[0].port, self.checkpoint))
        self.telemetry.ready(self.mailbox.receive_all(Ready, ranks, patience, "to build its models"))

    def _tell_all(self, message: ToWorker) -> None:
        self.channel.send(range(self.run.plan.n_workers), message)

    def _activity(self, rank: int) -> str:
        asked = ", ".join(r.what for r in self.requests.values() if r.is_due[rank])
        return asked or ("nothing it was asked for" if self.requests else "its start-up")

    def _next_event(self) -> RowsReady | None:
        """Take replies in until a request has all of its own; return the event that this is, if any."""
        oldest = next(iter(self.requests.values()))  # all have the same time
        patience = self.run.config.call_timeout

        def complaint() -> str:
            return f"waited {patience:.0f} s for {oldest.what} from worker {listed(oldest.waiting)}"

        while True:
            message = self.mailbox.receive(oldest.left, complaint, lambda: oldest.waiting)
            assert isinstance(message, Done), f"a worker that is ready says Done, not {type(message).__name__}"
            request = self.requests[message.request]
            self.telemetry.reply(request.step, request.mfc, message)
            if request.take(message):
                del self.requests[message.request]
                return request.then(sorted(request.replies, key=lambda r: r.rank))

    def _ask(
        self,
        ranks: Collection[int],
        message: Callable[[int], ToWorker],
        what: str,
        step: int,
        then: Callable[[list[Done]], RowsReady | None],
        mfc: str = "",
    ) -> int:
        """Send ``message(request)`` to every rank; ``then`` is called with the replies. Returns the number."""
        self.next_request += 1
        sent = message(self.next_request)
        self._await(ranks, what, step, then, mfc)
        self.channel.send(ranks, sent)
        return self.next_request

    def _await(
        self,
        ranks: Iterable[int],
        what: str,
        step: int,
        then: Callable[[list[Done]], RowsReady | None],
        mfc: str = "",
    ) -> None:
        left = deadline(self.run.config.call_timeout)
        is_due = bytearray(self.run.plan.n_workers)
        for rank in ranks:
            is_due[rank] = 1
        self.requests[self.next_request] = _Request(what, step, mfc, is_due, sum(is_due), left, then)

    def _perform(self, actions: list[Action]) -> None:
        """Carry out actions; the rows of all calls move before any is run, so that none waits for another."""
        runs: list[tuple[ExecuteCall, Dispatch]] = []
        for action in actions:
            match action:
                case FetchRows(span):
                    self._fetch(span)
                case Dispatch(span, call):
                    runs.append((ExecuteCall(self._dispatch(span, call)), action))
                case FinishStep(span):
                    self._finish_step(span)
        for message, dispatch in runs:
            self.channel.send(layout_ranks(self.run.program[dispatch.call.mfc]), message)

    def _fetch(self, span: PromptRange) -> None:
        self._ask(
            self.run.fetch_ranks,
            lambda request: Fetch(request, span.step, span.start, span.stop),
            f"the data of step {span.step + 1}",
            span.step,
            lambda replies: RowsReady(None, span, _outputs(replies)),
        )

    def _dispatch(self, span: PromptRange, call: PrepareCall) -> int:
        ranks = layout_ranks(self.run.program[call.mfc]) | call.holders.ranks

        def finished(replies: list[Done]) -> RowsReady:
            self.telemetry.call_done(call, replies)
            states = [reply.state for reply in replies if reply.state is not None]
            return RowsReady(call.mfc, span, _outputs(replies), states[0] if states else None)

        what = f"{call.mfc} of step {span.step + 1}"
        return self._ask(sorted(ranks), lambda request: msgspec.structs.replace(call, request=request), what,
                         span.step, finished, call.mfc)  # fmt: skip

    def _finish_step(self, span: PromptRange) -> None:
        if span.step >= self.run.eval_schedule.first_step:
            self._tell_all(FreeRows(span.start, span.stop))
            return
        control, step = self.run.config.exp_ctrl, span.step + 1
        is_tried = bool(self.run.graph.evaluation) and (self.state.is_over or self._is_due(
            step, control.eval_freq_steps, control.eval_freq_epochs, control.eval_freq_secs, self.last_trial
        ))  # fmt: skip
        self.telemetry.step_done(span.step, self.state.versions, is_tried)
        self._log_generations(span)
        self._tell_all(FreeRows(span.start, span.stop))
        if is_tried:
            self._evaluate(step)
        if self.state.is_over or self._is_due(
            step, control.save_freq_steps, control.save_freq_epochs, control.save_freq_secs, self.last_save
        ):
            self._save(step)
        self._settle()
        is_to_end = not self.state.is_over and self.run.writes_checkpoints and self.run.paths.stop.exists()
        if self.run.writes_checkpoints and (self.state.is_over or is_to_end or self._is_due(
            step, control.ckpt_freq_steps, control.ckpt_freq_epochs, control.ckpt_freq_secs, self.last_checkpoint
        )):  # fmt: skip
            self._checkpoint(step)
        if is_to_end:
            self._end_early(step)

    def _evaluate(self, step: int) -> None:
        """Try the held-out rows with the weights of this step; what happens in training meanwhile waits."""
        trial = MasterState(self.run.graph.eval_graph, self.run.plan, self.run.eval_schedule)
        trial.states |= {name: state for name, state in self.state.states.items() if name in trial.states}
        self._perform(trial.start())
        while not trial.is_over:
            event = self._next_event()
            if event is not None and event.span.step < self.run.eval_schedule.first_step:
                self.waiting.append(event)
            elif event is not None:
                self._perform(trial.handle(event))
        self.last_trial = time.monotonic()
        if (record := self.best.record(step, self.telemetry.evaluated(step))) is not None:
            self._keep(record)

    def _log_generations(self, span: PromptRange) -> None:
        """Ask for a few of the step's rows in words; the replies are merged by row and written down."""
        scores = [k for k, m in self.run.graph.producer.items() if m.interface_key(k) == "rewards"]
        keys = tuple(k for k in dict.fromkeys((*self.telemetry.logged_keys, *scores)) if k in self.state.keys)
        limit = self.run.config.n_logged_generations
        if "tokens" not in keys or not limit:
            return
        prompts = range(span.start, span.stop if limit < 0 else min(span.stop, span.start + limit))
        held = self.state.holders_of(prompts, keys)

        def written(replies: list[Done]) -> None:
            self.telemetry.generations(span.step + 1, [row for r in replies for row in r.values["rows"]], limit)

        self.next_request += 1
        self._await(held, f"the generations of step {span.step + 1}", span.step, written)
        for rank, rows in held.items():
            self.channel.send((rank,), ReadRows(self.next_request, tuple(rows), keys))

    def _is_due(self, step: int, steps: int | None, epochs: int | None, seconds: int | None, last: float) -> bool:
        """Tell whether something that is done every so many steps, epochs or seconds is to be done after a step."""
        before, now = ((s * self.run.schedule.batch_size) // self.run.n_rows for s in (step - 1, step))
        return bool(
            (steps and step % steps == 0)
            or (epochs and now // epochs > before // epochs)
            or (seconds and time.monotonic() - last >= seconds)
        )

    def _checkpoint(self, step: int) -> None:
        """Have every worker copy its part; inboxes are in order, so it is that of this step."""
        self.last_checkpoint = time.monotonic()
        run = self.run
        layouts = {role: home_layout(run.graph, run.plan, role) for role in run.updated_roles}
        self.writing = Manifest(step, dict(self.state.states), layouts, {}, run.data_digest, flat_options(run.config))
        folder = str(aside(run.paths.checkpoints, step))
        everyone = range(run.plan.n_workers)
        self._ask(
            everyone,
            lambda request: Checkpoint(request, step - 1, folder),
            f"checkpoint {step}",
            step - 1,
            ignore_replies,
        )

    def _settle(self) -> None:
        """Have the checkpoint that was begun a step ago finished, and let it count."""
        if self.writing is None:
            return
        manifest, self.writing = self.writing, None

        def written(replies: list[Done]) -> None:
            files = {name: tuple(digest) for reply in replies for name, digest in reply.values["files"].items()}
            commit(self.run.paths.checkpoints, replace(manifest, files=files), self.run.config.exp_ctrl.keep_last)
            self.best.prune(checkpoints_of(self.run.paths.checkpoints))

        what = f"checkpoint {manifest.step} to be on the disk"
        everyone = range(self.run.plan.n_workers)
        last = manifest.step - 1
        self._ask(everyone, lambda request: AwaitCheckpoint(request, last), what, last, written)

    def _end_early(self, step: int) -> None:
        """Have the checkpoint of this step finished, and leave it at that."""
        self._settle()
        last = self.next_request
        while last in self.requests:
            self._next_event()  # of later steps, which are done again
        raise RunStopped(f"stopped after step {step} of {self.run.schedule.n_steps}, as it was asked to; go on with: "
                      f"realhf resume {self.run.paths.root}")  # fmt: skip

    def _save(self, step: int) -> None:
        """Write the models of trained roles."""
        self.last_save = time.monotonic()
        for role in self.run.saved_roles:
            self._export(role, self.run.paths.model(role, step), step, self.telemetry.saved)

    def _keep(self, record: Record) -> None:
        """Write the models of the best evaluation so far; they count when all of them are on the disk."""
        missing, found = set(self.run.saved_roles), self.telemetry.evaluation

        def saved(role: str, path: Path) -> None:
            self.telemetry.describe(path, found)
            missing.discard(role)
            if not missing:
                place = self.best.commit(record, checkpoints_of(self.run.paths.checkpoints))
                self.telemetry.kept(self.best.metric, record.value, place)

        for role in self.run.saved_roles:
            self._export(role, self.best.aside(record) / role, record.step, saved)

    def _export(self, role: str, path: Path, step: int, then: Callable[[str, Path], None]) -> None:
        """Have a model written; inboxes are in order, so the weights are those of this step."""

        last, ranks = max(step - 1, 0), home_layout(self.run.graph, self.run.plan, role).mesh.ranks

        def message(request: int) -> ToWorker:
            return Save(request, last, role, str(path))

        self._ask(ranks, message, f"saving {role}", last, lambda replies: then(role, path))


def relax_gc() -> None:
    """Spare this process the collector: a master makes many values, and none of them is part of a cycle."""
    gc.set_threshold(2_000_000, 50, 1000)


def ignore_replies(replies: list[Done]) -> None:
    """What follows from replies that only say that something is done."""


def _outputs(replies: list[Done]) -> dict[int, Any]:
    return {reply.rank: reply.outputs for reply in replies if reply.outputs is not None}
