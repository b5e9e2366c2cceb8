"""SLURM jobs: the batch script, submission, and following a job until it ends."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realhf.api.config import ExperimentConfig, RecoverMode
from realhf.base.errors import RunFailed, RunStopped, UserError
from realhf.base.paths import RunDir
from realhf.launch.local import python_path
from realhf.launch.slurm import expand_hostlist, gpus

POLL_S = 1.0
CANCEL_S = 60.0
"""Time for a cancelled job to end: SLURM kills it after KillWait, 30 s by default."""
CONTROLLER_DOWN_S = 600.0
"""Time without a reply of the controller: jobs continue while it restarts."""
TERMINAL = frozenset(("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                      "PREEMPTED", "REVOKED", "SPECIAL_EXIT", "TIMEOUT"))  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """The state of a job, or of one task of an array."""

    name: str
    reason: str
    exit_code: int
    nodes: str
    restarts: int

    @property
    def is_over(self) -> bool:
        return self.name in TERMINAL

    def __str__(self) -> str:
        times = f", started {self.restarts + 1} times" if self.restarts else ""
        if self.name == "PENDING":
            return f"is pending ({self.reason}){times}"
        if self.name == "RUNNING":
            return f"is running on {self.nodes}{times}"
        return f"is {self.name.lower()}{times}"


def script(roots: Sequence[Path], config: ExperimentConfig, device: str, folder: Path, launch_id: str) -> str:
    """Return the batch script for the runs in ``roots``, a job array if there are several; logs are in ``folder``.

    The script runs the master, which starts the workers with ``srun``. A requeued job resumes from the last checkpoint.
    Before its time limit SLURM signals the master, which ends the run with a checkpoint.
    """
    options, is_array = config.slurm, len(roots) > 1
    is_requeued = config.recover_mode in (RecoverMode.auto, RecoverMode.fault)
    values = {
        "job-name": f"{config.experiment_name}-{config.trial_name}",
        "array": f"0-{len(roots) - 1}" if is_array else "",
        "nodes": config.n_nodes,
        "ntasks-per-node": config.n_gpus_per_node,
        "cpus-per-task": options.cpus_per_worker,
        "gres": gpus(config) if device == "cuda" else "",
        "mem": options.mem_per_node,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "constraint": options.constraint,
        "output": log_file(folder, "%a" if is_array else "").resolve(),
        "open-mode": "append",
        "signal": f"B:USR1@{options.signal_s}" if options.signal_s else "",
    }
    arguments = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value != ""]
    arguments += ["--exclusive"] if options.exclusive else []
    arguments += ["--requeue" if is_requeued else "--no-requeue", *options.extra]
    runs = " ".join(shlex.quote(str(root.resolve())) for root in roots)
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH {argument}" for argument in arguments),
        *options.setup,
        f"export PYTHONPATH={shlex.quote(python_path())}",
        f"runs=({runs})",
        "trap '' USR1",  # until the master handles it
        f"exec {shlex.quote(sys.executable)} -m realhf.apps.commands.master "
        f'"${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}" {launch_id}',
        "",
    ])  # fmt: skip


def log_file(folder: Path, task: int | str = "") -> Path:
    """Return the log of a job's master, or of one task of an array."""
    return RunDir(folder).log(f"slurm-{task}" if task != "" else "slurm")


class SlurmJob:
    """A submitted job; ``n_tasks`` is the length of its array, 1 without one."""

    def __init__(self, number: int, n_tasks: int) -> None:
        self.number, self.n_tasks = number, n_tasks

    def states(self) -> dict[int, JobState]:
        """Return the states of the tasks; OSError if SLURM does not reply."""
        return parse_states(_run("scontrol", "--oneliner", "show", "job", str(self.number)), self.n_tasks)

    def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended; OSError if SLURM does not reply."""
        _run("scancel", str(self.number))
        end = time.monotonic() + CANCEL_S
        while not all(state.is_over for state in self.states().values()) and time.monotonic() < end:
            time.sleep(POLL_S)


def submit(file: Path, n_tasks: int) -> SlurmJob:
    """Submit a script; ``UserError`` if SLURM rejects it."""
    try:
        return SlurmJob(int(_run("sbatch", "--parsable", str(file)).partition(";")[0]), n_tasks)
    except OSError as error:
        raise UserError(f"SLURM rejected {file}: {error}") from error


def follow(job: SlurmJob, logs: Sequence[Path], roots: Sequence[Path]) -> None:
    """Print the states of a job and the logs of its masters until it is over.

    ``RunFailed`` if it fails, ``RunStopped`` if runs in ``roots`` stopped early on request or before the time limit. An
    interrupt cancels the job. The time in the queue is unlimited.
    """
    names = [root.name for root in roots]
    tails = [LogTail(log, f"{name}  " if len(logs) > 1 else "") for log, name in zip(logs, names, strict=True)]
    known: dict[int, JobState] = {}
    last_reply = time.monotonic()
    try:
        while len(known) < job.n_tasks or not all(state.is_over for state in known.values()):
            try:
                states, last_reply = job.states(), time.monotonic()
            except OSError as error:
                states = known
                if time.monotonic() - last_reply > CONTROLLER_DOWN_S:
                    text = f"no reply about job {job.number} for {CONTROLLER_DOWN_S:.0f} s ({error})"
                    raise RunFailed(text) from error
            for task, state in states.items():
                tails[task].poll()
                if str(state) != str(known.get(task)):
                    print(f"{tails[task].prefix}job {job.number} {state}", flush=True)
            known = states
            time.sleep(POLL_S)
    except BaseException:
        job.cancel()
        raise
    for tail in tails:
        tail.poll()
    failed = [f"job {job.number} ({name}) {known[i]}, exit code {known[i].exit_code}; see {logs[i]}"
              for i, name in enumerate(names) if known[i].name != "COMPLETED"]  # fmt: skip
    if failed:
        raise RunFailed("\n".join(failed))
    if stopped := [str(root) for root in roots if RunDir(root).stop.exists()]:
        raise RunStopped(f"stopped; resume with: realhf resume {' or '.join(stopped)}")


class LogTail:
    """Prints new complete lines of a file."""

    def __init__(self, file: Path, prefix: str) -> None:
        self.file, self.prefix = file, prefix
        self._offset = file.stat().st_size if file.exists() else 0

    def poll(self) -> None:
        if not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self._offset)
            lines, newline, _ = file.read().rpartition(b"\n")
        for line in lines.decode(errors="replace").splitlines() if newline else []:
            print(f"{self.prefix}{line}", flush=True)
        self._offset += len(lines) + len(newline)


def parse_states(text: str, n_tasks: int) -> dict[int, JobState]:
    """Parse ``scontrol --oneliner show job``, which has a line per started task and one for all pending tasks.

    Return the states by index in the array, 0 without one.
    """
    states: dict[int, JobState] = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobState" not in fields:
            continue
        code, _, number = fields["ExitCode"].partition(":")
        nodes, restarts = fields.get("NodeList", ""), int(fields.get("Restarts", 0))
        state = JobState(fields["JobState"], fields["Reason"], int(code) or int(number), nodes, restarts)
        tasks = fields.get("ArrayTaskId", "0").partition("%")[0]
        states |= dict.fromkeys(map(int, expand_hostlist(f"[{tasks}]")), state)
    return {task: states[task] for task in sorted(states) if task < n_tasks}


def _run(*command: str) -> str:
    """Run a SLURM program and return its output; OSError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]}: no reply in {error.timeout:.0f} s") from error
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
