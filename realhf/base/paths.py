"""File names of a run. Creates nothing."""

from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "ops" / "_C.so"
"""The compiled csrc, loaded by torch."""


class _Entry:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", owner: type) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class RunDir:
    """The directory of one trial, ``{fileroot}/{experiment_name}/{trial_name}``."""

    root: Path

    config = _Entry("config.yaml")
    plan = _Entry("plan.json")
    stages = _Entry("stages.json")  # of a multi-stage experiment: its name and the completed stages
    lock = _Entry("lock")  # held by the master during the run
    stop = _Entry("stop")  # present when the run is to end after the current step
    job_script = _Entry("slurm.sh")
    key = _Entry("channel.key")  # of the message channel, present during the run
    metrics = _Entry("metrics.jsonl")
    evaluation = _Entry("evaluation.jsonl")
    events = _Entry("events.jsonl")
    trace = _Entry("trace.json")
    tensorboard = _Entry("tensorboard")
    checkpoints = _Entry("checkpoints")
    best = _Entry("best")  # models of the best evaluation, and best.json, which lists them

    def log(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    def generations(self, step: int) -> Path:
        return self.root / "generations" / f"step_{step}.jsonl"

    def model(self, role: str, step: int) -> Path:
        return self.root / "models" / role / f"step_{step}"
