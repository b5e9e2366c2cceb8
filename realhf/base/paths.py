"""File names of a run. Creates nothing."""

from dataclasses import dataclass
from pathlib import Path


class _PathEntry:
    def __init__(self, name: str) -> None:
        self.name = name

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
    key = _PathEntry("channel.key")  # of the message channel, present during the run
    metrics = _PathEntry("metrics.jsonl")
    evaluation = _PathEntry("evaluation.jsonl")
    failure = _PathEntry("first_failure.txt")  # why the first response without a reward has none
    events = _PathEntry("events.jsonl")
    trace = _PathEntry("trace.json")
    tensorboard = _PathEntry("tensorboard")
    checkpoints = _PathEntry("checkpoints")
    best = _PathEntry("best")  # models of the best evaluation, and best.json, which lists them

    @property
    def lock(self) -> Path:
        """Locked by the process that changes the directory; outside of it, since ``overwrite`` replaces it."""
        root = self.root.resolve()
        return root.with_name(f".{root.name}.lock")

    def log(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    def generations(self, step: int) -> Path:
        return self.root / "generations" / f"step_{step}.jsonl"

    def model(self, role: str, step: int) -> Path:
        return self.root / "models" / role / f"step_{step}"
