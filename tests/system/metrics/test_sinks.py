"""Metric sinks, read back with TensorBoard's reader."""

import importlib.util
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from realhf.api.config import ExperimentConfig, TensorboardConfig, WandbConfig, WandbMode
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.system.metrics.sinks import open_sinks


def test_tensorboard_reads_the_metrics(tmp_path: Path) -> None:
    (sink,) = open_sinks(ExperimentConfig(), RunDir(tmp_path), {})
    for step in (1, 2, 3):
        sink.write({"step": step, "loss": 1.0 / step, "reward/mean": -0.5})
    sink.close()
    events = EventAccumulator(str(RunDir(tmp_path).tensorboard), {"tensors": 0})
    events.Reload()
    assert sorted(events.Tags()["tensors"]) == ["loss", "reward/mean"]
    losses = [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors("loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]


def test_disabled_sinks_are_not_opened(tmp_path: Path) -> None:
    assert open_sinks(ExperimentConfig(tensorboard=TensorboardConfig(enabled=False)), RunDir(tmp_path), {}) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_missing_wandb_is_a_user_error(tmp_path: Path) -> None:
    config = ExperimentConfig(tensorboard=TensorboardConfig(enabled=False), wandb=WandbConfig(mode=WandbMode.offline))
    with pytest.raises(UserError, match=r"realhf\[wandb\]"):
        open_sinks(config, RunDir(tmp_path), {})
