"""What a user can set. Plain dataclasses for Hydra: never frozen, no Literal, no optional nested dataclass.

Names follow ReaL and AReaL. One dataclass per concept, passed whole.
"""

from realhf.api.config.choices import (
    Advantage,
    Backend,
    Delta,
    Device,
    GroupStd,
    KLEstimator,
    KLPlace,
    LossAggregation,
    LRSchedule,
    Mode,
    OnBadRow,
    OptimizerType,
    PolicyLoss,
    RecoverMode,
    StepSplitter,
    ValueNormType,
)
from realhf.api.config.dataset import DatasetConfig
from realhf.api.config.experiment import ExperimentConfig, ExperimentControl
from realhf.api.config.launch import PlannerConfig, RayConfig, SlurmConfig, TensorboardConfig, WandbConfig
from realhf.api.config.model import MFCConfig, MicroBatchConfig, ModelSpec, OptimizerConfig, ParallelConfig, VllmConfig
from realhf.api.config.option import opt
from realhf.api.config.ppo import EvaluationConfig, GenerationConfig, PPOConfig, PRMRewardConfig, VineConfig
from realhf.api.config.reward import RewardConfig

__all__ = [
    "Advantage",
    "Backend",
    "DatasetConfig",
    "Delta",
    "PRMRewardConfig",
    "Device",
    "EvaluationConfig",
    "ExperimentConfig",
    "ExperimentControl",
    "GenerationConfig",
    "GroupStd",
    "KLEstimator",
    "KLPlace",
    "LossAggregation",
    "MFCConfig",
    "MicroBatchConfig",
    "Mode",
    "ModelSpec",
    "OnBadRow",
    "OptimizerConfig",
    "OptimizerType",
    "PPOConfig",
    "ParallelConfig",
    "PlannerConfig",
    "PolicyLoss",
    "RayConfig",
    "RecoverMode",
    "RewardConfig",
    "LRSchedule",
    "SlurmConfig",
    "StepSplitter",
    "TensorboardConfig",
    "ValueNormType",
    "VineConfig",
    "VllmConfig",
    "WandbConfig",
    "opt",
]
