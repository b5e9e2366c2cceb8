"""Runs with quantized bases: the reference, layouts, interruptions, saved models, shared bases, refused options."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from realhf.api.model_config import Lora
from realhf.api.param_box import whole
from realhf.arch.hf_config import read_hf_config
from realhf.arch.lora import base_specs
from realhf.models.hf_folder import load_hf, stored_slices
from realhf.models.quantized_params import QuantizedParams
from tests.integration.conftest import Run, same_curve, start
from tests.integration.kills import changed_by_kill

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Runs = dict[str, Run]
GROUP_SIZE = 8
INT8 = ["actor.lora.rank=4", "actor.lora.alpha=8", "actor.optimizer.lr=1e-2", "actor.lora.quantization=int8",
        f"actor.lora.quantization_group_size={GROUP_SIZE}"]  # fmt: skip
VARIANTS = {
    "int8": [],
    "int4": ["actor.lora.quantization=int4"],
    "bf16": ["actor.bf16=True", "logprob_diff_warning=1.0"],
    "t2": ["n_gpus_per_node=2", "allocation_mode=t2"],
    "p2": ["n_gpus_per_node=2", "allocation_mode=p2"],
    "moved": ["n_gpus_per_node=2", "allocation_mode=actor_gen:d2,actor_train:t2,ref_inf:t2,*:d2",
              "verify_reallocation=True"],
}  # fmt: skip


@pytest.fixture(scope="module")
def words(ppo_words: list[str]) -> list[str]:
    rest = [word for word in ppo_words if not word.startswith("critic.")]
    return [*rest, *INT8, "tensorboard.enabled=False", "ppo.recompute_logprobs=True"]


@pytest.fixture(scope="module")
def runs(words: list[str], realhf_all: Callable[..., Runs], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return realhf_all("grpo", tmp_path_factory.mktemp("quantized"), VARIANTS, words)


@pytest.mark.parametrize("layout", ("t2", "p2", "moved"))
def test_the_curve_does_not_depend_on_the_layout(layout: str, runs: Runs) -> None:
    assert same_curve(runs["int8"], runs[layout]) == []


@pytest.mark.parametrize("name", ("int8", "int4", "bf16"))
def test_the_reference_is_the_quantized_base(name: str, runs: Runs) -> None:
    first, *_, last = runs[name].metrics
    assert first["kl/ref"] == 0.0 and abs(last["kl/ref"]) > 1e-6
    assert first["actor_train/grad_norm"] > 0


def test_other_quantizations_are_other_policies(runs: Runs) -> None:
    curves = [[line["actor_train/grad_norm"] for line in runs[name].metrics] for name in ("int8", "int4", "bf16")]
    assert curves[0] != curves[1] != curves[2] != curves[0]


def test_kills_do_not_change_the_result(words: list[str], realhf: Callable[..., Run], tmp_path: Path) -> None:
    options = [*words, "exp_ctrl.ckpt_freq_steps=1", "n_gpus_per_node=2"]
    whole_run = realhf("grpo", tmp_path / "whole", options)
    assert changed_by_kill(whole_run, tmp_path / "killed", options, 2, "worker", "grpo") == []
    largest = max(file.stat().st_size for file in (whole_run.root / "checkpoints").glob("*/actor.*.safetensors"))
    base = Path(next(word for word in words if word.startswith("actor.path=")).partition("=")[2])
    assert largest < sum(tensor.nbytes for tensor in load_file(base / "model.safetensors").values())


def test_a_saved_model_has_the_dequantized_weights(
    words: list[str], realhf: Callable[..., Run], actor_folder: Path, tmp_path: Path
) -> None:
    """With merged adapters, which have no effect before the first update."""
    options = [*words, "actor.lora.merge_on_save=True", "actor.optimizer.lr=0", "n_gpus_per_node=2",
               "allocation_mode=t2", "exp_ctrl.total_train_steps=1"]  # fmt: skip
    saved = load_file(realhf("grpo", tmp_path, options).model("actor", 1) / "model.safetensors")
    config = read_hf_config(actor_folder, False)
    lora = Lora(0, 1.0, (), 8, GROUP_SIZE)
    config = type(config)(**{**vars(config), "lora": lora})
    base = QuantizedParams(config, {s.name: whole(s.shape) for s in base_specs(config)}, torch.float32, "cpu")
    load_hf(actor_folder, config, base, 0)
    for name, (part, *_) in stored_slices(config).items():
        assert torch.equal(saved[part.name], base.view(name)), name


@pytest.mark.parametrize(
    "options, problem",
    [
        (["actor.lora.rank=0"], "without lora.rank, which is 0: all weights are trained"),
        (["actor.lora.quantization_group_size=7"], "lora.quantization_group_size=7 does not divide the 32 columns"),
        (["actor.lora.quantization_group_size=5", "actor.lora.quantization=int4"], "is odd"),
        (["actor.lora.quantization_group_size=32", "allocation_mode=t2", "n_gpus_per_node=2"],
         "lora.quantization_group_size=32 does not divide the shards of"),
        (["actor.lora.quantization=int3"], "int3"),
        (["actor.backend=megatron"], "actor.lora.rank=4 requires actor.backend=native"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other(options: list[str], problem: str, words: list[str], tmp_path: Path) -> None:
    run = start("grpo", tmp_path, [*words, *options]).finish()
    assert run.code == 2 and problem in run.output, run.output
