"""What an experiment declares: its graph, its models and its data."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec
from realhf.api.graph import Graph


class Task(Enum):
    """The kind of rows in the data file."""

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
    """The model of a role. ``starts_as`` names the role whose random initial weights it copies."""

    spec: ModelSpec
    scalar_head: bool = False
    starts_as: str | None = None


class Experiment(Protocol):
    """A config dataclass (a subclass of ExperimentConfig) that declares a graph."""

    @property
    def config(self) -> ExperimentConfig: ...

    @property
    def task(self) -> Task: ...

    def graph(self) -> Graph: ...

    def roles(self) -> dict[str, RoleSpec]: ...

    def placements(self) -> dict[str, MFCConfig]:
        """Return the placement options of every MFC, by name."""

    def problems(self) -> list[str]:
        """Return contradictions between options, one line each."""

    def sampling_options(self) -> GenerationConfig | None:
        """Return the options of generation; None if the experiment does not generate."""

    def samples_per_prompt(self) -> int: ...
