"""Models shared by the experiments."""

from dataclasses import replace

from realhf.api.config import ModelSpec
from realhf.api.experiment import RoleSpec


def has_model(spec: ModelSpec) -> bool:
    return spec.path is not None or spec.config is not None


def reference_role(ref: ModelSpec, actor: ModelSpec) -> RoleSpec:
    """Return the role of the reference model, by default a copy of the initial actor."""
    if has_model(ref):
        return RoleSpec(ref)
    return RoleSpec(replace(actor, gradient_checkpointing=False, offload=ref.offload), starts_as="actor")


def reference_problems(ref: ModelSpec) -> list[str]:
    """Return a problem if the default reference has options other than ``offload``."""
    if has_model(ref) or replace(ref, offload=False) == ModelSpec():
        return []
    return ["ref has options, but ref.path and ref.config are not set"]
