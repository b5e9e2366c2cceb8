"""Options derived from the policy losses and advantage estimators."""

from dataclasses import dataclass, fields

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realhf.algorithms.policy_gradient.advantages import ADVANTAGES, GroupStd
from realhf.algorithms.policy_gradient.components import Component, help_text, options_class
from realhf.algorithms.policy_gradient.config import Advantage, PolicyLoss, PPOConfig
from realhf.algorithms.policy_gradient.losses.policy_losses import POLICY_LOSSES
from realhf.api.codec import from_plain, to_plain
from realhf.api.config import KLPlace, opt


@dataclass
class SoftOptions:
    tau: float = opt(1.0, "temperature of the gate")


COMPONENTS = {"hard": Component(print, "no options"), "soft": Component(print, "with options", SoftOptions)}


def test_options_are_typed_sections_by_name() -> None:
    sections = options_class("Sections", COMPONENTS)
    assert [field.name for field in fields(sections)] == ["soft"] and sections().soft == SoftOptions()
    tree = OmegaConf.structured(sections)
    OmegaConf.update(tree, "soft.tau", 2)
    assert OmegaConf.to_object(tree) == sections(SoftOptions(2.0))
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.update(tree, "soft.tau", "hot")
    assert from_plain(to_plain(sections(SoftOptions(3.0))), sections) == sections(SoftOptions(3.0))
    assert help_text(COMPONENTS) == "hard: no options; soft: with options"


def test_choices_are_the_keys_of_the_dicts() -> None:
    assert [loss.value for loss in PolicyLoss] == list(POLICY_LOSSES)
    assert [advantage.value for advantage in Advantage] == list(ADVANTAGES)
    config = PPOConfig(policy_loss=PolicyLoss["cispo"], advantage=Advantage["group"])
    config.advantages.group.std = GroupStd.sample
    assert from_plain(to_plain(config), PPOConfig) == config
    assert OmegaConf.to_object(OmegaConf.structured(config)) == config


@pytest.mark.parametrize("name", ADVANTAGES)
def test_default_options_of_components_are_valid(name: str) -> None:
    ppo = PPOConfig(advantage=Advantage[name], group_size=2, disable_value=name != "gae", kl_in=KLPlace.loss)
    assert ADVANTAGES[name].check(ppo) == []
    assert all(loss.check(ppo) == [] for loss in POLICY_LOSSES.values())
