"""Launches runs: writes the run directory, starts the workers, and runs the master in this process or a SLURM job."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from realhf.api.config import Device, ExperimentConfig, Mode
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment
from realhf.api.messages import ToWorker
from realhf.apps.prepare.backends import run_warnings
from realhf.apps.prepare.hub import located
from realhf.apps.prepare.options import load_experiment, save_experiment
from realhf.apps.prepare.preflight import directory_problems, preflight, running_message
from realhf.apps.prepare.publish import publish
from realhf.apps.view.console import Console
from realhf.base import native
from realhf.base.atomic_io import atomic_write, remove_folder, sha256, try_lock
from realhf.base.errors import RunFailed, RunStopped, UserError, WorkerTimeout, damage_reported
from realhf.base.paths import RunDir
from realhf.base.process import raise_fd_limit, uninterrupted
from realhf.experiments import experiment_class
from realhf.launch import LAUNCHERS
from realhf.launch.slurm import in_allocation
from realhf.launch.slurm_job import follow, log_file, script, submit
from realhf.plan.run_spec import ExpectedPerformance, RunSpec
from realhf.system.checkpoint.manifest import Manifest, flat_options

MAX_REPORTED = 8  # unresponsive workers whose process states are reported
EXIT_TIMEOUT_S = 20.0  # for workers to exit after the last step
DAMAGED = "start the run again with overwrite=True"


@dataclass(frozen=True)
class StoredRun:
    """Content of plan.json: what a run has besides its options. ``launch`` identifies the launch that created it.

    ``snapshots`` are the local paths of names on the hub.
    """

    experiment: str
    device: Device
    n_rows: Annotated[int, msgspec.Meta(ge=1)]
    n_held_out: Annotated[int, msgspec.Meta(ge=0)]
    plan: ExecutionPlan
    expected: ExpectedPerformance | None
    launch: str
    snapshots: dict[str, str] = field(default_factory=dict)
    source_rows: tuple[int, ...] = ()


@contextlib.contextmanager
def locked(paths: RunDir) -> Iterator[None]:
    """Hold the lock of a run directory, which every process needs to change it.

    ``UserError`` if another process has it, and for errors of files before the master starts.
    """
    try:
        with try_lock(paths.lock) as is_acquired:
            if not is_acquired:
                raise UserError(running_message(paths))
            yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"the files of {paths.root} cannot be used: {error}") from error


def write_run(run: RunSpec, launch_id: str = "") -> None:
    """Write config.yaml and plan.json; a new launch, which has a ``launch_id``, replaces the run directory."""
    stored = StoredRun(run.experiment, Device(run.device), run.n_rows, run.n_held_out, run.plan, run.expected,
                       launch_id or stored_run(run.paths).launch, run.config.snapshots, run.source_rows)  # fmt: skip
    if launch_id and run.paths.root.exists() and any(run.paths.root.iterdir()):
        remove_folder(run.paths.root)
    run.paths.root.mkdir(parents=True, exist_ok=True)
    run.paths.root.chmod(0o700)  # prompts, responses and the channel's key
    save_experiment(run.config, run.paths.config)
    atomic_write(run.paths.plan, json.dumps(msgspec.to_builtins(stored), indent=1))


def stored_run(paths: RunDir) -> StoredRun:
    """Read plan.json; ``UserError`` if the directory has no run, or damaged or inaccessible files."""
    if problems := paths.unusable(os.R_OK):
        raise UserError(problems)
    if not paths.config.is_file() or not paths.plan.is_file():
        raise UserError(f"{paths.root} has no run: {paths.config.name} or {paths.plan.name} is missing")
    with damage_reported(paths.plan, DAMAGED):
        return msgspec.convert(json.loads(paths.plan.read_text()), StoredRun)


def read_run(root: Path) -> RunSpec:
    """Load a run from its directory; master and workers both do."""
    paths = RunDir(root)
    stored = stored_run(paths)
    experiment = load_experiment(experiment_class(stored.experiment), paths.config)
    with damage_reported(paths.config, DAMAGED):
        experiment = located(experiment, stored.snapshots)
        task, graph, roles = experiment.task, experiment.divided_graph(), experiment.roles()
    with damage_reported(paths.plan, DAMAGED):
        digest = sha256(paths.config) + sha256(paths.plan)
        run = RunSpec(stored.experiment, experiment, task, graph, roles, stored.plan, paths, stored.device.value,
                      stored.n_rows, stored.expected, stored.n_held_out, digest, stored.source_rows)  # fmt: skip
        n_workers = experiment.n_nodes * experiment.n_gpus_per_node
        ranks = {rank for mfc in (*graph.mfcs, *graph.evaluation) for rank in run.plan[mfc.name].layout.mesh.ranks}
        if not (run.program and run.eval_schedule) or not max(ranks) < run.plan.n_workers == n_workers:
            raise ValueError(f"the plan is for {run.plan.n_workers} workers, {paths.config.name} has {n_workers}")
    return run


def start(runs: Sequence[RunSpec], config: ExperimentConfig, paths: RunDir) -> None:
    """Write the directories of checked runs; launch the run, or submit the runs to SLURM."""
    launch_id = secrets.token_hex(8)
    with locked(paths):
        problems = [directory_problems(run.config, run.paths, is_owner=run.paths == paths) for run in runs]
        if any(problems):  # another launch used the directory since the checks
            raise UserError(sum(problems, []))
        for run in runs:
            write_run(run, launch_id)
        if not is_queued(config):
            with _removed_if_refused(paths):
                return launch(paths)
    with _removed_if_refused(paths):
        queue(runs, config, paths)


@contextlib.contextmanager
def _removed_if_refused(paths: RunDir) -> Iterator[None]:
    """Remove a new run directory if its options turn out to be invalid: the corrected command finds no run."""
    try:
        yield
    except UserError:
        remove_folder(paths.root)
        raise


def launch(paths: RunDir, checkpoint: tuple[Path, Manifest] | None = None) -> None:
    """Start the workers, run the master, and stop all processes at the end. The caller holds the lock.

    The master reads the run from its files, as the workers do.
    """
    run = read_run(paths.root)
    run.paths.stop.unlink(missing_ok=True)  # a request to stop an earlier run
    with _error_recorded(run.paths), _file_errors(run):
        _run_master(run, checkpoint)
        publish(run)


@contextlib.contextmanager
def _error_recorded(paths: RunDir) -> Iterator[None]:
    """Keep the error of a failed run for its report."""
    paths.error.unlink(missing_ok=True)
    try:
        yield
    except RunFailed as failed:
        with contextlib.suppress(OSError):  # a full disk may be the error
            atomic_write(paths.error, f"{failed.traceback_text}{failed}\n")
        raise


@contextlib.contextmanager
def _file_errors(run: RunSpec) -> Iterator[None]:
    """Report errors of the master's files, such as a full disk, in one line; the first error is the cause."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if isinstance(error.__context__, RunFailed | RunStopped | KeyboardInterrupt):
            raise error.__context__ from None
        hint = f"; free disk space, then: realhf resume {run.paths.root}" if run.writes_checkpoints else ""
        raise RunFailed(f"the master cannot use its files in {run.paths.root}: {error}{hint}") from error


def is_queued(config: ExperimentConfig) -> bool:
    """Return True if the run is submitted to SLURM; inside an allocation it runs directly."""
    return config.mode is Mode.slurm and not in_allocation()


def runs_per_seed(experiment: Experiment, paths: RunDir) -> list[tuple[Experiment, RunDir]]:
    """Return one run per seed of ``slurm.array_seeds``, in subdirectories; without seeds, the run itself."""
    runs = []
    for seed in experiment.slurm.array_seeds:
        name, root = f"seed_{seed}", os.path.join(experiment.fileroot, experiment.experiment_name)
        run = replace(experiment, fileroot=root, experiment_name=paths.root.name, trial_name=name, seed=seed,
                      slurm=replace(experiment.slurm, array_seeds=[]))  # fmt: skip
        runs.append((run, RunDir(paths.root / name)))
    return runs or [(experiment, paths)]


def queue(runs: Sequence[RunSpec], config: ExperimentConfig, paths: RunDir) -> None:
    """Submit runs whose directories are prepared, and follow the job to its end."""
    logs = [log_file(paths.root, i if len(runs) > 1 else "") for i in range(len(runs))]
    logs[0].parent.mkdir(parents=True, exist_ok=True)  # SLURM does not create the folder of a log
    roots, launch_id = [run.paths.root for run in runs], stored_run(runs[0].paths).launch
    paths.job_script.write_text(script(roots, config, runs[0].device, paths.root, launch_id))
    job = submit(paths.job_script, len(runs))
    print(f"job     {job.number}: {paths.job_script}; Ctrl-C cancels it", flush=True)
    follow(job, logs, roots)


def dry_run(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Check a run and print its plan, or the script that would be submitted; write no files."""
    runs = [preflight(name, run, run_dir) for run, run_dir in runs_per_seed(experiment, paths)]
    if is_queued(experiment):
        roots = [run.paths.root for run in runs]
        print(script(roots, experiment, runs[0].device, paths.root, "LAUNCH_ID"), end="")
        return
    for warning in run_warnings(runs[0]):
        print(f"warning {warning}")
    Console(runs[0]).banner()
    print("dry run: all checks passed; nothing was written or launched")


def _run_master(run: RunSpec, checkpoint: tuple[Path, Manifest] | None) -> None:
    from realhf.system.master import Master
    from realhf.system.metrics.sinks import open_sinks
    from realhf.system.metrics.telemetry import Telemetry

    console = Console(run)
    console.banner()
    if native.ensure(native.KERNELS) is None:
        print(f"warning: {native.missing(native.KERNELS)}", flush=True)
    workers = _Inline(run) if run.config.mode is Mode.inline else _Processes(run)
    telemetry = None
    try:
        workers.start()
        telemetry = Telemetry(run, console, open_sinks(run.config, run.paths, flat_options(run.config)),
                              checkpoint[1].step if checkpoint else 0)  # fmt: skip
        Master(run, workers.channel, workers.dead, telemetry, checkpoint).train()
        workers.join()
        run.paths.stop.unlink(missing_ok=True)  # requested during the last step
        console.summary(telemetry.models, telemetry.best)
    except RunFailed as failed:
        states = workers.process_states(failed.ranks) if isinstance(failed, WorkerTimeout) else ""
        raise RunFailed(f"{failed}{states}", failed.traceback_text, failed.lost, workers.n_nodes()) from failed
    finally:
        with uninterrupted(), contextlib.ExitStack() as cleanup:
            if telemetry is not None:
                cleanup.callback(telemetry.close)
            cleanup.callback(workers.stop)
            console.close()


class _Processes:
    def __init__(self, run: RunSpec) -> None:
        self.run, self.launcher = run, LAUNCHERS[run.config.mode](run)
        self.dead, self.n_nodes = self.launcher.dead, self.launcher.n_nodes
        self.channel: Any = None  # opened by start()

    def start(self) -> None:
        from realhf.system.master import relax_gc
        from realhf.system.transport.auth import new_key
        from realhf.system.transport.channel import ZmqMaster

        relax_gc()
        raise_fd_limit()
        address = self.launcher.prepare()
        key = new_key(self.run.paths.key)
        self.channel = ZmqMaster(key, self.run.plan.n_workers, self.run.config.channel_address or address)
        self.launcher.start(self.channel.address)

    def join(self) -> None:
        for rank, how in sorted(self.launcher.wait(EXIT_TIMEOUT_S).items()):
            raise RunFailed(f"worker {rank} did not exit cleanly after the last step: it {how}")

    def process_states(self, ranks: tuple[int, ...]) -> str:
        """Return the process states of unresponsive workers; all workers dump their stacks into their logs."""
        states = {rank: self.launcher.state(rank) for rank in ranks[:MAX_REPORTED]}
        lines = [f"\n  worker {rank}'s process is in state {state}" for rank, state in states.items() if state]
        self.launcher.dump_stacks()
        return "".join(lines) + f"\nthe stacks of all workers are in {self.run.paths.root / 'logs'}"

    def stop(self) -> None:
        with contextlib.ExitStack() as cleanup:  # the last callback first, and all of them after an error
            cleanup.callback(self.run.paths.key.unlink, missing_ok=True)
            if self.channel:
                cleanup.callback(self.channel.close)
            cleanup.callback(self.launcher.stop)
        if rejected := self.channel.rejected_messages if self.channel else 0:
            print(f"dropped {rejected} unauthenticated messages")


class _Inline:
    """A single worker inside this process, for debuggers."""

    def __init__(self, run: RunSpec) -> None:
        from realhf.base.logging import open_log
        from realhf.system.transport.channel import InlineChannel
        from realhf.system.worker import ModelWorker

        self.channel = InlineChannel()
        log = open_log(run.paths.log("worker-0"), "worker-0")
        self.worker = ModelWorker(run, 0, self.channel.reply, log)
        self.channel.handler = self._handle

    def _handle(self, message: ToWorker) -> None:
        with contextlib.suppress(Exception):  # the worker has sent the error to the master, which raises it
            self.worker.handle(message)

    def start(self) -> None:
        self.worker.hello()

    def dead(self) -> dict[int, str]:
        return {}

    def join(self) -> None:
        self.worker.close()

    def n_nodes(self) -> int:
        return 1

    def process_states(self, ranks: tuple[int, ...]) -> str:
        return ""

    def stop(self) -> None:
        self.channel.close()
