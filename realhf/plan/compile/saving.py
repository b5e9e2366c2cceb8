"""Memory savings that an allocation names, checked against the options of the roles."""

from collections.abc import Mapping
from dataclasses import dataclass

from realhf.api.config.choices import Backend, Recompute
from realhf.api.config.model import ModelSpec
from realhf.api.config.option import AUTO
from realhf.api.execution_plan import MemorySaving
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC

NOTHING = "none"
"""What the backward pass recomputes in the text of a plan, if it is nothing."""
RECOMPUTED = (NOTHING, *(choice.value for choice in Recompute))


@dataclass(frozen=True)
class NamedSaving:
    """The saving of a call as an allocation names it: one of ``RECOMPUTED`` and whether optimizer state is offloaded.

    None for a part that is not named.
    """

    recompute: str | None = None
    offload: bool | None = None

    def __str__(self) -> str:
        recompute = [f"recompute={self.recompute}"] if self.recompute else []
        return ":".join([*recompute, "offload"] if self.offload else recompute)


def name_saving(saving: MemorySaving) -> NamedSaving:
    return NamedSaving(saving.recompute.value if saving.recompute else NOTHING, saving.offload_optimizer)


def saving_of(
    mfc: MFC, given: NamedSaving, roles: Mapping[str, RoleSpec], device: str
) -> tuple[MemorySaving | None, str]:
    """Return the saving of a call, and why it cannot have it (or an empty string).

    A part that is not named is what the option of the role says, and nothing is saved where the option is ``auto``. The
    saving is None if no option is ``auto``. On CPUs optimizer state is in host memory anyway.
    """
    if mfc.role is None or not mfc.is_train:
        return None, f"'{given}' is for training calls, and this is {mfc.kind.value}; leave it out"
    spec = roles[mfc.role].spec
    if problem := _problem(mfc.role, spec, given, device):
        return None, problem
    chooses_recompute = spec.gradient_checkpointing == AUTO
    chooses_offload = spec.optimizer.offload == AUTO and device != "cpu"
    if not chooses_recompute and not chooses_offload:
        return None, ""
    recompute = spec.recompute
    if chooses_recompute and given.recompute not in (None, NOTHING):
        recompute = Recompute(given.recompute)
    offload = bool(given.offload) if chooses_offload else spec.optimizer.offload is True
    return MemorySaving(recompute, offload and device != "cpu"), ""


def _problem(role: str, spec: ModelSpec, given: NamedSaving, device: str) -> str:
    """Return the option that contradicts the saving, or an empty string."""
    option = f"{role}.gradient_checkpointing"
    kept = spec.recompute.value if spec.recompute else NOTHING
    if spec.gradient_checkpointing != AUTO and given.recompute not in (None, kept):
        granularity = f" {role}.recompute_granularity={kept}" if spec.recompute else ""
        return (f"recompute={given.recompute} contradicts {option}={spec.gradient_checkpointing}{granularity}; "
                f"set {option}=auto")  # fmt: skip
    if given.offload is None or device == "cpu":
        return ""
    option = f"{role}.optimizer.offload"
    if spec.optimizer.offload != AUTO and given.offload != spec.optimizer.offload:
        what = "offload" if given.offload else "optimizer state on the device"
        return f"{what} contradicts {option}={spec.optimizer.offload}; set {option}=auto"
    if given.offload and spec.backend is Backend.megatron:
        return f"offload is not possible with {role}.backend=megatron; leave it out"
    return ""
