"""Runs with LoRA adapters: curves, layouts, interruptions, saved folders, roles on one base."""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import TIMEOUT_S, Task
from tests.integration.conftest import Run, same_curve, start
from tests.integration.kills import changed_by_kill
from tests.integration.test_resume import kill, resume

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Runs = dict[str, Run]
LORA = ["actor.lora.rank=4", "actor.lora.alpha=8", "actor.optimizer.lr=1e-2"]
CRITIC = ["critic.lora.rank=2", "critic.optimizer.lr=1e-2"]
LAYOUTS = {
    "d1": [],
    "d2": ["n_gpus_per_node=2"],
    "t2": ["n_gpus_per_node=2", "allocation_mode=t2"],
    "p2": ["n_gpus_per_node=2", "allocation_mode=p2"],
    "moved": ["n_gpus_per_node=2", "allocation_mode=actor_gen:d2,actor_train:t2,critic_train:p2,ref_inf:t2,*:d2",
              "verify_reallocation=True"],
}  # fmt: skip


@pytest.fixture(scope="module")
def words(ppo_words: list[str]) -> list[str]:
    return [*ppo_words, *LORA, *CRITIC, "tensorboard.enabled=False", "ppo.recompute_logprobs=True"]


@pytest.fixture(scope="module")
def runs(words: list[str], realhf_all: Callable[..., Runs], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return realhf_all("ppo-math", tmp_path_factory.mktemp("lora"), LAYOUTS, words)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "d1"])
def test_the_curve_does_not_depend_on_the_layout(layout: str, runs: Runs) -> None:
    assert same_curve(runs["d1"], runs[layout]) == []


def test_the_reference_is_the_base(runs: Runs) -> None:
    """The first divergence is exactly zero, and the policy leaves its base."""
    first, *_, last = runs["d1"].metrics
    assert first["kl/ref"] == 0.0 and abs(last["kl/ref"]) > 1e-6
    assert first["actor_train/grad_norm"] > 0 and first["critic_train/grad_norm"] > 0


def test_the_saved_adapter_is_one_of_peft(runs: Runs, actor_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        folder = runs["d1"].model("actor", 3)
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(actor_folder)
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(actor_folder), folder)
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        adapted = model(tokens).logits
        with model.disable_adapter():
            assert not torch.allclose(adapted, model(tokens).logits, atol=1e-3)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size < sum(file.stat().st_size for file in actor_folder.glob("*.safetensors")) / 2
    assert (folder / "tokenizer.json").is_file()


def test_kills_do_not_change_the_result(words: list[str], realhf: Callable[..., Run], tmp_path: Path) -> None:
    options = [*words, "exp_ctrl.ckpt_freq_steps=1", "n_gpus_per_node=2", "exp_ctrl.total_train_epochs=3"]
    whole = realhf("ppo-math", tmp_path / "whole", options)
    for step, whom in ((2, "master"), (5, "worker")):
        assert changed_by_kill(whole, tmp_path / whom, options, step, whom, "ppo-math") == []
    largest = max(file.stat().st_size for file in (whole.root / "checkpoints").glob("*/actor.*.safetensors"))
    assert largest < sum(tensor.nbytes for tensor in load_file(base_of(words) / "model.safetensors").values())


def test_a_run_resumes_in_other_layouts(runs: Runs, words: list[str], tmp_path: Path) -> None:
    """Its checkpoints have adapters only; the base is loaded for the new layout."""
    started = start("ppo-math", tmp_path, [*words, "exp_ctrl.ckpt_freq_steps=1", "n_gpus_per_node=2"])
    started.wait_for_checkpoint()
    kill(started, 1, "master")
    found = resume(started.root, "allocation_mode=actor_train:t2,critic_train:p2,*:d2")
    assert found.code == 0 and same_curve(runs["d1"], found) == [], found.output


def base_of(words: list[str]) -> Path:
    return Path(next(word for word in words if word.startswith("actor.path=")).partition("=")[2])


def test_a_run_starts_from_an_adapter(runs: Runs, words: list[str], realhf: Callable[..., Run], tmp_path: Path) -> None:
    """And its reference is the initial adapter; a merged model is the same start."""
    folder = runs["d1"].model("actor", 3)
    run = realhf("ppo-math", tmp_path / "adapter", [*words, f"actor.lora.init_from={folder}"])
    assert run.metrics[0]["kl/ref"] == 0.0
    assert run.curve != runs["d1"].curve
    merged = realhf(
        "ppo-math", tmp_path / "merged",
        [*words, f"actor.lora.init_from={folder}", "actor.lora.merge_on_save=True", "actor.optimizer.lr=0"],
    )  # fmt: skip
    again = realhf("ppo-math", tmp_path / "again", [*words, f"actor.path={merged.model('actor', 3)}"])
    first, second = (one.metrics[0] for one in (again, run))
    assert first["rew_inf/reward"] == second["rew_inf/reward"]


def test_sft_and_preferences(realhf: Callable[..., Run], sft_words: list[str], tmp_path: Path) -> None:
    run = realhf("sft", tmp_path, [*sft_words, "model.lora.rank=8", "exp_ctrl.total_train_epochs=4",
                                   "model.optimizer.lr=3e-2"])  # fmt: skip
    losses = [line["loss"] for line in run.metrics]
    assert losses[-1] < losses[0] - 0.1 and (run.model("model", len(losses)) / "adapter_config.json").is_file()


@pytest.fixture
def four_gigabytes() -> Iterator[Path]:
    """A cgroup (version 1 or 2) with a limit of 4 GB."""
    root = Path("/sys/fs/cgroup")
    folder, file = (root / "memory", "memory.limit_in_bytes") if (root / "memory").is_dir() else (root, "memory.max")
    group = folder / f"realhf-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(f"{4 << 30}")
    except OSError as error:
        pytest.skip(f"NO RUN INSIDE 4 GB IS TESTED: a cgroup cannot be made here ({error})")
    yield group
    end = time.monotonic() + TIMEOUT_S
    while (group / "cgroup.procs").read_text().split() and time.monotonic() < end:
        time.sleep(0.1)
    group.rmdir()


def test_a_model_of_135_million_parameters_trains_in_4_gb(
    four_gigabytes: Path, task: Task, reward_file: Path, tmp_path: Path
) -> None:
    """GRPO with default micro-batches, which shrink until they fit."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [
        f"actor.config={tmp_path}", "actor.init_from_scratch=True", f"actor.tokenizer={task.tokenizer}",
        f"dataset.path={task.train}", "actor.lora.rank=16", "dataset.train_bs_n_seqs=16", "ppo.group_size=8",
        "ppo.gen.max_new_tokens=32", "ppo.gen.min_new_tokens=32", "exp_ctrl.total_train_steps=1",
        f"reward.fn={reward_file}:graded", "tensorboard.enabled=False",
    ]  # fmt: skip
    entered = ["sh", "-c", f'echo $$ > {four_gigabytes}/cgroup.procs; exec "$@"', "sh"]
    run = start("grpo", tmp_path, words, prefix=entered).finish()
    assert run.code == 0, run.output
    size = sum(file.stat().st_size for file in run.model("actor", 1).glob("*.safetensors"))
    assert size < 0.04 * 4 * 134.5e6


@pytest.mark.parametrize(
    "option, problem",
    [
        ("actor.lora.targets=[c_attn]", "lora.targets=c_attn is no module of a llama model"),
        ("ppo.ref_ema_eta=0.5", "an average needs weights of its own"),
        ("actor.lora.init_from=/nowhere", "'/nowhere' has no adapter_config.json"),
        ("actor.lora.init_from=.", "has no adapter_config.json"),
        ("ref.offload=True", "ref.offload"),
        ("actor.backend=megatron", "actor.lora.rank=4 requires actor.backend=native"),
    ],
)
def test_options_that_exclude_each_other(option: str, problem: str, words: list[str], tmp_path: Path) -> None:
    run = start("ppo-math", tmp_path, [*words, option]).finish()
    assert run.code == 2 and problem in run.output, run.output
