"""The identity of this machine, read from the system."""

import os
from pathlib import Path

import pytest
import torch

from realhf.plan.machines.processor import cores, has_bf16_products, processor_name, torch_version


def test_name_of_the_first_gpu(tmp_path: Path) -> None:
    for number, model in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA A100")):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t 1\n")
    assert processor_name("cuda", tmp_path) == "NVIDIA H100 80GB HBM3"
    assert processor_name("cuda", tmp_path / "none") == ""


def test_this_machine() -> None:
    assert processor_name("cpu") and cores() == os.sched_getaffinity(0)
    assert torch_version() == torch.__version__.partition("+")[0]


@pytest.mark.parametrize(("text", "expected"), [
    ("flags\t\t: fpu avx2 avx512_bf16 sse", True),
    ("flags\t\t: fpu amx_bf16", True),
    ("flags\t\t: fpu avx2 avx512f", False),
    ("Features\t: fp asimd bf16", True),
    ("Features\t: fp asimd", False),
    ("model name\t: one without a list", True),
])  # fmt: skip
def test_instructions_for_bfloat16(text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}\n")
    assert has_bf16_products(str(tmp_path / "cpuinfo")) is expected
