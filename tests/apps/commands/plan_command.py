"""Runs ``realhf plan`` in a folder with the config of a model."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from realhf.apps.main import run

SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
MFCS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train")
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def table(self, title: str) -> list[list[str]]:
        """Return the rows of a table, split at two or more spaces."""
        lines = self.out.split(f"\n{title}\n")[1].split("\n\n")[0].splitlines()
        return [re.split(r"\s{2,}", line.strip()) for line in lines]


class Command:
    """Runs ``realhf plan`` in a folder that contains only ``7b/config.json``."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, *words: str) -> Result:
        code = run(["plan", *words])
        return Result(code, *self.capsys.readouterr())

    def ppo(self, *words: str) -> Result:
        """PPO of LLaMA-7B on eight H100."""
        models = ("actor.path=7b", "rew.path=7b", "actor.bf16=True", "critic.bf16=True", "rew.bf16=True")
        machine = ("device=cuda", "planner.hardware=h100", "n_gpus_per_node=8", "dataset.train_bs_n_seqs=32")
        return self("ppo", *models, *machine, *words)


def write_model(folder: Path, **changes: int) -> None:
    """Write the config of a Llama, by default the 7B one, without weights."""
    rest = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_act": "silu",
            "rms_norm_eps": 1e-5}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**rest, **SIZES, **changes}))
