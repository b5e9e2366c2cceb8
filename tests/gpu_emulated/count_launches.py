"""Counts the kernels of a block on the fake device. As a program, writes them into the file that the planner reads.

python -m tests.gpu_emulated.count_launches
"""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from realhf.api.config import GenerationConfig
from realhf.models.engine.native import NativeEngine
from realhf.plan.machines.launches import LAUNCHES_FILE
from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_runtime import fake_cuda
from tests.models.engine.tiny_engine import counted, engine_on, nll, prompts_of, rows_of
from tests.models.tiny_models import ONE_OF_EACH, hf_model


class Counts(NamedTuple):
    launches: int
    waits: int
    pinned_copies: int


def deeper(folder: Path, n_layers: int, target: Path) -> Path:
    """Write the configuration of a folder's model with another number of layers."""
    config = json.loads((folder / "config.json").read_text())
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = n_layers
    for key in {"layer_types", "no_rope_layers"} & config.keys():
        config[key] = (config[key] * n_layers)[:n_layers]
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    return target


def count(cuda: FakeCuda, engine: NativeEngine, kind: str) -> Counts:
    """Return the counts of a pass over a few rows."""
    rows = rows_of((5, 9, 2, 7), per_prompt=2)
    there = rows.to("cuda:0")
    cuda.events.clear()
    if kind == "inference":
        engine.forward(there, lambda outputs, part: outputs.logprobs(1.0, part["mask"]))
    else:
        engine.train(there, nll, counted(rows))
    return Counts(cuda.n_launches, cuda.n_waits, cuda.count("copy from pinned memory"))


def captured_steps(folder: Path, bf16: bool) -> list[int]:
    """Return the kernels of each captured decoding step of a model."""
    with fake_cuda():
        engine = engine_on(folder, trained=False, device="cuda:0", bf16=bf16, init_from_scratch=True)
        engine.generate(prompts_of((3,)).to("cuda:0"), GenerationConfig(max_new_tokens=2, max_num_seqs=2), 2, 11)
        decoder = engine.pipeline.kept_decoder._decoder
        assert decoder is not None
        return [len(step.graph.steps) for step in decoder._captured.values()]  # type: ignore[attr-defined]


def launches_of(folder: Path, work: Path) -> list[int]:
    """Return the kernels of a block in an inference pass, a training pass and a decoding step."""
    found = []
    for n_layers in (2, 4):
        deep = deeper(folder, n_layers, work / f"{folder.name}-{n_layers}")
        with fake_cuda() as cuda:
            engine = engine_on(deep, device="cuda:0", bf16=True, init_from_scratch=True)
            passes = [count(cuda, engine, kind).launches for kind in ("inference", "training")]
        found.append([*passes, *captured_steps(deep, bf16=True)])
    return [round((deep - shallow) / 2) for shallow, deep in zip(*found, strict=True)]


COUNTED = tuple(name for name in ONE_OF_EACH if name != "mixtral")  # whose tiny experts have no grouped product


def main() -> None:
    families: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as work:
        for family in COUNTED:
            hf_model(family).save_pretrained(folder := Path(work, family))
            families[family] = launches_of(folder, Path(work))
    counted = {"torch": torch.__version__.partition("+")[0], "dtype": "bfloat16", "families": families}
    LAUNCHES_FILE.write_text(json.dumps(counted, indent=2) + "\n")


if __name__ == "__main__":
    main()
