"""Small stand-ins for the models and the data that the documents name."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from realhf.api.param_box import whole
from realhf.arch.hf_config import read_hf_config
from realhf.arch.param_specs import param_specs
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import init_random, save_hf
from tests.conftest import Task

MODEL_PATH = re.compile(r"(?!dataset)[\w.]+\.path")
ROW = {"prompt": "1+2=\n", "answer": "3", "solution": "3", "solutions": ["3"], "chosen": "3", "rejected": "4",
       "label": 1, "answers": ["3", "4"], "steps": ["3"], "labels": [1],
       "input_output": json.dumps({"inputs": ["1"], "outputs": ["3"]})}  # fmt: skip
"""A row for every task."""


@dataclass(frozen=True)
class StandIns:
    model: Path
    reward_model: Path
    data: Path
    config: Path

    def replace(self, word: str) -> str:
        """Return an option with a stand-in for a model or a file that does not exist."""
        key, equals, value = word.partition("=")
        if not equals or Path(value.partition(":")[0]).exists():
            return word
        if key in ("dataset.path", "dataset.eval_path", "valid_path"):
            return f"{key}={self.data}"
        if MODEL_PATH.fullmatch(key):
            return f"{key}={self.reward_model if key.split('.')[0] in ('rew', 'prm', 'gold') else self.model}"
        return f"{key}={self.config}" if key.endswith(".config") else word


@pytest.fixture(scope="session")
def stand_ins(task: Task, actor_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    root = tmp_path_factory.mktemp("stand_ins")
    data = root / "rows.jsonl"
    data.write_text("".join(json.dumps({**ROW, "query_id": str(i)}) + "\n" for i in range(512)))
    long = root / "config.json"  # for the lengths of documents, which are those of real models
    long.write_text(
        json.dumps(json.loads((task.model / "config.json").read_text()) | {"max_position_embeddings": 4096})
    )
    shutil.copytree(actor_folder, root / "model")
    shutil.copy(long, root / "model")
    config = read_hf_config(long, scalar_head=True)
    specs = param_specs(config)
    params = FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, torch.float32, "cpu")
    init_random(config, params, seed=7)
    save_hf(root / "reward_model", config, params.view, task.tokenizer)
    return StandIns(root / "model", root / "reward_model", data, long)
