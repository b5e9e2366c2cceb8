"""What an experiment declares: its graph, its models, and what it reads. Everything else is derived."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec
from realhf.api.graph import Graph


class Task(Enum):
    """What kind of rows the data file holds (SURFACE: data files)."""

    sft = "sft"
    pairs = "pairs"
    ranked = "ranked"
    outcome = "outcome"
    process = "process"
    prompt = "prompt"
    answer = "answer"
    math = "math"
    code = "code"


@dataclass(frozen=True)
class RoleSpec:
    """A role's model: the user's options, whether it ends in a scalar head, whose random weights it starts with."""

    spec: ModelSpec
    scalar_head: bool = False
    starts_as: str | None = None


class Experiment(Protocol):
    """A config dataclass (a subclass of ExperimentConfig) that can say what it stands for."""

    @property
    def config(self) -> ExperimentConfig: ...

    @property
    def task(self) -> Task: ...

    def graph(self) -> Graph: ...

    def roles(self) -> dict[str, RoleSpec]: ...

    def placements(self) -> dict[str, MFCConfig]:
        """The user's options for every MFC, by name."""

    def problems(self) -> list[str]:
        """What the options contradict, one line each."""

    def sampling_options(self) -> GenerationConfig | None:
        """How answers are generated; None where none are."""

    def samples_per_prompt(self) -> int:
        """How many answers are drawn to a prompt."""
