"""Runs as jobs of SLURM: the script that ``sbatch`` gets, and the job followed from the queue to its end."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realhf.api.config import ExperimentConfig, RecoverMode
from realhf.base.errors import RunFailed
from realhf.base.paths import RunDir
from realhf.launch.command import python_path
from realhf.launch.slurm import gpus

POLL_S = 1.0
CANCEL_S = 60.0
"""How long a cancelled job is waited for: SLURM kills after KillWait, 30 s by default, who has not left by then."""
SILENCE_S = 600.0
"""How long the controller may say nothing: it is restarted now and then, and jobs go on without it."""
OVER = frozenset(("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                  "PREEMPTED", "REVOKED", "SPECIAL_EXIT", "TIMEOUT"))  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """What SLURM says of a job: ``task`` is its place in an array, 0 where there is none."""

    task: int
    name: str
    reason: str
    exit_code: int
    nodes: str
    restarts: int

    @property
    def is_over(self) -> bool:
        return self.name in OVER

    def __str__(self) -> str:
        times = f", started {self.restarts + 1} times" if self.restarts else ""
        if self.name == "PENDING":
            return f"waits in the queue ({self.reason}){times}"
        if self.name == "RUNNING":
            return f"runs on {self.nodes}{times}"
        return f"is {self.name.lower()}{times}"


def script(roots: Sequence[Path], config: ExperimentConfig, device: str, folder: Path) -> str:
    """Return the batch script for the runs in ``roots``, an array where there are several; ``folder`` gets its logs.

    The script becomes the master, which starts the workers with ``srun``. A job that SLURM starts again goes on from
    the last checkpoint of its run.
    """
    options = config.slurm
    several = len(roots) > 1
    again = config.recover_mode in (RecoverMode.auto, RecoverMode.fault)
    asked = {
        "job-name": f"{config.experiment_name}-{config.trial_name}",
        "array": f"0-{len(roots) - 1}" if several else "",
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
        "output": log_file(folder, "%a" if several else "").resolve(),
        "open-mode": "append",
    }
    words = [f"--{name}={shlex.quote(str(value))}" for name, value in asked.items() if value != ""]
    words += ["--exclusive"] if options.exclusive else []
    words += ["--requeue" if again else "--no-requeue", *options.extra]
    runs = " ".join(shlex.quote(str(root.resolve())) for root in roots)
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH {word}" for word in words),
        *options.setup,
        f"export PYTHONPATH={shlex.quote(python_path())}",
        f"runs=({runs})",
        f'exec {shlex.quote(sys.executable)} -m realhf.apps.commands.master "${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}"',
        "",
    ])  # fmt: skip


def log_file(folder: Path, task: int | str = "") -> Path:
    """Return the log of a job's master: of one task, where there is an array."""
    return RunDir(folder).log(f"slurm-{task}" if task != "" else "slurm")


class SlurmJob:
    """A job that was submitted. ``n_tasks`` is the length of its array, 1 where it has none."""

    def __init__(self, number: int, n_tasks: int) -> None:
        self.number, self.n_tasks = number, n_tasks

    def states(self) -> dict[int, JobState]:
        """Return how the tasks are; OSError when SLURM does not answer."""
        return parse_states(_ask("scontrol", "--oneliner", "show", "job", str(self.number)), self.n_tasks)

    def end(self) -> None:
        """Cancel all tasks and wait until they are gone; OSError when SLURM does not answer."""
        _ask("scancel", str(self.number))
        end = time.monotonic() + CANCEL_S
        while not all(state.is_over for state in self.states().values()) and time.monotonic() < end:
            time.sleep(POLL_S)


def submit(file: Path, n_tasks: int) -> SlurmJob:
    """Hand a script to SLURM; ``RunFailed`` with its words where it is refused."""
    try:
        return SlurmJob(int(_ask("sbatch", "--parsable", str(file)).partition(";")[0]), n_tasks)
    except OSError as error:
        raise RunFailed(f"SLURM refused {file}: {error}") from error


def follow(job: SlurmJob, logs: Sequence[Path], names: Sequence[str]) -> None:
    """Show what happens to a job and what its masters write, until it is over; ``RunFailed`` if it ends badly.

    An interrupt cancels the job. There is no limit to how long it may wait in the queue.
    """
    ears = [LogTail(log, f"{name}  " if len(logs) > 1 else "") for log, name in zip(logs, names, strict=True)]
    known: dict[int, JobState] = {}
    answered = time.monotonic()
    try:
        while len(known) < job.n_tasks or not all(state.is_over for state in known.values()):
            try:
                states, answered = job.states(), time.monotonic()
            except OSError as error:
                states = known
                if time.monotonic() - answered > SILENCE_S:
                    raise RunFailed(f"no word about job {job.number} for {SILENCE_S:.0f} s ({error})") from error
            for task, state in states.items():
                ears[task].poll()
                if str(state) != str(known.get(task)):
                    print(f"{ears[task].prefix}job {job.number} {state}", flush=True)
            known = states
            time.sleep(POLL_S)
    except BaseException:
        job.end()
        raise
    for ear in ears:
        ear.poll()
    bad = [f"job {job.number} ({name}) {known[i]}, exit code {known[i].exit_code}; see {logs[i]}"
           for i, name in enumerate(names) if known[i].name != "COMPLETED"]  # fmt: skip
    if bad:
        raise RunFailed("\n".join(bad))


class LogTail:
    """Prints what is new in a file, line by line."""

    def __init__(self, file: Path, prefix: str) -> None:
        self.file, self.prefix = file, prefix
        self._heard = file.stat().st_size if file.exists() else 0

    def poll(self) -> None:
        if not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self._heard)
            whole = file.read().rpartition(b"\n")
        for line in whole[0].decode(errors="replace").splitlines() if whole[1] else []:
            print(f"{self.prefix}{line}", flush=True)
        self._heard += len(whole[0]) + len(whole[1])


def parse_states(text: str, n_tasks: int) -> dict[int, JobState]:
    """Read ``scontrol --oneliner show job``: one line per task that was started, one for all that were not."""
    found: dict[int, JobState] = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobState" not in fields:
            continue
        place = fields.get("ArrayTaskId", "0").partition("%")[0]
        code, _, number = fields["ExitCode"].partition(":")
        state = (fields["JobState"], fields["Reason"], int(code) or int(number), fields.get("NodeList", ""),
                 int(fields.get("Restarts", 0)))  # fmt: skip
        for part in place.split(","):
            first, _, last = part.partition("-")
            for task in range(int(first), int(last or first) + 1):
                found[task] = JobState(task, *state)
    return {task: found[task] for task in sorted(found) if task < n_tasks}


def _ask(*command: str) -> str:
    """Run a program of SLURM and return what it says; OSError with its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} gave no answer in {error.timeout:.0f} s") from error
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
