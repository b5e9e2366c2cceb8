"""Pipeline schedules: for one stage, the order in which micro-batches are received, computed and sent."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecvActivation:
    micro_batch: int


@dataclass(frozen=True)
class Forward:
    micro_batch: int


@dataclass(frozen=True)
class SendActivation:
    micro_batch: int


@dataclass(frozen=True)
class RecvGradient:
    micro_batch: int


@dataclass(frozen=True)
class Backward:
    micro_batch: int


@dataclass(frozen=True)
class SendGradient:
    micro_batch: int


StageStep = RecvActivation | Forward | SendActivation | RecvGradient | Backward | SendGradient


def _forward(stage: int, n_stages: int, i: int) -> list[StageStep]:
    steps: list[StageStep] = [RecvActivation(i)] if stage > 0 else []
    steps.append(Forward(i))
    return steps + ([SendActivation(i)] if stage < n_stages - 1 else [])


def _backward(stage: int, n_stages: int, i: int) -> list[StageStep]:
    steps: list[StageStep] = [RecvGradient(i)] if stage < n_stages - 1 else []
    steps.append(Backward(i))
    return steps + ([SendGradient(i)] if stage > 0 else [])


def inference_schedule(stage: int, n_stages: int, n_micro_batches: int) -> tuple[StageStep, ...]:
    """Stream micro-batches through the stages one after the other."""
    return tuple(step for i in range(n_micro_batches) for step in _forward(stage, n_stages, i))


def train_schedule(stage: int, n_stages: int, n_micro_batches: int) -> tuple[StageStep, ...]:
    """One forward, one backward (PipeDream-flush, Narayanan et al. 2021): stage s holds at most n_stages - s."""
    ahead = min(n_stages - 1 - stage, n_micro_batches)
    steps = [step for i in range(ahead) for step in _forward(stage, n_stages, i)]
    for i in range(n_micro_batches):
        if i + ahead < n_micro_batches:
            steps += _forward(stage, n_stages, i + ahead)
        steps += _backward(stage, n_stages, i)
    return tuple(steps)
