"""The learning-rate curve of a run, a function of the step and the total number of steps."""

import math

from realhf.api.config import LRSchedule, OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of step ``0 <= step < total_steps``: linear warm-up, then decay to ``min_lr_ratio``."""
    warmup = math.ceil(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    match config.lr_scheduler_type:
        case LRSchedule.constant:
            shape = 1.0
        case LRSchedule.linear:
            shape = 1.0 - progress
        case LRSchedule.cosine:
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)
