"""Experiments by name. Each is a config dataclass that declares a graph; a user's own is ``file.py:Class``."""

import pkgutil
from pathlib import Path

from realhf.algorithms import load_classes
from realhf.api.config import ExperimentConfig
from realhf.api.experiment import Experiment
from realhf.base.errors import UserError, did_you_mean

EXPERIMENTS: dict[str, str] = {
    "sft": "realhf.experiments.sft:SFTExperiment",
    "rw": "realhf.experiments.rw:RewardModelExperiment",
    "dpo": "realhf.experiments.dpo:DPOExperiment",
    "ppo": "realhf.experiments.ppo:PPOExperiment",
    "ppo-math": "realhf.experiments.ppo_math:PPOMathExperiment",
    "ppo-code": "realhf.experiments.ppo_math:PPOCodeExperiment",
    "grpo": "realhf.experiments.grpo:GRPOExperiment",
    "rloo": "realhf.experiments.grpo:RLOOExperiment",
    "reinforce-pp": "realhf.experiments.grpo:ReinforcePPExperiment",
    "distill": "realhf.experiments.distill:DistillExperiment",
    "remax": "realhf.experiments.remax:ReMaxExperiment",
    "vineppo": "realhf.experiments.vineppo:VinePPOExperiment",
    "restem": "realhf.experiments.restem:RestEMExperiment",
    "bon": "realhf.experiments.bon:BestOfNExperiment",
    "score": "realhf.experiments.scoring:ScoreExperiment",
    "gen": "realhf.experiments.gen:GenerationExperiment",
}
"""Imported on demand, which keeps the command line fast."""

FILE_MODULE = "realhf_experiment_"  # beginning of the module name of a user's file


def experiment_class(name: str) -> type[Experiment]:
    """Return the class of an experiment; ``UserError`` for an unknown name."""
    if ".py:" in name:
        return _from_file(*name.rsplit(":", 1))
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise UserError(f"unknown experiment '{name}' (known: {known}){did_you_mean(name, EXPERIMENTS)}")
    return pkgutil.resolve_name(EXPERIMENTS[name])


def _from_file(file: str, cls: str) -> type[Experiment]:
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"experiment '{file}:{cls}': there is no file {path}")
    try:
        classes = load_classes(path, f"{FILE_MODULE}{path.stem}")  # the file may have the name of a library
    except Exception as error:
        raise UserError(f"experiment '{file}:{cls}' cannot be loaded: {type(error).__name__}: {error}") from error
    classes = {name: value for name, value in classes.items() if issubclass(value, ExperimentConfig)}
    if cls not in classes:
        raise UserError(f"{path} defines no experiment '{cls}'{did_you_mean(cls, classes)}")
    return classes[cls]
