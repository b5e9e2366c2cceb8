"""Selected responses, selected rounds, and the stages of ReST-EM."""

import json
from pathlib import Path

import pytest

from realhf.api.config import DatasetConfig, LoraOptions, ModelSpec
from realhf.base.errors import RunFailed
from realhf.experiments.restem import (
    Choice,
    RestEMExperiment,
    chosen_round,
    read_generations,
    select_responses,
    summary,
)


def row(prompt: int, reward: float, truncated: int = 0) -> dict:
    return {"prompt_id": prompt, "prompt": f"p{prompt}", "response": "a", "rewards": reward, "truncated": truncated}


def test_select_responses_and_summary() -> None:
    rows = [row(0, 1.0), row(1, 0.0), row(0, 1.0, 1), row(0, 1.5), row(0, 1.0), row(2, 1.0)]
    assert select_responses(rows, 1.0, 2) == [rows[0], rows[3], rows[5]]
    assert len(select_responses(rows, 1.0, -1)) == 4 and select_responses(rows, 2.0, 10) == []
    result = summary(3, rows, select_responses(rows, 1.0, 2), 2, 0.5, "m")
    assert [result[key] for key in ("n_answers", "n_kept", "prompts_solved", "prompts_full")] == [6, 3, 2, 1]


@pytest.mark.parametrize(
    ("accuracies", "first_drop", "best"),
    [([0.5], 0, 0), ([0.5, 0.6, 0.6, 0.9], 1, 3), ([0.5, 0.4, 0.9], 0, 2), ([0.1, 0.2, 0.3], 2, 2), ([0.3, 0.3], 0, 0)],
)
def test_chosen_round(accuracies: list[float], first_drop: int, best: int) -> None:
    assert chosen_round(accuracies, Choice.first_drop) == first_drop
    assert chosen_round(accuracies, Choice.best) == best


def write_generations(run: Path, rewards: list[float]) -> None:
    """Write the files of a generation run, ten rows per step."""
    (run / "generations").mkdir(parents=True)
    for start in range(0, len(rewards), 10):
        lines = [json.dumps(row(i, reward)) + "\n" for i, reward in enumerate(rewards[start : start + 10], start)]
        (run / "generations" / f"step_{start // 10 + 1}.jsonl").write_text("".join(lines))


def test_rounds_fit_the_initial_model_and_sample_from_the_last(tmp_path: Path) -> None:
    experiment = RestEMExperiment(model=ModelSpec(path="initial"), dataset=DatasetConfig("train.jsonl"), n_rounds=2,
                                  valid_path="valid.jsonl", fit_batch=8, seed=5)  # fmt: skip
    assert experiment.problems() == []
    stages = []
    for stage in experiment.stages(tmp_path):
        config, run = stage.config, tmp_path / stage.name
        stages.append((stage.name, stage.experiment, config.model.path, config.dataset.path, config.seed))
        if stage.name.endswith("sample"):
            write_generations(run, [1.0] * 12 + [0.0] * 3)
        elif stage.name.endswith("fit"):
            assert config.dataset.train_bs_n_seqs == 8 and config.exp_ctrl.total_train_epochs == 8
            (run / "models" / "model" / "step_9").mkdir(parents=True)
            (run / "models" / "model" / "step_12").mkdir()
        else:
            write_generations(run, [1.0, 0.0] if stage.name.startswith("round1") else [0.0, 0.0])
    first, kept = str(tmp_path / "round1-fit/models/model/step_12"), str(tmp_path / "round1-kept.jsonl")
    assert stages[:3] == [
        ("round1-sample", "gen", "initial", "train.jsonl", 7),
        ("round1-fit", "sft", "initial", kept, 5),
        ("round1-valid", "gen", first, "valid.jsonl", 8),
    ]
    assert stages[3][2] == first and stages[4][2] == "initial" and len({seed for *_, seed in stages if seed != 5}) == 4
    result = json.loads((tmp_path / "restem.json").read_text())
    assert (
        result["chosen"] == 1 and result["model"] == first and [r["accuracy"] for r in result["rounds"]] == [0.5, 0.0]
    )
    assert [json.loads(line) for line in Path(kept).read_text().splitlines()][0] == {"prompt": "p0", "answer": "a"}
    assert len(list(read_generations(tmp_path / "round1-sample"))) == 15


def test_adapters_are_merged_between_rounds(tmp_path: Path) -> None:
    experiment = RestEMExperiment(model=ModelSpec(path="initial", lora=LoraOptions(rank=4)), dataset=DatasetConfig("x"))
    data = experiment.dataset, experiment.sampling, 1
    models = [stage.config.model for stage in (experiment.sample("first", "initial", *data),
                                               experiment.fit("fit", tmp_path, 4),
                                               experiment.sample("later", "fitted", *data))]  # fmt: skip
    assert [model.lora.rank for model in models] == [4, 4, 0] and models[1].lora.merge_on_save


def test_no_selected_responses(tmp_path: Path) -> None:
    experiment = RestEMExperiment(model=ModelSpec(path="initial"), n_rounds=1)
    stages = experiment.stages(tmp_path)
    write_generations(tmp_path / next(stages).name, [0.0, 0.0])
    with pytest.raises(RunFailed, match="none of 2 responses has a reward of 1 or more"):
        next(stages)


def test_invalid_options() -> None:
    problems = RestEMExperiment(max_per_prompt=0).problems()
    assert len(problems) == 2 and any("model.path is not set" in line for line in problems)
