"""``realhf model check`` finds models that equal those of transformers, and a family that is wrong."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf.api.layout import ParallelStrategy
from realhf.apps.main import EXIT_FAILED, EXIT_USER, run
from realhf.arch.families import FAMILIES
from realhf.base.errors import RunFailed
from realhf.system.model_check.layout_ranks import in_layout
from tests.models.tiny_models import hf_model


def check(folder: Path, *options: str) -> int:
    return run(["model", "check", str(folder), *options])


def test_a_model_that_equals_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_model("qwen3").save_pretrained(tmp_path)
    assert check(tmp_path, "layouts=t2,p2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["one", "greedy", "saved", "d1t2p1", "d1t1p2"]
    assert all(line.startswith("ok") for line in lines[:-1]) and "equals that of transformers" in lines[-1]


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_a_configuration_without_weights(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_model(name).config.save_pretrained(tmp_path)
    assert check(tmp_path, "layers=1", "layouts=") == 0
    assert "3 rows" not in capsys.readouterr().out


def test_a_family_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    right = FAMILIES["llama"]
    wrong = replace(right, config_from_hf=lambda hf, scalar: replace(right.config_from_hf(hf, scalar), norm_eps=0.3))
    monkeypatch.setitem(FAMILIES, "llama", wrong)
    assert check(tmp_path, "layouts=") == EXIT_FAILED
    output, errors = capsys.readouterr()
    assert output.count("FAILED") == 2 and "2 checks of" in errors


@pytest.mark.parametrize(
    "options, problem",
    [
        (["layouts=t2,d2"], "d2 has data parallelism"),
        (["layouts=x"], "layouts=x"),
        (["layers=9"], "layers=9: the model has 2"),
        (["rows=0"], "rows=0"),
    ],
)
def test_invalid_options(options: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_model("llama").config.save_pretrained(tmp_path)
    assert check(tmp_path, *options) == EXIT_USER
    assert problem in capsys.readouterr().err


def test_models_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "none") == EXIT_USER and "no model configuration" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    assert check(tmp_path) == EXIT_USER and "unknown model_type 'rwkv'" in capsys.readouterr().err
    assert run(["model"]) == EXIT_USER and "usage: realhf model check" in capsys.readouterr().err


def test_a_process_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its start; the error names it and no process is left."""
    (tmp_path / "model").mkdir()
    hf_model("llama").save_pretrained(tmp_path / "model")
    children: list[multiprocessing.process.BaseProcess] = []
    start = multiprocessing.get_context("spawn").Process.start

    def start_and_kill(process: multiprocessing.process.BaseProcess) -> None:
        start(process)
        children.append(process)
        if len(children) == 2:
            process.kill()

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", start_and_kill)
    with pytest.raises(RunFailed, match="layout d1t2p1: process 1 ended with exit code -9"):
        in_layout(tmp_path / "model", tmp_path, ParallelStrategy(tp=2), [torch.arange(5)])
    assert not any(process.is_alive() for process in children)
