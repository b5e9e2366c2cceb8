"""``realhf plan``: printed and saved plans, sweeps and goals, and remedies of large models."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from tests.apps.commands.plan_command import SVG, Command, write_model

TEXT = re.compile(r"^to run this plan: (.*) allocation_mode='(.*)'$", re.MULTILINE)


def test_printed_and_saved_plans_are_those_that_were_found(plan: Command) -> None:
    found = plan.ppo("allocation_mode=search", "--save", "a.json", "--out", "out.json")
    assert found.code == 0
    size, text = TEXT.findall(found.out)[0]
    assert size == "n_nodes=1 n_gpus_per_node=8"
    step = dict(found.table("step"))["search"]
    assert re.fullmatch(
        r"(converged|evaluations exhausted) after [\d,]+ evaluations, [\d.]+ s; the last .* [\d,]+", step
    )
    stored = (plan.folder / "a.json").read_text()
    assert json.loads(stored) == json.loads((plan.folder / "out.json").read_text())["modes"]["search"]["plan"]
    for mode in (text, "a.json"):
        again = plan.ppo(f"allocation_mode={mode}", "--save", "b.json")
        assert again.code == 0 and (plan.folder / "b.json").read_text() == stored
        assert again.table("memory") == found.table("memory") and TEXT.findall(again.out) == [(size, text)]


AUTO = [f"{role}.{option}=auto" for role in ("actor", "critic")
        for option in ("gradient_checkpointing", "optimizer.offload")]  # fmt: skip


def test_chosen_memory_savings_are_part_of_the_printed_plan(plan: Command) -> None:
    small = ("planner.memory_gb=40", "dataset.train_bs_n_seqs=64")
    found = plan.ppo("allocation_mode=symmetric", *small, *AUTO, "--save", "a.json")
    assert found.code == 0, found.err
    text = TEXT.findall(found.out)[0][1]
    assert ":recompute=" in text and found.out.count("\nmemory saving (auto)\n") == 1
    stored = (plan.folder / "a.json").read_text()
    for mode in (text, "a.json"):
        again = plan.ppo(f"allocation_mode={mode}", *small, *AUTO, "--save", "b.json")
        assert again.code == 0 and (plan.folder / "b.json").read_text() == stored
        assert TEXT.findall(again.out)[0][1] == text
        assert "contradicts " in plan.ppo(f"allocation_mode={mode}", *small).err
    layouts = re.sub(":(recompute=[a-z]+|offload|tokens=[0-9]+)", "", text)
    assert plan.ppo(f"allocation_mode={layouts}", *small, *AUTO).code == 0, "the planner chooses"
    worse = re.sub("recompute=[a-z]+(:offload)?", "recompute=none", text)
    refused = plan.ppo(f"allocation_mode={worse}", *small, *AUTO)
    assert refused.code == 1
    assert "it fits without the micro-batches and memory savings that allocation_mode names" in refused.err


def test_a_search_reports_that_the_clock_stopped_it(plan: Command) -> None:
    step = dict(plan.ppo("allocation_mode=search", "planner.budget_s=0.001").table("step"))
    assert step["search"].startswith("stopped by the clock (planner.budget_s) after ")


@pytest.mark.parametrize("name", ["grpo", "reinforce-pp", "rloo", "remax", "ppo-math", "dpo", "sft", "rw", "gen"])
def test_all_experiments_print_plans_that_can_be_run(name: str, plan: Command) -> None:
    role = {"sft": "model", "rw": "model", "gen": "model"}.get(name, "actor")
    words = [name, f"{role}.path=7b", "device=cuda", "planner.hardware=h100", "n_gpus_per_node=8"]
    found = plan(*words, "allocation_mode=real", "--save", "a.json")
    assert found.code == 0, found.err
    step = dict(found.table("step"))
    word = "generated" if name == "gen" else "trained"
    assert f" {word} tokens/s" in step["throughput"] and "GPU-hours per step" in step["cost"] and step["assumed"]
    again = plan(*words, f"allocation_mode={TEXT.findall(found.out)[0][1]}", "--save", "b.json")
    assert again.code == 0, again.err
    assert (plan.folder / "a.json").read_text() == (plan.folder / "b.json").read_text()


def test_sweep(plan: Command) -> None:
    words = ("actor.path=7b", "rew.path=7b", "device=cuda", "planner.hardware=h100")
    result = plan("ppo", *words, "--sweep", "n_gpus=1,4..16", "--out", "s.svg", "dataset.train_bs_n_seqs=32")
    assert result.code == 0, result.err
    title = next(line for line in result.out.splitlines() if line.startswith("sweep"))
    head, *rows = result.table(title)
    assert head[:4] == ["n_gpus", "step, at least", "tokens/s", "GPU-hours per 1,000 steps"]
    assert [row[0] for row in rows] == ["1", "4", "8", "16"] and rows[0][4].endswith("too large")
    for row in rows:
        seconds, hours = float(row[1].split()[0]), float(row[3].replace(",", ""))
        assert hours == pytest.approx(1000 * int(row[0]) * seconds / 3600, rel=2e-3)
    fitting = [row for row in rows if not row[4].endswith("too large")]
    assert 2 <= len(fitting) < len(rows) and fitting[0][5] == "100%"  # relative to the first that fits
    root = ET.parse(plan.folder / "s.svg").getroot()
    assert len(list(root.iter(f"{SVG}circle"))) == 2 * len(rows)
    hints = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert hints[0].startswith("GPUs 1: ") and hints[0].endswith("does not fit") and "worker-hours" in hints[-1]
    none = plan("ppo", *words, "--sweep=n_gpus=1,2", "--out=s.json")
    assert none.code == 1 and "it fits with" in none.err
    assert [point["n_gpus"] for point in json.loads((plan.folder / "s.json").read_text())] == [1, 2]
    batch = plan("sft", "model.path=7b", "device=cuda", "n_gpus_per_node=8", "--sweep", "dataset.train_bs_n_seqs=8,64",
                 "--out", "s.html")  # fmt: skip
    assert batch.code == 0 and re.search(r"^ +64 +8 ", batch.out, re.MULTILINE), batch.out
    assert len(list(ET.parse(plan.folder / "s.html").getroot().iter(f"{SVG}svg"))) == 1


@pytest.mark.slow
def test_goals(plan: Command) -> None:
    fast = plan.ppo("--goal", "step", "--out", "fast.json")
    small = plan.ppo("--goal", "memory", "--out", "small.json")
    cheap = plan.ppo("--goal", "cost", "--out", "cheap.json")
    assert [result.code for result in (fast, small, cheap)] == [0, 0, 0]
    found = {name: json.loads((plan.folder / f"{name}.json").read_text())["modes"]["search"]
             for name in ("fast", "small", "cheap")}  # fmt: skip
    assert found["small"]["peak_bytes"] < 0.9 * found["fast"]["peak_bytes"]
    assert found["small"]["step_s"] >= found["fast"]["step_s"]
    assert found["cheap"]["worker_hours"] <= found["fast"]["worker_hours"]
    title = next(line for line in cheap.out.splitlines() if line.startswith("sweep"))
    fitting = [row for row in cheap.table(title)[1:] if "too large" not in row[4]]
    best = min(fitting, key=lambda row: float(row[3]))
    assert f"n_nodes=1 n_gpus_per_node={best[0]} allocation_mode='" in cheap.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sweep", "n_gpus=2,x"), "'x' is not a positive number or an ascending range; write --sweep n_gpus=16,32"),
        (("--sweep", "n_gpus=8..2"), "'8..2' is not a positive number or an ascending range"),
        (("--sweep", "n_gpus=0"), "'0' is not a positive number"),
        (("--sweep", "n_gpus="), "'' is not a positive number"),
        (("--sweep", "16"), "there are no values"),
        (("--sweep", "n_nodes=1..999..1"), "values are more than 64"),
        (("--sweep", "n_gpu=2"), "--sweep n_gpu: the option is unknown  did you mean n_gpus ?"),
        (("--sweep", "planner.memory_gb=2"), "--sweep planner.memory_gb: the option is not a whole number"),
        (("--sweep", "n_gpus=12"), "n_gpus=12: not a multiple of 8 GPUs per node; nearest: 8 or 16"),
        (("--sweep", "n_gpus=8,16", "allocation_mode=d8"), "allocation_mode=d8 is for one number of workers"),
        (("--sweep", "n_gpus=8", "--why"), "--sweep and --why cannot be combined"),
        (("--goal", "speed"), "--goal speed: use step, cost, memory"),
        (("--goal", "memory", "allocation_mode=d8"), "--goal memory: allocation_mode=d8 leaves no choice"),
        (("--compare", "d8,t8", "--goal", "memory"), "--compare and --goal cannot be combined"),
        (("--save", "plan.yaml"), "--save plan.yaml: the suffix must be .json"),
        (("allocation_mode=none.json",), "allocation_mode=none.json: there is no such file"),
    ],
)
def test_invalid_sweeps_and_goals(words: tuple[str, ...], message: str, plan: Command) -> None:
    result = plan.ppo(*words)
    assert result.code == 2 and message in result.err, result.err


@pytest.mark.slow
def test_four_models_of_405b_on_64_gpus_get_a_remedy(plan: Command) -> None:
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    write_model(plan.folder / "405b", **sizes)
    words = ("ppo", "actor.path=405b", "rew.path=405b", "device=cuda", "planner.hardware=h100", "n_gpus_per_node=8")
    result = plan(*words, "n_nodes=8")
    found = re.search(r"it has 80, .*; it fits with (.* n_nodes=(\d+) .*)\n", result.err)
    assert result.code == 1 and found, result.err
    assert 8 < int(found[2]) <= 64
    fixed = plan(*words, *found[1].split(" "))
    assert fixed.code == 0, fixed.err
    assert plan(*words, *found[1].replace(f"n_nodes={found[2]}", "n_nodes=8").split(" ")).code == 1
