"""Options of models that the configuration of a model contradicts, and that would have no effect."""

import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from realhf.api.config import LoraOptions, ModelSpec
from realhf.api.config.choices import Quantization
from realhf.api.experiment import RoleSpec
from realhf.plan.run_spec import model_config

CHANGED = {
    "alpha": 8.0,
    "targets": ["q_proj"],
    "dropout": 0.1,
    "init_from": "/adapters",
    "merge_on_save": True,
    "quantization": Quantization.int8,
    "quantization_group_size": 16,
}


def test_every_option_of_adapters_is_covered() -> None:
    assert {option.name for option in fields(LoraOptions)} == {"rank", *CHANGED}


@pytest.mark.parametrize("seed", range(10))
def test_options_of_adapters_without_a_rank_are_refused(actor_folder: Path, seed: int) -> None:
    dice = random.Random(seed)
    names = [name for name in CHANGED if dice.random() < 0.5] or ["alpha"]
    lora = replace(LoraOptions(), **{name: CHANGED[name] for name in names})
    with pytest.raises(ValueError) as caught:
        model_config(RoleSpec(ModelSpec(path=str(actor_folder), lora=lora)))
    assert str(caught.value).startswith(", ".join(f"lora.{name}" for name in names) + " without lora.rank")


@pytest.mark.parametrize("alpha", [3e38, 3.5e38, 1e300])
def test_a_scaling_must_be_a_float32(actor_folder: Path, alpha: float) -> None:
    role = RoleSpec(ModelSpec(path=str(actor_folder), lora=LoraOptions(1, alpha)))
    if alpha < 3.4e38:
        assert model_config(role).lora is not None
        return
    with pytest.raises(ValueError, match="larger than a float32"):
        model_config(role)
