"""Floor 5: what to do with a batch. The interfaces by name; a user's own is ``my_file.py:MyInterface``."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import cattrs

from realhf.algorithms.policy_gradient.generation import Generate
from realhf.algorithms.policy_gradient.ppo import PPOActor, PPOCritic
from realhf.algorithms.policy_gradient.verifier import Verifier
from realhf.algorithms.preference.dpo import DPO, DPOEvaluation
from realhf.algorithms.reward_model.ensemble import EnsembleReward
from realhf.algorithms.reward_model.reward_model import LabelledReward, PairedReward, RewardModel
from realhf.algorithms.sft import SFT
from realhf.algorithms.vineppo.vineppo import VineAdvantages, VineRollouts, VineValues
from realhf.api.codec import from_plain
from realhf.api.graph import InterfaceSpec
from realhf.base.errors import did_you_mean
from realhf.data.protocols import Interface, InterfaceContext

INTERFACES: dict[str, type] = {
    "dpo": DPO,
    "dpo_evaluation": DPOEvaluation,
    "ensemble": EnsembleReward,
    "generation": Generate,
    "labelled_rw": LabelledReward,
    "paired_rw": PairedReward,
    "ppo_actor": PPOActor,
    "ppo_critic": PPOCritic,
    "reward_model": RewardModel,
    "sft": SFT,
    "verifier": Verifier,
    "vine_advantages": VineAdvantages,
    "vine_rollouts": VineRollouts,
    "vine_values": VineValues,
}
"""Every class has ``config_type``, a dataclass, and is built as ``cls(config, context)``."""


def interface_class(name: str) -> Any:
    """Return the class that ``name`` stands for; ValueError when there is none."""
    if ":" in name:
        return _from_file(*name.rsplit(":", 1))
    if name not in INTERFACES:
        known = ", ".join(sorted(INTERFACES))
        raise ValueError(
            f"unknown interface '{name}'{did_you_mean(name, INTERFACES)} (known: {known}, or file.py:Class)"
        )
    return INTERFACES[name]


def build_interface(spec: InterfaceSpec, context: InterfaceContext) -> Interface:
    """Build the interface of an MFC on a worker; ValueError for an unknown name or a config that does not fit it."""
    cls = interface_class(spec.name)
    try:
        config = from_plain(dict(spec.config), cls.config_type)
    except (cattrs.errors.BaseValidationError, cattrs.errors.ForbiddenExtraKeysError, TypeError, ValueError) as error:
        raise ValueError(f"config of interface '{spec.name}': {error}") from error
    return cls(config, context)


def _from_file(file: str, class_name: str) -> type:
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"interface '{file}:{class_name}': there is no Python file {path}")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    classes = {k: v for k, v in vars(module).items() if inspect.isclass(v)}
    if class_name not in classes:
        raise ValueError(f"{path} defines no class '{class_name}'{did_you_mean(class_name, classes)}")
    if "config_type" not in dir(classes[class_name]):
        raise ValueError(f"{path}:{class_name} has no config_type (the dataclass of its options)")
    return classes[class_name]
