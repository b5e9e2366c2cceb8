"""File names of a run. Creates nothing."""

import os
from dataclasses import dataclass
from pathlib import Path


class _PathEntry:
    def __init__(self, name: str, is_folder: bool = False) -> None:
        self.name, self.is_folder = name, is_folder

    def __get__(self, run: "RunDir", owner: type) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class RunDir:
    """The directory of one trial, ``{fileroot}/{experiment_name}/{trial_name}``."""

    root: Path

    config = _PathEntry("config.yaml")
    plan = _PathEntry("plan.json")
    stages = _PathEntry("stages.json")  # of a multi-stage experiment: its name and the completed stages
    stop = _PathEntry("stop")  # present when the run is to end after the current step
    job_script = _PathEntry("slurm.sh")
    profile_job = _PathEntry("profile_job.json")  # of a profile of several machines, which has no config or plan
    progress = _PathEntry("progress.txt")  # of a profile
    key = _PathEntry("channel.key")  # of the message channel, present during the run
    metrics = _PathEntry("metrics.jsonl")
    evaluation = _PathEntry("evaluation.jsonl")
    failure = _PathEntry("first_failure.txt")  # why the first response without a reward has none
    error = _PathEntry("error.txt")  # why the run failed
    events = _PathEntry("events.jsonl")
    trace = _PathEntry("trace.json")
    tensorboard = _PathEntry("tensorboard", is_folder=True)
    checkpoints = _PathEntry("checkpoints", is_folder=True)
    best = _PathEntry("best", is_folder=True)  # models of the best evaluation, and best.json, which lists them
    logs = _PathEntry("logs", is_folder=True)
    nccl = _PathEntry("nccl", is_folder=True)  # records of NCCL's last operations, after a timeout
    samples = _PathEntry("generations", is_folder=True)
    models = _PathEntry("models", is_folder=True)
    judge = _PathEntry("judge", is_folder=True)  # replies of a language model that judges, and the spending of the run

    @property
    def lock(self) -> Path:
        """Locked by the process that changes the directory; outside of it, since ``overwrite`` replaces it."""
        root = self.root.resolve()
        return root.with_name(f".{root.name}.lock")

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def flight_record(self, rank: int | str) -> Path:
        return self.nccl / f"rank_{rank}"

    def generations(self, step: int) -> Path:
        return self.samples / f"step_{step}.jsonl"

    def model(self, role: str, step: int) -> Path:
        return self.models / role / f"step_{step}"

    def unusable(self, mode: int) -> list[str]:
        """Return the entries of another kind, and those without access of ``mode`` (``os.R_OK``, ``os.W_OK``)."""
        if problem := _problem(self.root, True, mode):
            return [problem]
        entries = {self.root / e.name: e.is_folder for e in vars(RunDir).values() if isinstance(e, _PathEntry)}
        entries |= dict.fromkeys(self.logs.glob("*.log"), False)
        problems = (_problem(*entry, mode) for entry in entries.items())
        return [problem for problem in problems if problem]


def _problem(path: Path, is_folder: bool, mode: int) -> str:
    if not os.path.lexists(path):
        return ""
    if not (os.path.isdir if is_folder else os.path.isfile)(path):
        return f"{path} is not a {'folder' if is_folder else 'regular file'}; move it away or restore it"
    if not os.access(path, mode | os.X_OK if is_folder else mode, effective_ids=True):
        status = path.stat()
        return (f"{path} of user {status.st_uid} with mode {status.st_mode & 0o7777:04o} cannot be "
                f"{'changed' if mode & os.W_OK else 'read'}; correct its owner or mode")  # fmt: skip
    return ""
