"""Agents that use OpenAI's client: the rows that are trained, with forked conversations, kills and failures."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.test_chat import tokenizer
from tests.integration.conftest import Run, same_curve
from tests.integration.kills import changed_by_deaths, changed_by_kill
from tests.scaling import examples

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Runs = dict[str, Run]
AGENTS = Path(__file__).with_name("agents.py")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return chat_words("qwen2_5", tmp_path_factory.mktemp("agents"))


def chat_words(template: str, folder: Path) -> list[str]:
    """Write a random model with a chat template, and return options of its training."""
    made = tokenizer(template)
    made.save_pretrained(folder / "tokenizer")
    config = folder / "model" / "config.json"
    config.parent.mkdir()
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(made), "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": made.eos_token_id,
    }  # fmt: skip
    config.write_text(json.dumps(values))
    rows = [{"question": f"what is {k}?"} for k in range(8)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        "actor.init_from_scratch=True", f"actor.config={config.parent}", f"actor.tokenizer={folder}/tokenizer",
        f"dataset.path={folder}/train.jsonl", "dataset.train_bs_n_seqs=4", "ppo.gen.max_new_tokens=6",
        "ppo.group_size=3", "actor.optimizer.lr=1e-2", "env.max_turns=8", "env.timeout=240", "env.max_episode_len=200",
        "ppo.ppo_n_minibatches=2",
        "exp_ctrl.total_train_steps=2", "n_logged_generations=-1", "tensorboard.enabled=False",
    ]  # fmt: skip


PROGRAM = ["env.cls=realhf.environments.agents:AgentProgram", f"env.options.command={sys.executable} {AGENTS}"]


def test_agents_train_the_rows_of_an_environment(
    words: list[str], realhf_all: Callable[..., Runs], tmp_path: Path
) -> None:
    """The program, the function and the environment have the same conversations, so the same rows and losses."""
    variants = {
        "environment": [f"env.cls={AGENTS}:Chat"],
        "function": [f"env.cls={AGENTS}:chat"],
        "program": PROGRAM,
        "workers": [f"env.cls={AGENTS}:chat", "n_gpus_per_node=2", "env.workers=1"],
    }
    runs = realhf_all("grpo", tmp_path, variants, words)
    whole = runs["environment"]
    assert whole.curve[1]["actor_train/grad_norm"] > 0
    for name, run in runs.items():
        assert same_curve(whole, run) == [], name
        assert run.curve[0]["tokens/drifted"] == 0 and run.curve[0]["env/turns"] == 3
        if name != "workers":
            for key in ("actor_train/actor_loss", "actor_train/grad_norm"):
                assert [line[key] for line in run.curve] == pytest.approx([x[key] for x in whole.curve], abs=1e-6)
        for step in (1, 2):
            assert [row["turns"] for row in run.generations(step)] == [row["turns"] for row in whole.generations(step)]


def test_kills_do_not_change_what_agents_have_said(
    words: list[str], realhf: Callable[..., Run], tmp_path: Path
) -> None:
    """Of the processes with the endpoint, of the agents, and of the master."""
    options = [*words, "exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_epochs=9", "exp_ctrl.total_train_steps=4"]
    chat = f"env.cls={AGENTS}:chat"
    whole = realhf("grpo", tmp_path / "whole", [*options, chat])
    deaths = "env.options.deaths={folder}"
    retrying = [*options, "env.retries=9"]
    assert changed_by_deaths(whole, tmp_path / "endpoint", [*retrying, chat], deaths, at_least=5) == []
    deaths = f"env.options.command={sys.executable} {AGENTS} {{folder}}"
    assert changed_by_deaths(whole, tmp_path / "agent", [*retrying, PROGRAM[0]], deaths, at_least=5) == []
    assert changed_by_kill(whole, tmp_path / "master", [*options, chat], 2, "master") == []


def test_kills_do_not_change_a_partial_rollout_of_agents(
    words: list[str], realhf: Callable[..., Run], tmp_path: Path
) -> None:
    """Of agents, whose replies have older weights, and of a worker, after which paused agents are played again."""
    options = [*words, "exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_epochs=9", "exp_ctrl.total_train_steps=4",
               "env.partial_tokens=8", "ppo.recompute_logprobs=True", "env.retries=9", "dataset.train_bs_n_seqs=2",
               "ppo.group_size=2"]  # fmt: skip
    whole = realhf("grpo", tmp_path / "whole", [*options, *PROGRAM])
    assert whole.curve[3]["actor_gen/carried"] > 0 and whole.curve[3]["actor_gen/token_age"] > 0
    deaths = f"env.options.command={sys.executable} {AGENTS} {{folder}}"
    assert changed_by_deaths(whole, tmp_path / "agent", [*options, PROGRAM[0]], deaths, at_least=3) == []
    assert changed_by_kill(whole, tmp_path / "worker", [*options, *PROGRAM], 2, "worker") == []


def test_a_forked_history_is_a_row_of_its_own(
    words: list[str], realhf_all: Callable[..., Runs], tmp_path: Path
) -> None:
    """Each reply is sampled and trained once, in the conversation that it answers."""
    forgetful = f"env.cls={AGENTS}:forgetful"
    variants = {"forgetful": [forgetful], "d2": [forgetful, "n_gpus_per_node=2"], "crowd": [f"env.cls={AGENTS}:crowd"]}
    runs = realhf_all("grpo", tmp_path, variants, [*words, "exp_ctrl.total_train_steps=1"])
    assert same_curve(runs["forgetful"], runs["d2"]) == []
    (line,) = runs["forgetful"].curve
    assert line["actor_gen/rows"] == 4 and line["env/turns"] == 6 and line["tokens/drifted"] == 0
    rows = runs["forgetful"].generations(1)
    assert len(rows) == 4 * 3 * 4
    ordered = sorted(rows, key=lambda row: row["sample"])
    replies = [sum(turn["role"] == "model" for turn in row["turns"]) for row in ordered]
    assert replies == [3] * 12 + [1] * 36
    fork = next(row for row in rows if "another way" in row["prompt"])
    first = next(row for row in rows if sample_of(row) == (fork["prompt_id"], fork["sample"] % 3))
    assert fork["prompt"].startswith(first["prompt"] + first["turns"][0]["text"])
    (line,) = runs["crowd"].curve
    assert line["actor_gen/rows"] == 4 and line["length/response"] <= 12


def sample_of(row: dict) -> tuple[int, int]:
    return row["prompt_id"], row["sample"]


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3", "mistral", "gemma"])
def test_no_token_drifts(template: str, realhf: Callable[..., Run], tmp_path: Path) -> None:
    """Random replies, most of which are no valid UTF-8, and messages with special tokens, come back as texts."""
    n = examples(8)
    words = [*chat_words(template, tmp_path), f"env.cls={AGENTS}:chat", f"ppo.group_size={n}"]
    run = realhf(
        "grpo",
        tmp_path,
        [*words, "dataset.train_bs_n_seqs=8", "exp_ctrl.total_train_steps=1", "ppo.gen.max_new_tokens=12"],
    )
    (line,) = run.curve
    rows = run.generations(1)
    assert len(rows) == 8 * n and line["tokens/drifted"] == line["env/failed"] == 0 and line["actor_gen/rows"] == 1
    texts = "".join(turn["text"] for row in rows for turn in row["turns"])
    assert all(odd.strip() in texts for odd in ("\ufffd", "🙂🙂", "<|im_end|>", "</s>"))
