"""Rows of 131,072 tokens are divided over workers; PPO with context parallelism has the curve of one worker."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Task
from tests.integration.conftest import Run, same_curve

pytestmark = [pytest.mark.dist, pytest.mark.slow]
N_TOKENS = 131_072
SIZES = {"max_position_embeddings": N_TOKENS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
         "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
DIVIDED = "allocation_mode=actor_gen:d4,rew_inf:d4,ref_inf:d2c2,critic_inf:c4,critic_train:d2c2,actor_train:c2p2"


def test_a_long_row_is_divided_over_four_workers(
    realhf_all: Callable[..., dict[str, Run]], task: Task, tmp_path: Path
) -> None:
    """Most of the time is attention to 8.6 billion pairs of tokens."""
    config = json.loads((task.model / "config.json").read_text()) | SIZES
    (tmp_path / "config.json").write_text(json.dumps(config))
    characters = random.Random(0).choices("0123456789+=", k=N_TOKENS - 4)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "".join(characters)}) + "\n")
    words = [
        f"model.config={tmp_path}/config.json",
        "model.init_from_scratch=True",
        f"model.tokenizer={task.tokenizer}",
        f"dataset.path={tmp_path}/long.jsonl",
        "dataset.train_bs_n_seqs=1",
        f"dataset.max_seqlen={N_TOKENS}",
    ]
    variants = {"one": ["allocation_mode=d1"], "four": ["n_gpus_per_node=4", "allocation_mode=c4"]}  # fmt: skip
    runs = realhf_all("sft", tmp_path, variants, words)
    assert runs["one"].metrics[0]["tokens/trained"] == N_TOKENS
    assert same_curve(runs["one"], runs["four"]) == []
    expected = load_file(runs["one"].model("model", 1) / "model.safetensors")
    for name, tensor in load_file(runs["four"].model("model", 1) / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


def test_ppo_has_the_curve_of_one_worker(
    realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], tmp_path: Path
) -> None:
    """Weights are moved between layouts with whole and with sharded weights."""
    variants = {"one": [], "divided": ["n_gpus_per_node=4", DIVIDED, "verify_reallocation=True"]}
    runs = realhf_all("ppo-math", tmp_path, variants, ppo_words)
    assert same_curve(runs["one"], runs["divided"]) == []
    for role in ("actor", "critic"):
        expected = load_file(runs["one"].model(role, 3) / "model.safetensors")
        for name, tensor in load_file(runs["divided"].model(role, 3) / "model.safetensors").items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
