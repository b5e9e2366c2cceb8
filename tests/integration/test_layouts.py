"""One PPO run with different layouts, workers and placements: the curves are equal."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.integration.conftest import Run, same_curve

pytestmark = [pytest.mark.dist, pytest.mark.slow]
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")
OF_CRITIC = ("critic_inf", "critic_train", "rew_inf")
TWO, MANUAL = "n_gpus_per_node=2", "allocation_mode=manual"
VARIANTS = {
    "one": [],
    "again": [],
    "inline": ["mode=inline"],
    "two": [TWO],
    "three": ["n_gpus_per_node=3"],
    "apart": [TWO, MANUAL, *(f"{call}.device_mesh={int(call in OF_CRITIC)}" for call in CALLS)],
    "realloc": [TWO, "allocation_mode=actor_gen:d2,*:d1"],
    "turned": [TWO, MANUAL, *(f"{call}.device_mesh=1,0" for call in CALLS),
               *(f"{call}.parallel.data_parallel_size=2" for call in CALLS)],
    "small": ["actor_train.mb_spec.max_tokens_per_mb=40", "critic_train.mb_spec.n_mbs=3", "ppo.gen.max_num_seqs=3"],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(
    realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    return realhf_all("ppo-math", tmp_path_factory.mktemp("layouts"), VARIANTS, ppo_words)


def weights(run: Run, role: str) -> dict[str, torch.Tensor]:
    return load_file(run.model(role, 3) / "model.safetensors")


def test_the_run_finishes_three_steps_and_trains(runs: dict[str, Run], actor_folder: Path) -> None:
    one = runs["one"]
    assert [line["step"] for line in one.metrics] == [1, 2, 3]
    assert all(line["actor_train/step_skipped"] == 0 and line["actor_train/grad_norm"] > 0 for line in one.metrics)
    assert one.curve[0]["kl/ref"] == pytest.approx(0.0, abs=1e-5) and one.curve[2]["kl/ref"] > 1e-4
    assert one.curve[0]["actor_train/importance_ratio"] == pytest.approx(1.0, abs=0.05)
    before, after = load_file(actor_folder / "model.safetensors"), weights(one, "actor")
    assert before.keys() == after.keys() and any(not torch.equal(before[k], after[k]) for k in before)
    assert "done    3 steps" in one.output and str(one.model("actor", 3)) in one.output


@pytest.mark.parametrize("other", ["again", "inline"])
def test_the_same_seed_gives_the_same_bytes(other: str, runs: dict[str, Run]) -> None:
    one, two = runs["one"], runs[other]
    assert one.curve == two.curve
    assert all(one.generations(step) == two.generations(step) for step in (1, 2, 3))
    for role in ("actor", "critic"):
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (one.model(role, 3) / name).read_bytes() == (two.model(role, 3) / name).read_bytes()


@pytest.mark.parametrize("other", ["two", "three", "apart", "realloc", "turned", "small"])
def test_the_curve_does_not_depend_on_the_layout(other: str, runs: dict[str, Run]) -> None:
    assert same_curve(runs["one"], runs[other]) == []
    for role in ("actor", "critic"):
        expected_weights = weights(runs["one"], role)
        for name, tensor in weights(runs[other], role).items():
            torch.testing.assert_close(tensor, expected_weights[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("other", ["three", "apart", "realloc"])
def test_generations_of_several_workers_are_merged(other: str, runs: dict[str, Run]) -> None:
    for step, n_prompts in ((1, 7), (2, 7), (3, 3)):
        rows, expected = runs[other].generations(step), runs["one"].generations(step)
        assert rows == [{**row, "rewards": pytest.approx(row["rewards"])} for row in expected]
        assert len(rows) == min(8, 2 * n_prompts)
        for row in rows:
            assert row["fields"]["prompt"] == row["prompt"] and row["truncated"] in (0, 1)
            assert row["answer_tokens"] <= 12 and isinstance(row["rewards"], float)


def test_reallocated_weights_are_released(runs: dict[str, Run]) -> None:
    spans = json.loads((runs["realloc"].root / "trace.json").read_text())
    moved = {(s["pid"], s["name"]) for s in spans if s["name"].endswith(("Reallocate", "Release"))}
    assert moved == {(rank, f"actor_gen/{what}") for rank in (0, 1) for what in ("Reallocate", "Release")}
    assert "Reallocate" in runs["realloc"].output and "Reallocate" not in runs["two"].output


def test_the_files_of_a_run(runs: dict[str, Run]) -> None:
    root = runs["three"].root
    files = {"config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "trace.json"}
    assert {p.name for p in root.iterdir()} == files | {"tensorboard", "generations", "logs", "models"}
    assert {p.name for p in (root / "logs").iterdir()} == {f"worker-{rank}.log" for rank in range(3)}
    spans = json.loads((root / "trace.json").read_text())
    assert {s["pid"] for s in spans} == {0, 1, 2} and {s["args"]["step"] for s in spans if s["ph"] == "X"} == {1, 2, 3}
    assert {f"{call}/Compute" for call in CALLS} | {"fetch", "save/actor", "save/critic"} <= {s["name"] for s in spans}
    events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    assert len(events) == 3 * (1 + len(CALLS))
    tensorboard = EventAccumulator(str(root / "tensorboard"), {"tensors": 0})
    tensorboard.Reload()
    assert [e.step for e in tensorboard.Tensors("reward/mean")] == [1, 2, 3]
    measured = {"time/step_s", "time/actor_gen_s", "tokens/per_s", "memory/worker_gb", "flops/model_per_s"}
    assert all(measured <= line.keys() for line in runs["three"].metrics)


def test_transformers_loads_a_saved_model(runs: dict[str, Run]) -> None:
    run = runs["two"]
    actor = AutoModelForCausalLM.from_pretrained(run.model("actor", 3))
    folder = run.model("critic", 3)
    critic, problems = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(problems.values()) and critic.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(run.model("actor", 3))
    tokens = tokenizer("3+4=\n", return_tensors="pt")["input_ids"]
    assert actor(tokens).logits.shape == (1, 5, len(tokenizer)) and critic(tokens).logits.shape == (1, 1)
