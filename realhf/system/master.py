"""The master worker: feeds events to ``MasterState`` and carries out the actions it answers with."""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from realhf.api.messages import (
    Call,
    Checkpoint,
    Collect,
    Done,
    Drop,
    Fetch,
    Hello,
    Ready,
    Run,
    Save,
    Settle,
    Start,
    Stop,
    ToWorker,
)
from realhf.plan.program import home, meshes_of
from realhf.plan.schedule import Action, Dispatch, FetchRows, FinishStep, MasterState, RowsReady, Span
from realhf.system.channel import MasterEnd, deadline
from realhf.system.mailbox import Mailbox, Watch, listed
from realhf.system.pulse import Pulses
from realhf.system.recovery import Manifest, aside, commit, flat_options
from realhf.system.run import RunSpec
from realhf.system.telemetry import Telemetry


@dataclass
class _Request:
    """A request under way. ``then`` takes all replies and may answer with an event."""

    what: str
    step: int
    waiting: set[int]
    left: Callable[[], float]
    then: Callable[[list[Done]], RowsReady | None]
    replies: list[Done] = field(default_factory=list)


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
        pulses = Pulses(run.config.heartbeat_timeout or float("inf"))
        self.mailbox = Mailbox(channel, watch, self._doing, lambda rank: run.paths.log(f"worker-{rank}"), pulses=pulses)
        self.checkpoint = str(last[0]) if last else ""
        length = replace(run.length, first_step=last[1].step) if last else run.length
        self.state = MasterState(run.graph, run.plan, length, run.config.max_staleness, run.writes_checkpoints)
        self.state.states |= last[1].states if last else {}
        self.writing: Manifest | None = None  # a checkpoint that was begun
        self.requests: dict[int, _Request] = {}
        self.waiting: list[RowsReady] = []  # events that came while held-out rows were tried
        self.next_request = 0
        self.last_save = self.last_checkpoint = time.monotonic()

    def train(self) -> None:
        """Run the experiment; ``RunFailed`` when it ends in any other way than by doing all of its steps."""
        self._gather_workers()
        self._perform(self.state.start())
        while self.requests or self.waiting or self.writing:
            if not self.requests and not self.waiting:
                self._settle()  # the last step's
            elif (event := self.waiting.pop(0) if self.waiting else self._next_event()) is not None:
                self.telemetry.event(event)
                self._perform(self.state.handle(event))
        assert self.state.is_over, "nothing is under way, and the run is not over"
        self._tell_all(Stop())

    def _gather_workers(self) -> None:
        ranks, patience = range(self.run.plan.n_workers), self.run.config.startup_timeout
        hello = self.mailbox.receive_all(Hello, ranks, patience, "to come up")
        self._tell_all(Start(hello[0].address, hello[0].port, self.checkpoint))
        self.telemetry.ready(self.mailbox.receive_all(Ready, ranks, patience, "to build its models"))

    def _tell_all(self, message: ToWorker) -> None:
        for rank in range(self.run.plan.n_workers):
            self.channel.send(rank, message)

    def _doing(self, rank: int) -> str:
        asked = ", ".join(r.what for r in self.requests.values() if rank in r.waiting)
        return asked or ("nothing it was asked for" if self.requests else "its start-up")

    def _next_event(self) -> RowsReady | None:
        """Take one reply in; return the event that it completes, if any."""
        oldest = next(iter(self.requests.values()))  # all have the same time
        patience = self.run.config.call_timeout
        message = self.mailbox.receive(
            oldest.left,
            lambda: f"waited {patience:.0f} s for {oldest.what} from worker {listed(oldest.waiting)}",
            oldest.waiting,
        )
        assert isinstance(message, Done), f"a worker that is ready says Done, not {type(message).__name__}"
        request = self.requests[message.request]
        request.waiting.discard(message.rank)
        request.replies.append(message)
        self.telemetry.reply(request.step, message)
        if request.waiting:
            return None
        del self.requests[message.request]
        return request.then(sorted(request.replies, key=lambda r: r.rank))

    def _ask(
        self,
        ranks: Iterable[int],
        message: Callable[[int], ToWorker],
        what: str,
        step: int,
        then: Callable[[list[Done]], RowsReady | None],
    ) -> int:
        """Send ``message(request)`` to every rank; ``then`` is called with the replies. Returns the number."""
        self.next_request += 1
        sent = message(self.next_request)
        self._await(ranks, what, step, then)
        for rank in ranks:
            self.channel.send(rank, sent)
        return self.next_request

    def _await(
        self, ranks: Iterable[int], what: str, step: int, then: Callable[[list[Done]], RowsReady | None]
    ) -> None:
        left = deadline(self.run.config.call_timeout)
        self.requests[self.next_request] = _Request(what, step, set(ranks), left, then)

    def _perform(self, actions: list[Action]) -> None:
        """Carry out actions; the rows of all calls move before any is run, so that none waits for another."""
        runs: list[tuple[Run, Dispatch]] = []
        for action in actions:
            match action:
                case FetchRows(span):
                    self._fetch(span)
                case Dispatch(span, call):
                    runs.append((Run(self._dispatch(span, call)), action))
                case FinishStep(span):
                    self._finish_step(span)
        for message, dispatch in runs:
            for rank in meshes_of(self.run.program[dispatch.call.mfc]):
                self.channel.send(rank, message)

    def _fetch(self, span: Span) -> None:
        self._ask(
            self.run.fetchers,
            lambda request: Fetch(request, span.start, span.stop),
            f"the data of step {span.step + 1}",
            span.step,
            lambda replies: RowsReady(None, span, _outputs(replies)),
        )

    def _dispatch(self, span: Span, call: Call) -> int:
        holders = {rank for held in call.holders.values() for ranks in held for rank in ranks}
        ranks = meshes_of(self.run.program[call.mfc]) | holders

        def finished(replies: list[Done]) -> RowsReady:
            self.telemetry.call_done(call, replies)
            states = [reply.state for reply in replies if reply.state is not None]
            return RowsReady(call.mfc, span, _outputs(replies), states[0] if states else None)

        what = f"{call.mfc} of step {span.step + 1}"
        return self._ask(sorted(ranks), lambda request: replace(call, request=request), what, span.step, finished)

    def _finish_step(self, span: Span) -> None:
        if span.step >= self.run.trial_length.first_step:
            self._tell_all(Drop(span.start, span.stop))
            return
        self.telemetry.step_done(span.step, self.state.versions)
        self._log_generations(span)
        self._tell_all(Drop(span.start, span.stop))
        frequency = self.run.config.exp_ctrl.eval_freq_steps
        if self.run.graph.evaluation and (self.state.is_over or (frequency and (span.step + 1) % frequency == 0)):
            self._evaluate(span.step + 1)
        control, step = self.run.config.exp_ctrl, span.step + 1
        if self.state.is_over or self._is_due(
            step, control.save_freq_steps, control.save_freq_epochs, control.save_freq_secs, self.last_save
        ):
            self._save(step)
        self._settle()
        if self.run.writes_checkpoints and (self.state.is_over or self._is_due(
            step, control.ckpt_freq_steps, control.ckpt_freq_epochs, control.ckpt_freq_secs, self.last_checkpoint
        )):  # fmt: skip
            self._checkpoint(step)

    def _evaluate(self, step: int) -> None:
        """Try the held-out rows with the weights of this step; what happens in training meanwhile waits."""
        trial = MasterState(self.run.graph.trial, self.run.plan, self.run.trial_length)
        trial.states |= {name: state for name, state in self.state.states.items() if name in trial.states}
        self._perform(trial.start())
        while not trial.is_over:
            event = self._next_event()
            if event is not None and event.span.step < self.run.trial_length.first_step:
                self.waiting.append(event)
            elif event is not None:
                self._perform(trial.handle(event))
        self.telemetry.evaluated(step)

    def _log_generations(self, span: Span) -> None:
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
            self.channel.send(rank, Collect(self.next_request, tuple(rows), keys))

    def _is_due(self, step: int, steps: int | None, epochs: int | None, seconds: int | None, last: float) -> bool:
        """Tell whether something that is done every so many steps, epochs or seconds is to be done after a step."""
        before, now = ((s * self.run.length.batch_size) // self.run.n_rows for s in (step - 1, step))
        return bool(
            (steps and step % steps == 0)
            or (epochs and now // epochs > before // epochs)
            or (seconds and time.monotonic() - last >= seconds)
        )

    def _checkpoint(self, step: int) -> None:
        """Have every worker copy its part; inboxes are in order, so it is that of this step."""
        self.last_checkpoint = time.monotonic()
        run = self.run
        layouts = {role: home(run.graph, run.plan, role) for role in run.changing}
        self.writing = Manifest(step, dict(self.state.states), layouts, {}, run.data_digest, flat_options(run.config))
        folder = str(aside(run.paths.checkpoints, step))
        everyone = range(run.plan.n_workers)
        self._ask(everyone, lambda request: Checkpoint(request, folder), f"checkpoint {step}", step - 1, nothing)

    def _settle(self) -> None:
        """Have the checkpoint that was begun a step ago finished, and let it count."""
        if self.writing is None:
            return
        manifest, self.writing = self.writing, None

        def written(replies: list[Done]) -> None:
            files = {name: tuple(digest) for reply in replies for name, digest in reply.values["files"].items()}
            commit(self.run.paths.checkpoints, replace(manifest, files=files), self.run.config.exp_ctrl.keep_last)

        what = f"checkpoint {manifest.step} to be on the disk"
        everyone = range(self.run.plan.n_workers)
        self._ask(everyone, lambda request: Settle(request), what, manifest.step - 1, written)

    def _save(self, step: int) -> None:
        """Write the models of trained roles; inboxes are in order, so the weights are those of this step."""
        self.last_save = time.monotonic()
        trained = [r for r in self.run.graph.roles if self.run.graph.trainer(r)]
        for role in self.run.config.save_roles or trained:
            path = self.run.paths.model(role, step)

            def message(request: int, role: str = role, path: Any = path) -> ToWorker:
                return Save(request, role, str(path))

            def saved(replies: list[Done], role: str = role, path: Any = path) -> None:
                self.telemetry.saved(role, path)

            ranks = home(self.run.graph, self.run.plan, role).mesh.ranks
            self._ask(ranks, message, f"saving {role}", step - 1, saved)


def look_for_cycles_seldom() -> None:
    """Spare this process the collector: a master makes many values, and none of them is part of a cycle."""
    gc.set_threshold(200_000, 50, 1000)


def nothing(replies: list[Done]) -> None:
    """What follows from replies that only say that something is done."""


def _outputs(replies: list[Done]) -> dict[int, Any]:
    return {reply.rank: reply.outputs for reply in replies if reply.outputs is not None}
