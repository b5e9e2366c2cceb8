"""The master worker: passes events to ``MasterState`` and performs the actions that it returns."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from realhf.api import messages
from realhf.api.batch_meta import BatchMeta
from realhf.api.graph import Kind
from realhf.base.errors import RunFailed, RunStopped
from realhf.data.curriculum import Curriculum, CurriculumState
from realhf.plan.compile.program import home_layout, layout_ranks
from realhf.plan.compile.schedule import Action, Dispatch, FetchRows, FinishStep, MasterState, RowsReady
from realhf.plan.run_spec import RunSpec
from realhf.plan.train_schedule import PromptRange, TrainSchedule
from realhf.system.checkpoint.best_models import BestModels, BestRecord
from realhf.system.checkpoint.manifest import Manifest, Rollout, checkpoints_of, commit, flat_options, tmp_folder
from realhf.system.evaluation import Evaluation
from realhf.system.metrics.telemetry import Telemetry, sum_stats
from realhf.system.requests import OnReplies, WorkerRequest
from realhf.system.transport.channel import MasterEnd
from realhf.system.transport.heartbeat import HeartbeatMonitor
from realhf.system.transport.reply_receiver import NODE_GRACE_S, ReplyReceiver, format_ranks


class Master:
    """One run from start to end."""

    def __init__(
        self,
        run: RunSpec,
        channel: MasterEnd,
        dead_workers: Callable[[], dict[int, str]],
        telemetry: Telemetry,
        last: tuple[Path, Manifest] | None = None,
    ) -> None:
        """``last`` is the checkpoint to resume from, and its folder."""
        self.run, self.channel, self.telemetry = run, channel, telemetry
        self.replies = ReplyReceiver(
            channel,
            dead_workers,
            self._requested,
            lambda rank: run.paths.log(f"worker-{rank}"),
            run.paths.flight_record,
            node_grace_s=NODE_GRACE_S if run.config.n_nodes > 1 else 0.0,
            heartbeats=HeartbeatMonitor(run.config.heartbeat_timeout or float("inf")),
        )
        self.checkpoint = str(last[0]) if last else ""
        self.accepted = last[1].accepted if last else []
        self.fingerprint = run.fingerprint if run.writes_checkpoints else {}  # before files can change
        schedule = replace(run.schedule, first_step=last[1].step) if last else run.schedule
        strict_step_order = run.writes_checkpoints or bool(run.graph.evaluation)
        self.saved = {(rollout.mfc, rollout.span): rollout for rollout in last[1].rollouts} if last else {}
        self.state = MasterState(
            run.graph,
            run.plan,
            schedule,
            run.config.max_staleness,
            strict_step_order,
            self.saved,
            last[1].carried if last else None,
            pauses_training=run.evaluates_beside_training,
        )
        self.state.states |= last[1].states if last else {}
        self.curriculum = self._curriculum(schedule, last[1].curriculum if last else None)
        self.pending_checkpoint: tuple[Manifest, list[WorkerRequest]] | None = None
        self.uncommitted: set[int] = set()  # steps of checkpoints in progress
        self.rollouts: list[WorkerRequest] = []  # of generating calls of unfinished steps
        self.requests: dict[int, WorkerRequest] = {}
        self.evaluation: Evaluation | None = None  # in progress
        self.pending_events: list[RowsReady] = []  # of training, received during an evaluation
        self.last_request = 0
        self.last_time = dict.fromkeys(("eval", "save", "ckpt"), time.monotonic())
        self.best = BestModels(run.paths.best, run.config.exp_ctrl.keep_best)

    def _curriculum(self, schedule: TrainSchedule, state: CurriculumState | None) -> Curriculum | None:
        run, lag = self.run, self.state.fetch_lag
        if run.curriculum is None:
            return None
        return Curriculum(
            run.curriculum, run.source_rows, schedule, run.config.seed, run.config.dataset.shuffle, lag, state
        )

    def train(self) -> None:
        """Run all steps; ``RunFailed`` on failure, ``RunStopped`` after a requested stop with a checkpoint."""
        self._start_workers()
        if self.run.graph.evaluation and self.run.config.exp_ctrl.eval_at_start and not self.checkpoint:
            self._evaluate(0)
        self._perform(self.state.start())
        while self.requests or self.pending_events or self.pending_checkpoint:
            if not self.requests and not self.pending_events:
                self._finish_checkpoint()  # of the last step
            elif (event := self.pending_events.pop(0) if self.pending_events else self._next_event()) is not None:
                self._handle(event)
            if self.state.is_paused and (self.evaluation is None or self.evaluation.allows_training):
                self._perform(self.state.resume())
        assert self.state.is_over, "no request is in progress, but the run is not over"
        self._send_all(messages.Shutdown())

    def _handle(self, event: RowsReady) -> None:
        if event.span.step >= self.run.eval_schedule.first_step:
            self._handle_evaluation(event)
            return
        self.telemetry.event(event)
        if self.curriculum is not None and event.results:
            self.curriculum.record(event.span.step, event.results)
        self._perform(self.state.handle(event))

    def _start_workers(self) -> None:
        ranks, timeout_s = range(self.run.plan.n_workers), self.run.config.startup_timeout
        hello = self.replies.receive_all(messages.Hello, ranks, timeout_s, "to start")
        for rank, message in hello.items():
            if message.digest != self.run.digest:
                raise RunFailed(f"worker {rank} on {message.host} has read another config.yaml or plan.json: the files "
                                f"in {self.run.paths.root} changed, or differ between hosts")  # fmt: skip
        self._send_all(messages.Start(hello[0].address, hello[0].port, self.checkpoint))
        self.telemetry.ready(self.replies.receive_all(messages.Ready, ranks, timeout_s, "to build its models"))

    def _send_all(self, message: messages.ToWorker) -> None:
        self.channel.send(range(self.run.plan.n_workers), message)

    def _requested(self, rank: int) -> str:
        """Return what the worker is requested to do, for messages."""
        names = ", ".join(r.name for r in self.requests.values() if r.is_due[rank])
        return names or ("idle time" if self.requests else "start-up")

    def _next_event(self) -> RowsReady | None:
        """Receive replies until a request is complete; return its event, if any."""
        oldest = next(iter(self.requests.values()))  # all have the same timeout

        def timeout_message() -> str:
            timeout_s = self.run.config.call_timeout
            return f"waited {timeout_s:.0f} s for {oldest.name} from worker {format_ranks(oldest.waiting)}"

        while True:
            reply = self.replies.receive(oldest.left, timeout_message, lambda: oldest.waiting)
            assert isinstance(reply, messages.Done), f"expected Done from a ready worker, got {type(reply).__name__}"
            request = self.requests[reply.request]
            self.telemetry.reply(request.step, request.mfc, reply)
            if request.add(reply):
                del self.requests[reply.request]
                return request.on_replies(sorted(request.replies, key=lambda r: r.rank))

    def _request(self, ranks: Iterable[int], name: str, step: int, on_replies: OnReplies, mfc: str = "") -> int:
        """Register a request that the caller then sends to ``ranks``; return its number."""
        left = self.replies.heartbeats.deadline(self.run.config.call_timeout)
        is_due = bytearray(self.run.plan.n_workers)
        for rank in ranks:
            is_due[rank] = 1
        self.last_request += 1
        self.requests[self.last_request] = WorkerRequest(name, step, mfc, is_due, sum(is_due), left, on_replies)
        return self.last_request

    def _perform(self, actions: Sequence[Action]) -> None:
        """Perform actions; all row transfers are requested before any call, so that none waits for another call."""
        calls: list[tuple[messages.ExecuteCall, Dispatch]] = []
        for action in actions:
            match action:
                case FetchRows(span):
                    self._fetch(span)
                case Dispatch(span, call) if (call.mfc, span) in self.saved:
                    self._replay(self.saved.pop((call.mfc, span)), call)
                case Dispatch(span, call):
                    calls.append((messages.ExecuteCall(self._prepare(span, call)), action))
                case FinishStep(span):
                    self._finish_step(span)
        for message, dispatch in calls:
            self.channel.send(layout_ranks(self.run.program[dispatch.call.mfc]), message)

    def _fetch(self, span: PromptRange) -> None:
        def fetched(replies: list[messages.Done]) -> RowsReady:
            return RowsReady(None, span, _outputs(replies))

        ranks = self.run.fetch_ranks
        request = self._request(ranks, f"the data of step {span.step + 1}", span.step, fetched)
        is_training = span.step < self.run.eval_schedule.first_step
        rows = self.curriculum.rows(span) if self.curriculum is not None and is_training else ()
        self.channel.send(ranks, messages.Fetch(request, span.step, span.start, span.stop, rows))

    def _replay(self, rollout: Rollout, call: messages.PrepareCall) -> None:
        """Use the rows in the checkpoint, which worker 0 has read, as the results of a generating call."""
        reply = messages.Done(0, 0, rollout.outputs, rollout.stats)
        self.telemetry.call_done(call, [reply])
        self.pending_events.append(RowsReady(call.mfc, rollout.span, {0: rollout.outputs}))
        done = WorkerRequest(call.mfc, call.step, call.mfc, bytearray(), 0, lambda: 0.0, lambda replies: None)
        self.rollouts.append(replace(done, rollout=rollout))

    def _prepare(self, span: PromptRange, call: messages.PrepareCall) -> int:
        def finished(replies: list[messages.Done]) -> RowsReady:
            self.telemetry.call_done(call, replies)
            if rolled_out:
                outputs = BatchMeta.merged([reply.outputs for reply in replies if reply.outputs])
                rolled_out.rollout = Rollout(call.mfc, span, outputs, sum_stats([reply.stats for reply in replies]))
            states = [reply.state for reply in replies if reply.state is not None]
            carried = {reply.rank: reply.carried for reply in replies if reply.carried is not None}
            results = tuple(chain.from_iterable(reply.results for reply in replies))
            return RowsReady(call.mfc, span, _outputs(replies), states[0] if states else None, carried, results)

        ranks = sorted(layout_ranks(self.run.program[call.mfc]) | call.holders.ranks)
        request = self._request(ranks, f"{call.mfc} of step {span.step + 1}", span.step, finished, call.mfc)
        may_be_ahead = self.run.writes_checkpoints and self.run.config.max_staleness > 0
        is_rollout = any(mfc.name == call.mfc and mfc.kind is Kind.GENERATE for mfc in self.run.graph.mfcs)
        rolled_out = self.requests[request] if may_be_ahead and is_rollout else None
        self.rollouts += [rolled_out] if rolled_out else []
        self.channel.send(ranks, msgspec.structs.replace(call, request=request))
        return request

    def _finish_step(self, span: PromptRange) -> None:
        if span.step >= self.run.eval_schedule.first_step:
            self._send_all(messages.FreeRows(span.start, span.stop))
            return
        self._finish_evaluation()
        step = span.step + 1
        is_evaluated = bool(self.run.graph.evaluation) and self._is_due(step, "eval")
        if self.curriculum is not None:
            self.telemetry.add_metrics(span.step, self.curriculum.finish(span.step))
        self.telemetry.step_done(span.step, is_evaluated)
        self._log_generations(span)
        self._send_all(messages.FreeRows(span.start, span.stop))
        if is_evaluated:
            self._evaluate(step)
        if self._is_due(step, "save"):
            self.last_time["save"] = time.monotonic()
            for role in self.run.saved_roles:
                self._save_model(role, self.run.paths.model(role, step), step, self._saved)
        self._finish_checkpoint()
        self.rollouts = [request for request in self.rollouts if request.step >= step]
        is_stopped = not self.state.is_over and self.run.writes_checkpoints and self.run.paths.stop.exists()
        if self.run.writes_checkpoints and (is_stopped or self._is_due(step, "ckpt")):
            self._start_checkpoint(step)
        if is_stopped:
            self._stop(step)

    def _evaluate(self, step: int) -> None:
        """Evaluate on held-out rows with the weights of this step, before the next step or during it."""
        self.evaluation = Evaluation(self.run, step, self.state.states)
        self._perform(self.evaluation.start())
        if not self.run.evaluates_beside_training:
            self._finish_evaluation()

    def _finish_evaluation(self) -> None:
        """Complete an evaluation in progress; events of training are queued."""
        while self.evaluation is not None:
            event = self._next_event()
            if event is not None and event.span.step < self.run.eval_schedule.first_step:
                self.pending_events.append(event)
            elif event is not None:
                self._handle_evaluation(event)

    def _handle_evaluation(self, event: RowsReady) -> None:
        assert (evaluation := self.evaluation) is not None, "an event of an evaluation that is over"
        self._perform(evaluation.handle(event))
        if not evaluation.is_over:
            return
        self.evaluation, self.last_time["eval"] = None, time.monotonic()
        record = self.best.record(evaluation.step, self.telemetry.evaluated(evaluation.step))
        for role, path in evaluation.saved:
            self.telemetry.saved(role, path)
        if record is not None:
            self._save_best(record)

    def _saved(self, role: str, path: Path) -> None:
        if self.evaluation is not None:
            self.evaluation.saved.append((role, path))
        else:
            self.telemetry.saved(role, path)

    def _log_generations(self, span: PromptRange) -> None:
        scores = [k for k, m in self.run.graph.producer.items() if m.interface_key(k) == "rewards"]
        logged = {key: None for key in (*self.telemetry.logged_keys, *scores) if key in self.state.keys}
        if any(mfc.carried for mfc in self.run.graph.mfcs):
            logged.pop("row", None)  # that of another prompt
        keys = tuple(logged)
        limit = self.run.config.n_logged_generations
        if "tokens" not in keys or not limit:
            return
        prompts = range(span.start, span.stop if limit < 0 else min(span.stop, span.start + limit))
        rows_by_rank = self.state.holders_of(prompts, keys)

        def write(replies: list[messages.Done]) -> None:
            self.telemetry.generations(span.step + 1, [row for r in replies for row in r.values["rows"]], limit)

        if not rows_by_rank:  # no episode of a partial rollout is over
            write([])
            return
        request = self._request(rows_by_rank, f"the generations of step {span.step + 1}", span.step, write)
        for rank, rows in rows_by_rank.items():
            self.channel.send((rank,), messages.ReadRows(request, tuple(rows), keys))

    def _is_due(self, step: int, event: str) -> bool:
        """Return True after the last step, and if the steps, epochs or seconds of ``exp_ctrl.EVENT_freq_*`` passed."""
        options = vars(self.run.config.exp_ctrl)
        steps, epochs, seconds = (options[f"{event}_freq_{unit}"] for unit in ("steps", "epochs", "secs"))
        steps = self.run.checkpoint_steps if event == "ckpt" else steps
        before, now = ((s * self.run.schedule.batch_size) // self.run.n_rows for s in (step - 1, step))
        return bool(
            self.state.is_over
            or (steps and step % steps == 0)
            or (epochs and now // epochs > before // epochs)
            or (seconds and time.monotonic() - self.last_time[event] >= seconds)
        )

    def _start_checkpoint(self, step: int) -> None:
        """Request a snapshot from every worker. Workers handle messages in order, so it is of this step."""
        self.last_time["ckpt"] = time.monotonic()
        run = self.run
        layouts = {role: home_layout(run.graph, run.plan, role) for role in run.updated_roles}
        states = dict(self.state.states)
        manifest = Manifest(step, run.schedule.n_steps, states, layouts, {}, self.fingerprint, flat_options(run.config),
                            self.accepted, carried=self.state.carried_rows(step),
                            curriculum=self.curriculum.state(step) if self.curriculum else None)  # fmt: skip
        self.uncommitted.add(step)
        self.pending_checkpoint = manifest, [*self.rollouts]  # complete before the files: workers reply in order
        folder = str(tmp_folder(run.paths.checkpoints, step))
        request = self._request(range(run.plan.n_workers), f"checkpoint {step}", step - 1, lambda replies: None)
        self._send_all(messages.Checkpoint(request, step - 1, folder))

    def _finish_checkpoint(self) -> None:
        if self.pending_checkpoint is None:
            return
        (manifest, requests), self.pending_checkpoint = self.pending_checkpoint, None

        def write(replies: list[messages.Done]) -> None:
            files = {name: tuple(digest) for reply in replies for name, digest in reply.values["files"].items()}
            rollouts = [request.rollout for request in requests if request.rollout]
            complete = replace(manifest, files=files, rollouts=rollouts)
            commit(self.run.paths.checkpoints, complete, self.run.config.exp_ctrl.keep_last)
            self.uncommitted.remove(manifest.step)
            self.best.prune(self._resumable_steps())

        name, step = f"the files of checkpoint {manifest.step}", manifest.step - 1
        request = self._request(range(self.run.plan.n_workers), name, step, write)
        self._send_all(messages.AwaitCheckpoint(request, step))

    def _resumable_steps(self) -> list[int]:
        """Return the steps from which the run can be resumed now or later."""
        return [*checkpoints_of(self.run.paths.checkpoints), *self.uncommitted]

    def _stop(self, step: int) -> None:
        self._finish_evaluation()
        self._finish_checkpoint()
        last = self.last_request
        while last in self.requests:
            self._next_event()  # events of later steps are dropped: a resumed run repeats them
        raise RunStopped(f"stopped after step {step} of {self.run.schedule.n_steps}, as requested; resume with: "
                         f"realhf resume {self.run.paths.root}")  # fmt: skip

    def _save_best(self, record: BestRecord) -> None:
        """Save the models of the best evaluation so far; commit them when all are complete."""
        missing, evaluation = set(self.run.saved_roles), self.telemetry.evaluation

        def saved(role: str, path: Path) -> None:
            self.telemetry.describe(path, evaluation)
            missing.discard(role)
            if not missing:
                folder = self.best.commit(record, self._resumable_steps())
                self.telemetry.kept(self.best.metric, record.value, folder)

        for role in self.run.saved_roles:
            self._save_model(role, self.best.tmp_folder(record) / role, record.step, saved)

    def _save_model(self, role: str, path: Path, step: int, then: Callable[[str, Path], None]) -> None:
        """Request a model from the workers. They handle messages in order, so the weights are of this step."""
        last, ranks = max(step - 1, 0), home_layout(self.run.graph, self.run.plan, role).mesh.ranks
        request = self._request(ranks, f"saving {role}", last, lambda replies: then(role, path))
        self.channel.send(ranks, messages.Save(request, last, role, str(path)))


def relax_gc() -> None:
    """Make garbage collection rare: a master allocates many objects, none of them in reference cycles."""
    gc.set_threshold(2_000_000, 50, 1000)


def _outputs(replies: list[messages.Done]) -> dict[int, Any]:
    return {reply.rank: reply.outputs for reply in replies if reply.outputs is not None}
