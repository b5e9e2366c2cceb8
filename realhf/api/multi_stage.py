"""Experiments of several consecutive runs, where each run may read the results of earlier ones."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from realhf.api.config import ExperimentConfig

C = TypeVar("C", bound=ExperimentConfig)


@dataclass(frozen=True)
class Stage:
    """One run of a multi-stage experiment; ``name`` is its folder, ``experiment`` the registered name of ``config``."""

    name: str
    experiment: str
    config: ExperimentConfig


class MultiStageExperiment(ExperimentConfig):
    """The options of an experiment that generates its runs one after the other."""

    def problems(self) -> list[str]:
        """Return contradictions between options, one line each."""
        return []

    def stages(self, root: Path) -> Iterator[Stage]:
        """Yield the runs in order. The files of a stage are in ``root / stage.name`` before the next is requested."""
        raise NotImplementedError

    def inherit(self, cls: type[C], **options: Any) -> C:
        """Return the config of a stage: the common options of this one, updated with ``options``."""
        common = {field.name: vars(self)[field.name] for field in fields(ExperimentConfig)}
        return cls(**{**common, **options})
