"""What tests of layouts compare with one worker: columns, statistics, one step's weights, saved files."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.sharding import LENGTHS, InitialModel, WorkerResult
from tests.models.tiny_models import hf_model

WEIGHTS = "model.safetensors"
CRITIC = " critic"


def starts_of(models: Sequence[str], root: Path) -> dict[str, InitialModel]:
    """Save random models, and return where they and critics that start from them do."""
    for name in {model.removesuffix(CRITIC): None for model in models}:
        hf_model(name).save_pretrained(root / name / "original")
    return {m: InitialModel(root / m.removesuffix(CRITIC) / "original", m.endswith(CRITIC)) for m in models}


def check_columns(whole: WorkerResult, members: Sequence[WorkerResult]) -> None:
    """Together the members have all rows, and each of them is that of one worker."""
    for name, expected in whole.columns.items():
        assert {row for member in members for row in member.columns[name]} == set(expected) == set(range(len(LENGTHS)))
        for member in members:
            assert all(torch.allclose(value, expected[row], atol=1e-4) for row, value in member.columns[name].items())


def check_step(root: Path, layout: str, whole: WorkerResult, members: Sequence[WorkerResult], rel: float = 1e-5,
               file: str = WEIGHTS) -> None:  # fmt: skip
    """The gradient norm and the weights after a step are those of one worker; ``root`` has the models of layouts."""
    (norm, _) = whole.stats["grad_norm"]
    assert all(member.stats["grad_norm"][0] == pytest.approx(norm, rel=rel) for member in members)
    before, expected, trained = (load_file(root / name / file) for name in ("whole/saved", "whole/trained",
                                                                            f"{layout}/trained"))  # fmt: skip
    assert before.keys() == trained.keys() and any(not torch.equal(before[name], trained[name]) for name in trained)
    for name, tensor in trained.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5, rtol=0), name


def check_saved_bytes(root: Path, layout: str, file: str = WEIGHTS) -> None:
    assert (root / layout / "saved" / file).read_bytes() == (root / "whole" / "saved" / file).read_bytes()


def check_statistics(whole: WorkerResult, members: Sequence[WorkerResult], names: Sequence[str], rel: float) -> None:
    """Sums over replicas are those of one worker. Members of the last stage have the loss."""
    replicas = {member.dp: member.stats for member in members if {"nll", "square"} & member.stats.keys()}
    for name in names:
        total = sum(stats[name][0] for stats in replicas.values())
        assert total == pytest.approx(whole.stats[name][0], rel=rel), name
