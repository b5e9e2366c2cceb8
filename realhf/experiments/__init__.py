"""Floor 8: experiments by name. Each is a config dataclass that declares a graph; a user's own is ``file.py:Class``."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

from realhf.api.config import ExperimentConfig
from realhf.base.errors import UserError, did_you_mean

EXPERIMENTS: dict[str, str] = {
    "sft": "realhf.experiments.sft:SFTExperiment",
    "rw": "realhf.experiments.rw:RewardModelExperiment",
    "dpo": "realhf.experiments.dpo:DPOExperiment",
    "ppo": "realhf.experiments.ppo:PPOExperiment",
    "ppo-math": "realhf.experiments.ppo_math:PPOMathExperiment",
    "ppo-code": "realhf.experiments.ppo_code:PPOCodeExperiment",
    "grpo": "realhf.experiments.grpo:GRPOExperiment",
    "rloo": "realhf.experiments.grpo:RLOOExperiment",
    "reinforce-pp": "realhf.experiments.grpo:ReinforcePPExperiment",
    "remax": "realhf.experiments.remax:ReMaxExperiment",
    "vineppo": "realhf.experiments.vineppo:VinePPOExperiment",
    "restem": "realhf.experiments.restem:RestEMExperiment",
    "bon": "realhf.experiments.bon:BestOfNExperiment",
    "score": "realhf.experiments.scoring:ScoreExperiment",
    "gen": "realhf.experiments.gen:GenerationExperiment",
}
"""Loaded when asked for, so that the command line answers at once."""


def experiment_class(name: str) -> type[ExperimentConfig]:
    """Return the class behind a name; ``UserError`` with the nearest known one where there is none."""
    if ".py:" in name:
        return _from_file(*name.rsplit(":", 1))
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise UserError(f"unknown experiment '{name}' (known: {known}){did_you_mean(name, EXPERIMENTS)}")
    module, _, cls = EXPERIMENTS[name].partition(":")
    return getattr(importlib.import_module(module), cls)


def _from_file(file: str, cls: str) -> type[ExperimentConfig]:
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"experiment '{file}:{cls}': there is no file {path}")
    name = f"realhf_experiment_{path.stem}"  # a file may be called like a library
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"experiment '{file}:{cls}' cannot be loaded: {type(error).__name__}: {error}") from error
    found = {k: v for k, v in vars(module).items() if inspect.isclass(v) and issubclass(v, ExperimentConfig)}
    if cls not in found:
        raise UserError(f"{path} defines no experiment '{cls}'{did_you_mean(cls, found)}")
    return found[cls]
