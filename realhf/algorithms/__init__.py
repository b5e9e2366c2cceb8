"""Algorithms. The interfaces by name; a user's own is ``my_file.py:MyInterface``. Imports no torch."""

import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any

import cattrs

from realhf.api.codec import from_plain
from realhf.api.graph import InterfaceSpec
from realhf.base.errors import did_you_mean
from realhf.data.protocols import Interface, InterfaceContext

INTERFACES: dict[str, str] = {
    "dpo": "realhf.algorithms.preference.dpo:DPO",
    "dpo_evaluation": "realhf.algorithms.preference.dpo:DPOEvaluation",
    "ensemble": "realhf.algorithms.reward_model.reward_model:EnsembleReward",
    "episode_rewards": "realhf.algorithms.policy_gradient.rollout:EpisodeRewards",
    "episodes": "realhf.algorithms.policy_gradient.rollout:EpisodeRollout",
    "generation": "realhf.algorithms.policy_gradient.ppo:Generate",
    "labelled_rw": "realhf.algorithms.reward_model.reward_model:LabelledReward",
    "paired_rw": "realhf.algorithms.reward_model.reward_model:PairedReward",
    "ppo_actor": "realhf.algorithms.policy_gradient.ppo:PPOActor",
    "ppo_critic": "realhf.algorithms.policy_gradient.ppo:PPOCritic",
    "reward_model": "realhf.algorithms.reward_model.reward_model:RewardModel",
    "sft": "realhf.algorithms.sft:SFT",
    "teacher": "realhf.algorithms.distillation.teacher:Teacher",
    "verifier": "realhf.algorithms.policy_gradient.verifier:Verifier",
    "vine_advantages": "realhf.algorithms.vineppo.vineppo:VineAdvantages",
    "vine_rollouts": "realhf.algorithms.vineppo.vineppo:VineRollouts",
    "vine_values": "realhf.algorithms.vineppo.vineppo:VineValues",
}
"""Each class has ``config_type``, a dataclass, and is built as ``cls(config, context)``."""


def interface_class(name: str) -> Any:
    """Return the class of an interface; ValueError for an unknown name."""
    if ":" in name:
        return _from_file(*name.rsplit(":", 1))
    if name not in INTERFACES:
        known, hint = ", ".join(sorted(INTERFACES)), did_you_mean(name, INTERFACES)
        raise ValueError(f"unknown interface '{name}'{hint} (known: {known}, or file.py:Class)")
    return pkgutil.resolve_name(INTERFACES[name])


def build_interface(spec: InterfaceSpec, context: InterfaceContext) -> Interface:
    """Build the interface of an MFC; ValueError for an unknown name or an invalid config."""
    cls = interface_class(spec.name)
    try:
        config = from_plain(dict(spec.config), cls.config_type)
    except (cattrs.errors.BaseValidationError, cattrs.errors.ForbiddenExtraKeysError, TypeError, ValueError) as error:
        raise ValueError(f"config of interface '{spec.name}': {error}") from error
    return cls(config, context)


def load_classes(path: Path, module_name: str) -> dict[str, type]:
    """Execute a Python file as module ``module_name`` and return its classes by name."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # needed by dataclasses
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if inspect.isclass(value)}


def _from_file(file: str, class_name: str) -> type:
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"interface '{file}:{class_name}': there is no Python file {path}")
    classes = load_classes(path, f"realhf_interface_{path.stem}")
    if class_name not in classes:
        raise ValueError(f"{path} defines no class '{class_name}'{did_you_mean(class_name, classes)}")
    if "config_type" not in dir(classes[class_name]):
        raise ValueError(f"{path}:{class_name} has no config_type (the dataclass of its options)")
    return classes[class_name]
