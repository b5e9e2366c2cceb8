"""Defaults shared by the experiments."""

from dataclasses import replace

from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.graph import Graph


class DeclaredExperiment(ExperimentConfig):
    """An experiment that is its own config. The options of an MFC are in the field of its name."""

    fallback_mfc = "rew_inf"
    """The field with the options of MFCs without a field of their name."""

    @property
    def config(self) -> ExperimentConfig:
        return self

    def graph(self) -> Graph:
        raise NotImplementedError

    def placements(self) -> dict[str, MFCConfig]:
        options = vars(self)
        return {mfc.name: options.get(mfc.name) or options[self.fallback_mfc] for mfc in self.graph().mfcs}

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
