"""Where a run keeps its files. Only names: nothing here makes a directory."""

from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "ops" / "_C.so"
"""What csrc compiles to; torch loads it."""


@dataclass(frozen=True)
class RunDir:
    """The directory of one trial, ``{fileroot}/{experiment_name}/{trial_name}``."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def stages(self) -> Path:
        """Which experiment a campaign is, and which of its stages are done."""
        return self.root / "stages.json"

    @property
    def lock(self) -> Path:
        """Held by the master as long as the run goes on."""
        return self.root / "lock"

    @property
    def stop(self) -> Path:
        """There when the run shall end after the step it is at."""
        return self.root / "stop"

    @property
    def job_script(self) -> Path:
        return self.root / "slurm.sh"

    @property
    def key(self) -> Path:
        """The key of the channel, as long as the run goes on."""
        return self.root / "channel.key"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def best(self) -> Path:
        """Models of the best evaluation so far, and ``best.json``, which names them."""
        return self.root / "best"

    def log(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    def generations(self, step: int) -> Path:
        return self.root / "generations" / f"step_{step}.jsonl"

    def model(self, role: str, step: int) -> Path:
        return self.root / "models" / role / f"step_{step}"
