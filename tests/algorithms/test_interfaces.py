"""Interfaces by name, from files, and from plain configs."""

from dataclasses import is_dataclass
from pathlib import Path

import pytest

from realhf.algorithms import INTERFACES, build_interface, interface_class
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.ppo import PPOActor
from realhf.algorithms.policy_gradient.verifier import VerifierConfig
from realhf.api.codec import to_plain
from realhf.api.graph import InterfaceSpec
from realhf.data.protocols import InterfaceContext

CONTEXT = InterfaceContext(seed=1, tokenizer=None, run_root=Path("."))

MINE = """
from dataclasses import dataclass

@dataclass
class Config:
    beta: float = 0.1

class Mine:
    config_type = Config

    def __init__(self, config, context):
        self.config, self.context = config, context

class Bare:
    pass
"""


@pytest.mark.parametrize("name", sorted(INTERFACES))
def test_interfaces_are_built_from_default_configs(name):
    cls = interface_class(name)
    assert is_dataclass(cls.config_type)
    assert isinstance(build_interface(InterfaceSpec(name, to_plain(cls.config_type())), CONTEXT), cls)


def test_config_of_an_interface():
    config = PPOConfig(kl_ctl=0.7, generation_size=4)
    actor = build_interface(InterfaceSpec("ppo_actor", to_plain(config)), CONTEXT)
    assert isinstance(actor, PPOActor) and actor.config == config
    verifier = build_interface(InterfaceSpec("verifier", to_plain(VerifierConfig(ppo=config))), CONTEXT)
    assert verifier.config.ppo == config


def test_user_defined_interface(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    mine = build_interface(InterfaceSpec(f"{file}:Mine", {"beta": 0.3}), CONTEXT)
    assert mine.config.beta == 0.3 and mine.context is CONTEXT
    with pytest.raises(ValueError, match="defines no class 'Mime'  did you mean Mine"):
        build_interface(InterfaceSpec(f"{file}:Mime"), CONTEXT)
    with pytest.raises(ValueError, match="no config_type"):
        build_interface(InterfaceSpec(f"{file}:Bare"), CONTEXT)
    with pytest.raises(ValueError, match="there is no Python file"):
        build_interface(InterfaceSpec(f"{tmp_path}/other.py:Mine"), CONTEXT)


def test_unknown_names_and_options():
    with pytest.raises(ValueError, match="'ppo_actr'  did you mean ppo_actor"):
        build_interface(InterfaceSpec("ppo_actr"), CONTEXT)
    with pytest.raises(ValueError, match="config of interface 'sft'.*seq_men"):
        build_interface(InterfaceSpec("sft", {"seq_men": True}), CONTEXT)
