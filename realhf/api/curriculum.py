"""What determines the choice of training rows besides seed and position, and the results that it remembers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Band = tuple[float, float]
ALL: Band = (0.0, 1.0)


class PromptResult(NamedTuple):
    """Rewards of all responses to a prompt that have one; ``n_right`` are correct by a verifier, None without one."""

    prompt: int
    rewards: tuple[float, ...]
    n_right: int | None = None


@dataclass(frozen=True)
class CurriculumRules:
    """Options of the curriculum.

    Prompts with a pass rate outside the band are left out of ``recheck_epochs`` epochs (0: of all). At most the share
    ``max_filtered`` of the prompts of an epoch, with mean rewards above ``filter_threshold``, leave the data. Sources
    have ``names`` and ``weights`` (empty: their numbers of rows). Band and weights reach their final values after
    ``ramp_steps`` steps. With ``is_sorted``, the first epoch is in the order of the rows.
    """

    band: Band = ALL
    final_band: Band = ALL
    recheck_epochs: int = 0
    pass_reward: float = 0.0
    filter_threshold: float = 0.0
    max_filtered: float = 0.0
    names: tuple[str, ...] = ("",)
    weights: tuple[float, ...] = ()
    final_weights: tuple[float, ...] = ()
    ramp_steps: int = 0
    is_sorted: bool = False

    @property
    def reads_rewards(self) -> bool:
        return self.band != ALL or self.final_band != ALL or self.max_filtered > 0

    @property
    def has_effect(self) -> bool:
        return self.reads_rewards or self.is_sorted or len(self.names) > 1

    def band_at(self, step: int) -> Band:
        low, high = (self._at(step, *ends) for ends in zip(self.band, self.final_band, strict=True))
        return low, high

    def shares_at(self, step: int) -> tuple[float, ...]:
        """Return the share of each source in the prompts of a step; they add up to 1."""
        ends = (normalised_weights(self.weights), normalised_weights(self.final_weights or self.weights))
        return tuple(self._at(step, *pair) for pair in zip(*ends, strict=True))

    def _at(self, step: int, first: float, final: float) -> float:
        return first + (final - first) * min(1.0, step / self.ramp_steps) if self.ramp_steps else first


def normalised_weights(weights: Sequence[float]) -> list[float]:
    """Return the shares of weights, of which one is positive; the sum of large ones would be infinite."""
    scaled = [weight / max(weights) for weight in weights]
    return [weight / sum(scaled) for weight in scaled]


def source_names(paths: list[str]) -> tuple[str, ...]:
    """Return the names of sources in metrics: those of the files without suffix, numbered if they are not unique."""
    stems = [re.split("[.@]", Path(path.partition(":")[0]).name)[0] for path in paths]
    return tuple(stem if stems.count(stem) == 1 else f"{stem}_{i}" for i, stem in enumerate(stems))
