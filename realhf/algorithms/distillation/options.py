"""Options of distillation. Imports no torch: options are checked without it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from realhf.api.config.option import FRACTION, NON_NEGATIVE, POSITIVE, Range, opt

PLACEHOLDER = "{prompt}"


class Distillation(Enum):
    reverse_kl = "reverse_kl"
    reverse_kl_reward = "reverse_kl_reward"
    reverse_kl_loss = "reverse_kl_loss"
    forward_kl = "forward_kl"


DISTILLATIONS = {
    "reverse_kl": "advantage log p_teacher - log p of each sampled token (on-policy distillation, arXiv 2306.13649)",
    "reverse_kl_reward": "the same as a reward, so that earlier tokens are credited too (MiniLLM, arXiv 2306.08543)",
    "reverse_kl_loss": "its square / 2 as a loss, with the gradient of KL(student || teacher) on-policy",
    "forward_kl": "KL(teacher || student) over the teacher's top_k tokens as a loss (GKD, arXiv 2306.13649)",
}
"""The values of ``ppo.distill.objective``."""


@dataclass
class DistillConfig:
    """Distillation from a teacher (algorithms/distillation/teacher.py)."""

    objective: Distillation = opt(Distillation.reverse_kl, "; ".join(f"{k}: {v}" for k, v in DISTILLATIONS.items()))
    coef: float = opt(1.0, "weight of the teacher relative to other advantages, rewards or losses", NON_NEGATIVE)
    clip: float | None = opt(None, "clip range of log p_teacher - log p (reverse_kl, reverse_kl_reward)", POSITIVE)
    top_k: int = opt(16, "number of the teacher's most probable tokens (forward_kl)", Range(1, 1024))
    prompt: str = opt("", "prompt of the teacher: {prompt} and fields of the row, such as 'Solution: {solutions[0]} "
                          "{prompt}'; without teacher.path the actor is its own teacher")  # fmt: skip
    ema_eta: float | None = opt(None, "after each step teacher = eta * actor + (1 - eta) * teacher", FRACTION)


def filled_template(template: str, fields: Mapping[str, Any]) -> tuple[str, str]:
    """Return the texts before and after ``{prompt}`` with the fields of a dataset row; ValueError for a missing one."""
    before, after = template.split(PLACEHOLDER)
    try:
        return before.format(**fields), after.format(**fields)
    except (LookupError, AttributeError) as error:
        raise ValueError(f"ppo.distill.prompt: no {error} in a row with the fields {', '.join(fields)}") from error
    except ValueError as error:
        raise ValueError(f"ppo.distill.prompt={template!r}: {error}") from error


def template_problems(template: str, fields: Mapping[str, Any]) -> list[str]:
    try:
        filled_template(template, fields)
    except ValueError as error:
        return [str(error)]
    return []
