"""Runs with ZeRO-2 and ZeRO-3 have the results of plain ones, also when they are killed and resumed."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import TIMEOUT_S, Run, Started, same_curve

pytestmark = [pytest.mark.dist, pytest.mark.slow]
EVALUATED = ["exp_ctrl.save_freq_steps=1", "dataset.eval_fraction=0.2", "exp_ctrl.eval_freq_steps=1",
             "exp_ctrl.ckpt_freq_steps=1", "verify_reallocation=True", "ppo.actor_ema_eta=0.3"]  # fmt: skip
STAGES = {
    "one": ["n_gpus_per_node=1"],
    "third": ["n_gpus_per_node=2", "actor.zero_stage=3", "critic.zero_stage=3", "ppo.ref_ema_eta=0.2"],
    "second": ["n_gpus_per_node=2", "actor.zero_stage=2", "critic.zero_stage=2", "ppo.ref_ema_eta=0.2"],
    "chosen": ["n_gpus_per_node=2", "actor.zero_stage=auto", "critic.zero_stage=auto",
               "allocation_mode=actor_train:d2z3,*:d2", "ppo.ref_ema_eta=0.2"],
    "sharded forward": ["n_gpus_per_node=4", "allocation_mode=actor_gen:d2t2,actor_train:d2t2z3,critic_train:d4,*:d4z3",
                        "critic.zero_stage=2", "ppo.ref_ema_eta=0.2"],
}  # fmt: skip


def test_ppo_has_the_curve_of_one_worker(
    realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], tmp_path: Path
) -> None:
    """Generation and evaluation get whole weights; a reference and a saved average follow the sharded actor."""
    variants = STAGES | {"one": [*STAGES["one"], "ppo.ref_ema_eta=0.2"]}
    runs = realhf_all("ppo-math", tmp_path, variants, [*ppo_words, *EVALUATED])
    one = runs.pop("one")
    for name, found in runs.items():
        assert same_curve(one, found) == [], name
        for role in ("actor", "critic", "actor_ema"):
            step = max(int(path.name.partition("_")[2]) for path in (one.root / "models" / role).iterdir())
            files = [some.model(role, step) / "model.safetensors" for some in (one, found)]
            expected, weights = map(load_file, files)
            assert all(torch.allclose(weight, expected[key], atol=1e-5) for key, weight in weights.items()), role
    plan = json.loads((runs["third"].root / "plan.json").read_text())["plan"]["placements"]
    zero3 = {call for call, placement in plan.items() if placement["layout"]["strategy"].get("zero3")}
    assert {"actor_train", "critic_train"} <= zero3 and not {"actor_gen", "ref_inf", "eval_gen"} & zero3


def test_a_killed_run_resumes_bit_for_bit(
    realhf: Callable[..., Run], realhf_start: Callable[..., Started], sft_words: list[str], tmp_path: Path
) -> None:
    words = [*sft_words, "n_gpus_per_node=3", "exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_epochs=2",
             "model.optimizer.eps=1e-3"]  # fmt: skip
    whole, plain = (realhf("sft", tmp_path / f"{stage}", [*words, f"model.zero_stage={stage}"]) for stage in (3, 1))
    started = realhf_start("sft", tmp_path / "killed", [*words, "model.zero_stage=3"])
    metrics, end = started.root / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert started.process.poll() is None and time.monotonic() < end, "the run is over before it is killed"
        time.sleep(0.01)
    started.process.send_signal(signal.SIGKILL)
    started.process.communicate(timeout=TIMEOUT_S)
    copy = shutil.copytree(started.root, tmp_path / "copy" / "t" / "trial")
    resumed, other = (realhf_start("", root, more, command=["resume", str(root)]).finish()
                      for root, more in ((started.root, []), (copy, ["model.zero_stage=2"])))  # fmt: skip
    assert resumed.code == other.code == 0, resumed.output + other.output
    assert resumed.curve == whole.curve and same_curve(whole, other) == []
    last = len(whole.curve)
    files = [run.model("model", last) / "model.safetensors" for run in (whole, resumed, plain)]
    assert files[0].read_bytes() == files[1].read_bytes()
    sharded, expected = load_file(files[0]), load_file(files[2])
    assert all(torch.allclose(weight, expected[name], atol=1e-6) for name, weight in sharded.items())
    for before, line in zip(plain.curve, whole.curve, strict=True):
        assert line["loss"] == pytest.approx(before["loss"], rel=1e-6)


def test_stages_that_cannot_run_are_refused(
    realhf_start: Callable[..., Started], sft_words: list[str], tmp_path: Path
) -> None:
    for words, message in (
        (["model.zero_stage=4"], "model.zero_stage=4: must be <= 3"),
        (["model.zero_stage=atuo"], "model.zero_stage=atuo: must be in [1, 3] or auto"),
        (["model.zero_stage=auto", "model.backend=megatron"], "model.zero_stage=auto requires model.backend=native"),
        (["model.zero_stage=3", "model.lora.rank=4"], "set model.zero_stage=2, or model.lora.rank=0"),
        (["model.zero_stage=2", "model.backend=megatron"], "model.zero_stage=2 requires model.backend=native"),
        (["allocation_mode=d1z3"], "leave out z3"),
    ):
        found = realhf_start("sft", tmp_path / "refused", [*sft_words, *words]).finish()
        assert found.code == 2 and message in found.output, found.output
