"""Default types of models."""

import pytest

from realhf.api.config import ModelSpec
from realhf.api.config.preference import EnsembleConfig
from realhf.apps.prepare.backends import resolve_dtypes
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment


@pytest.mark.parametrize("bf16", [False, True])
def test_every_role_has_a_dtype(bf16: bool) -> None:
    """Also a critic that starts as its actor, and the members of an ensemble, which have no options of their own."""
    for experiment in (
        PPOMathExperiment(actor=ModelSpec(path="m")),
        PPOExperiment(actor=ModelSpec(path="m"), rew=ModelSpec(path="r")),
        PPOExperiment(actor=ModelSpec(path="m"), ensemble=EnsembleConfig(members=["a", "b"])),
    ):
        resolve_dtypes(experiment, bf16)
        assert {spec.spec.bf16 for spec in experiment.roles().values()} == {bf16}
