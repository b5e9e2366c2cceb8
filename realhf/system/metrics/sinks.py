"""Optional metric sinks, TensorBoard and Weights & Biases, which import their library when they are opened."""

from pathlib import Path
from typing import Any, Protocol

from realhf.api.config import ExperimentConfig, WandbConfig, WandbMode
from realhf.base.errors import UserError
from realhf.base.paths import RunDir


class MetricSink(Protocol):
    def write(self, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorboardSink:
    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def write(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(metrics["step"]))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    def __init__(self, config: WandbConfig, paths: RunDir, settings: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("wandb.mode is set, but wandb is not installed: pip install 'realhf[wandb]'") from error
        name = config.name or "-".join(paths.root.parts[-2:])
        self._run = wandb.init(
            mode=config.mode.value,
            project=config.project,
            entity=config.entity,
            name=name,
            dir=paths.root,
            config=settings,
        )

    def write(self, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=int(metrics["step"]))

    def close(self) -> None:
        self._run.finish()


def open_sinks(config: ExperimentConfig, paths: RunDir, settings: dict[str, Any]) -> list[MetricSink]:
    """Open the configured sinks; ``UserError`` if a library is missing."""
    sinks: list[MetricSink] = []
    if config.tensorboard.enabled:
        sinks.append(TensorboardSink(paths.tensorboard))
    if config.wandb.mode is not WandbMode.disabled:
        sinks.append(WandbSink(config.wandb, paths, settings))
    return sinks
