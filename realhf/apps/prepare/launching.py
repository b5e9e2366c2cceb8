"""Runs as processes: the two files that start them, the workers, and the master in this process."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realhf.api.codec import from_plain, to_plain
from realhf.api.config import ExperimentConfig, Mode
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment
from realhf.api.messages import ToWorker
from realhf.apps.prepare.jobs import is_queued, queue
from realhf.apps.prepare.options import load_experiment, save_experiment
from realhf.apps.prepare.run_dir_checks import running
from realhf.apps.view.console import Console
from realhf.base.atomic_io import atomic_write, remove_folder, try_lock
from realhf.base.errors import RunFailed, UserError, WorkerTimeout
from realhf.base.paths import RunDir
from realhf.experiments import experiment_class
from realhf.launch import LAUNCHERS
from realhf.plan.run_spec import ExpectedPerformance, RunSpec

if TYPE_CHECKING:
    from realhf.system.checkpoint.manifest import Manifest

SHOWN = 8
"""Workers of which the state is told when a run hangs."""

LEAVE_S = 20.0
"""How long workers may take to leave after the last step."""


def as_experiment(config: ExperimentConfig) -> Experiment:
    """A config class that is registered as an experiment declares a graph as well."""
    return config  # type: ignore[return-value]


def write_run(run: RunSpec, keep: bool = False) -> None:
    """Make the run directory with the two files that start everything; ``keep`` what is there."""
    if run.config.overwrite and run.paths.root.exists() and any(run.paths.root.iterdir()) and not keep:
        remove_folder(run.paths.root)
    run.paths.root.mkdir(parents=True, exist_ok=True)
    save_experiment(run.config, run.paths.config)
    plan: dict[str, Any] = {"experiment": run.experiment, "device": run.device, "n_rows": run.n_rows,
                            "n_held_out": run.n_held_out}  # fmt: skip
    expected = to_plain(run.expected) if run.expected else None
    atomic_write(run.paths.plan, json.dumps({**plan, "plan": to_plain(run.plan), "expected": expected}, indent=1))


def read_run(root: Path) -> RunSpec:
    """Rebuild a run from its directory, as every process of it does."""
    paths = RunDir(root)
    stored = json.loads(paths.plan.read_text())
    config = load_experiment(experiment_class(stored["experiment"]), paths.config)
    experiment = as_experiment(config)
    return RunSpec(
        stored["experiment"],
        config,
        experiment.task,
        experiment.graph(),
        experiment.roles(),
        from_plain(stored["plan"], ExecutionPlan),
        paths,
        stored["device"],
        stored["n_rows"],
        from_plain(stored["expected"], ExpectedPerformance) if stored.get("expected") else None,
        stored["n_held_out"],
    )


def launch(run: RunSpec, last: "tuple[Path, Manifest] | None" = None) -> None:
    """Start the workers, be the master, and leave nothing running however it ends; ``last`` is where to go on from.

    Outside an allocation a job is queued that does so, which knows by itself where to go on from.
    """
    if is_queued(run.config):
        return queue([run], run.config, run.paths)
    with try_lock(run.paths.lock) as is_mine:
        if not is_mine:
            raise UserError(running(run.paths))
        run.paths.stop.unlink(missing_ok=True)  # what was asked of a run before
        _follow(run, last)


def _follow(run: RunSpec, last: "tuple[Path, Manifest] | None") -> None:
    from realhf.system.master import Master
    from realhf.system.metrics.sinks import open_sinks
    from realhf.system.metrics.telemetry import Telemetry

    console = Console(run)
    console.banner()
    workers = _Inline(run) if run.config.mode is Mode.inline else _Processes(run)
    telemetry = None
    try:
        workers.start()
        telemetry = Telemetry(run, console, open_sinks(run.config, run.paths, to_plain(run.config)),
                              last[1].step if last else 0)  # fmt: skip
        Master(run, workers.channel, workers.dead, telemetry, last).train()
        workers.leave(LEAVE_S)
        console.summary(telemetry.models, telemetry.best)
    except RunFailed as failed:
        seen = workers.examine(failed.ranks) if isinstance(failed, WorkerTimeout) else ""
        raise RunFailed(f"{failed}{seen}", failed.traceback_text, failed.lost, workers.n_nodes()) from failed
    finally:
        console.close()
        try:
            workers.stop()
        finally:
            if telemetry is not None:
                telemetry.close()


class _Processes:
    """Worker processes and the channel to them."""

    def __init__(self, run: RunSpec) -> None:
        self.run, self.launcher = run, LAUNCHERS[run.config.mode](run)
        self.dead = self.launcher.dead
        self._end: Callable[[], None] = lambda: None

    def start(self) -> None:
        from realhf.system.master import relax_gc
        from realhf.system.transport.auth import new_key
        from realhf.system.transport.channel import ZmqMaster

        relax_gc()
        address = self.launcher.prepare()
        key = new_key(self.run.paths.key)
        self.channel = ZmqMaster(key, self.run.plan.n_workers, self.run.config.channel_address or address)
        self._end = self._close
        self.launcher.start(self.channel.address)

    def leave(self, timeout_s: float) -> None:
        for rank, how in sorted(self.launcher.wait(timeout_s).items()):
            raise RunFailed(f"worker {rank} did not leave cleanly after the last step: it {how}")

    def n_nodes(self) -> int:
        return self.launcher.n_nodes()

    def examine(self, ranks: tuple[int, ...]) -> str:
        """Return what is seen of workers that do not answer, from outside; all leave their stacks in their logs."""
        states = {rank: self.launcher.state(rank) for rank in ranks[:SHOWN]}
        lines = [f"\n  worker {rank}'s process is in state {state}" for rank, state in states.items() if state]
        self.launcher.dump_stacks()
        return "".join(lines) + f"\nthe stacks of all workers are in {self.run.paths.root / 'logs'}"

    def stop(self) -> None:
        self.launcher.stop()
        self._end()

    def _close(self) -> None:
        if self.channel.rejected_messages:
            print(f"dropped {self.channel.rejected_messages} messages that no worker of this run has sent")
        self.channel.close()
        self.run.paths.key.unlink(missing_ok=True)


class _Inline:
    """The only worker in this process: for debuggers."""

    def __init__(self, run: RunSpec) -> None:
        from realhf.base.logging import open_log
        from realhf.system.transport.channel import InlineChannel
        from realhf.system.worker import ModelWorker

        self.channel = InlineChannel()
        log = open_log(run.paths.log("worker-0"), "worker-0")
        self.worker = ModelWorker(run, 0, self.channel.reply, log)
        self.channel.handler = self._handle

    def _handle(self, message: ToWorker) -> None:
        with contextlib.suppress(Exception):  # the worker has told the master, who ends the run with its words
            self.worker.handle(message)

    def start(self) -> None:
        self.worker.hello()

    def dead(self) -> dict[int, str]:
        return {}

    def leave(self, timeout_s: float) -> None:
        self.worker.close()

    def n_nodes(self) -> int:
        return 1

    def examine(self, ranks: tuple[int, ...]) -> str:
        return ""

    def stop(self) -> None:
        self.channel.close()
