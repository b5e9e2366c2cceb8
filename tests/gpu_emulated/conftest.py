"""Fake devices, and folders with tiny models of the rehearsed families."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_runtime import fake_cuda
from tests.models.tiny_models import hf_model

FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "qwen3_moe", "qwen3_5_text")


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """Two fake devices, ``cuda:0`` and ``cuda:1``."""
    with fake_cuda() as devices:
        yield devices


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: a folder with a tiny random model."""
    made = {}
    for family in (*FAMILIES, "mistral"):
        made[family] = tmp_path_factory.mktemp(family)
        hf_model(family).save_pretrained(made[family])
    return made
