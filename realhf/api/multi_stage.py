"""Experiments of several runs, one after the other: each reads what those before it wrote."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from realhf.api.config import ExperimentConfig

C = TypeVar("C", bound=ExperimentConfig)


@dataclass(frozen=True)
class Stage:
    """One run of a campaign: its folder ``name``, and the ``experiment`` whose config class ``config`` is of."""

    name: str
    experiment: str
    config: ExperimentConfig


class MultiStageExperiment(ExperimentConfig):
    """A config whose experiment is a list of runs that nobody knows beforehand."""

    def problems(self) -> list[str]:
        """What the options contradict, one line each."""
        return []

    def stages(self, root: Path) -> Iterator[Stage]:
        """Yield run after run. When the next is asked for, the files of the last are in ``root / stage.name``."""
        raise NotImplementedError

    def inherit(self, cls: type[C], **options: Any) -> C:
        """Return the config of a run: this one's common options, with ``options`` on top."""
        common = {field.name: vars(self)[field.name] for field in fields(ExperimentConfig)}
        return cls(**{**common, **options})
