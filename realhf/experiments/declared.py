"""Defaults shared by the experiments."""

import re
from dataclasses import replace

from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.graph import Graph


class DeclaredExperiment(ExperimentConfig):
    """An experiment that is its own config. The options of an MFC are in the field of its name."""

    shared_options = {r"rew_\d+_inf": "rew_inf"}
    """Patterns of MFC names without a field of their own, and the field with their options: members of an ensemble."""

    @property
    def config(self) -> ExperimentConfig:
        return self

    def graph(self) -> Graph:
        raise NotImplementedError

    def placements(self) -> dict[str, MFCConfig]:
        found = {}
        for mfc in self.graph().mfcs:
            fields = (field for pattern, field in self.shared_options.items() if re.fullmatch(pattern, mfc.name))
            if (options := vars(self).get(next(fields, mfc.name))) is not None:
                found[mfc.name] = options
        return found

    def sampling_options(self) -> GenerationConfig | None:
        return None

    def samples_per_prompt(self) -> int:
        return 1

    def problems(self) -> list[str]:
        return []


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
