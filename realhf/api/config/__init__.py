"""User options as plain dataclasses for OmegaConf: not frozen, no Literal, no optional nested dataclass."""
# ruff: noqa: F401  (re-exports)

from realhf.api.config.choices import (
    Backend,
    Delta,
    Device,
    KLEstimator,
    KLPlace,
    LossAggregation,
    LRSchedule,
    Mode,
    OnBadRow,
    OptimizerType,
    Recompute,
    RecoverMode,
    StepSplitter,
    ValueLossType,
    ValueNormType,
    WandbMode,
)
from realhf.api.config.dataset import CurriculumConfig, DatasetConfig
from realhf.api.config.environment import EnvConfig
from realhf.api.config.experiment import ExperimentConfig, ExperimentControl, ResumeConfig
from realhf.api.config.generation import EvaluationConfig, GenerationConfig
from realhf.api.config.launch import PlannerConfig, RayConfig, SlurmConfig, TensorboardConfig, WandbConfig
from realhf.api.config.model import (
    LoraOptions,
    MFCConfig,
    MicroBatchConfig,
    ModelSpec,
    OptimizerConfig,
    ParallelConfig,
    VllmConfig,
)
from realhf.api.config.option import opt
from realhf.api.config.reward import LLMJudgeConfig, RewardConfig
