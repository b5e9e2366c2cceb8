"""What an experiment declares: its graph, its models and its data, or several consecutive runs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec
from realhf.api.config.option import AUTO
from realhf.api.execution_plan import MemorySaving
from realhf.api.graph import Graph
from realhf.api.layout import ParallelStrategy
from realhf.api.machine import EnvironmentLoad
from realhf.api.model_config import ModelConfig

C = TypeVar("C", bound=ExperimentConfig)


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
    episode = "episode"


@dataclass(frozen=True)
class RoleSpec:
    """The model of a role. ``starts_as`` names the role whose random initial weights it copies.

    With ``is_base`` it is the frozen model below the LoRA adapters of ``spec``.
    """

    spec: ModelSpec
    scalar_head: bool = False
    starts_as: str | None = None
    is_base: bool = False

    def with_choices(self, saving: MemorySaving | None) -> "RoleSpec":
        """Return the role with the planner's choices in place of ``auto``; without choices nothing is saved."""
        spec, chosen = self.spec, saving or MemorySaving()
        if spec.gradient_checkpointing == AUTO:
            granularity = chosen.recompute or spec.recompute_granularity
            spec = replace(spec, gradient_checkpointing=chosen.recompute is not None, recompute_granularity=granularity)
        if spec.optimizer.offload == AUTO:
            spec = replace(spec, optimizer=replace(spec.optimizer, offload=chosen.offload_optimizer))
        return self if spec is self.spec else replace(self, spec=spec)

    def zero_stage(self, strategy: ParallelStrategy) -> int:
        """Return the ZeRO stage of the role's training with a strategy; 1 on one data-parallel rank.

        A layout says whether weights are sharded; without it the stage is 2 at most, and 1 if the planner chooses.
        """
        if strategy.dp == 1:
            return 1
        stage = self.spec.zero_stage
        return 3 if strategy.zero3 else min(1 if isinstance(stage, str) else stage, 2)


class Experiment(ExperimentConfig):
    """A config that declares a graph. The options of an MFC are in the field of its name."""

    shared_options = {r"rew_\d+_inf": "rew_inf"}
    """Patterns of MFC names without a field of their own, and the field with their options: members of an ensemble."""

    @property
    def task(self) -> Task:
        raise NotImplementedError

    def graph(self) -> Graph:
        raise NotImplementedError

    def roles(self) -> dict[str, RoleSpec]:
        raise NotImplementedError

    def placements(self) -> dict[str, MFCConfig]:
        """Return the placement options of every MFC, by name."""
        found = {}
        for mfc in self.graph().mfcs:
            names = (field for pattern, field in self.shared_options.items() if re.fullmatch(pattern, mfc.name))
            if (options := vars(self).get(next(names, mfc.name))) is not None:
                found[mfc.name] = options
        return found

    def divided_graph(self) -> Graph:
        """Return the graph with ``prompts_per_call`` of every MFC."""
        sizes = {name: options.prompts_per_call for name, options in self.placements().items()}
        return self.graph().with_batch_sizes({name: size for name, size in sizes.items() if size is not None})

    def sampling_options(self) -> GenerationConfig | None:
        """Return the options of generation; None if the experiment does not generate."""
        return None

    def planned_sampling(self) -> GenerationConfig | None:
        """Return the options of generation with the number of new tokens of a row, those of environments included."""
        return self.sampling_options()

    def expected_new_tokens(self) -> float | None:
        """Return the expected number of new tokens of a row; None for the maximum."""
        return self.planner.new_tokens

    def max_episodes(self) -> int:
        """Return the number of episodes that are open at a time; 0 without environments."""
        return 0

    def environment_load(self) -> EnvironmentLoad | None:
        """Return how episodes wait for environments; None without environments, or if they take no time."""
        return None

    def samples_per_prompt(self) -> int:
        return 1

    def problems(self) -> list[str]:
        """Return contradictions between options, one line each."""
        return []

    def model_problems(self, models: Mapping[str, ModelConfig]) -> list[str]:
        """Return reasons why the roles' models do not fit the options."""
        return []

    def row_problems(self, fields: Mapping[str, Any]) -> list[str]:
        """Return reasons why the first row of the data, with these fields, does not fit the options."""
        return []

    def tokenizer_problems(self, n_tokens: int) -> list[str]:
        """Return reasons why a tokenizer of so many tokens does not fit the options."""
        return []


@dataclass(frozen=True)
class Stage:
    """One run of a multi-stage experiment; ``name`` is its folder, ``experiment`` the registered name of ``config``."""

    name: str
    experiment: str
    config: Experiment


class MultiStageExperiment(Experiment):
    """The options of an experiment of several runs, each of which may read the results of earlier ones."""

    def stages(self, root: Path) -> Iterator[Stage]:
        """Yield the runs in order. The files of a stage are in ``root / stage.name`` before the next is requested."""
        raise NotImplementedError

    def inherit(self, cls: type[C], **options: Any) -> C:
        """Return the config of a stage: the common options of this one, updated with ``options``."""
        common = {field.name: vars(self)[field.name] for field in fields(ExperimentConfig)}
        return cls(**{**common, **options})
