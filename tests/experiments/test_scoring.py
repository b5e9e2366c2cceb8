"""Reward models, one or several, in PPO, in scoring and in best of n."""

import json
from pathlib import Path

import pytest

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import DatasetConfig, GenerationConfig, MFCConfig, ModelSpec, RewardConfig
from realhf.api.config.preference import EnsembleConfig, Objective, ScoreConfig
from realhf.api.experiment import MultiStageExperiment, Task
from realhf.base.errors import UserError
from realhf.experiments.bon import BestOfNExperiment, best_of_n, by_prompt, write_single_answers
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.experiments.scoring import ScoreExperiment

TWO = EnsembleConfig(["a", "b"], Objective.UWO, 0.25)


def test_ppo_with_an_ensemble() -> None:
    ppo = PPOConfig(reward_output_scaling=3.0, generation_size=4)
    experiment = PPOExperiment(ensemble=TWO, rew=ModelSpec(offload=True), rew_inf=MFCConfig("0"), ppo=ppo)
    graph = experiment.graph()
    first, second, combined = (graph[name] for name in ("rew_0_inf", "rew_1_inf", "rew_inf"))
    assert (first.role, second.outputs, second.aliases) == ("rew_0", ("score_1",), (("score_1", "rewards"),))
    assert (combined.role, combined.inputs) == (None, ("prompt_mask", "score_0", "score_1"))
    scalings = (
        first.interface.config["reward_output_scaling"],
        combined.interface.config["ppo"]["reward_output_scaling"],
    )
    assert scalings == (1.0, 3.0) and first.interface.config["generation_size"] is None
    roles = experiment.roles()
    assert roles["rew_1"].spec == ModelSpec("b", offload=True) and roles["rew_1"].scalar_head and "rew" not in roles
    assert graph.offloaded == ("rew_0", "rew_1") and experiment.problems() == []
    placed = experiment.placements()
    assert set(placed) == {m.name for m in graph.mfcs} and placed["rew_0_inf"] == placed["rew_inf"] == MFCConfig("0")
    assert graph["actor_train"].inputs.count("rewards") == 1 and "score_0" not in graph["actor_train"].inputs


def test_invalid_options() -> None:
    def problems(**options: object) -> list[str]:
        return PPOExperiment(**options).problems()

    assert "rew is r, but rewards come from ensemble.members" in problems(rew=ModelSpec("r"), ensemble=TWO)[0]
    assert problems(ensemble=EnsembleConfig(["b", "a", "b"])) == ["ensemble.members has duplicates: b"]
    assert (
        "ensemble.objective=WCO, but ensemble.members is empty"
        in problems(ensemble=EnsembleConfig([], Objective.WCO))[0]
    )
    assert PPOMathExperiment(ensemble=TWO).problems() == []
    scoring = ScoreExperiment(gold=ModelSpec("g"), judge=True, sampling=GenerationConfig(n=2)).problems()
    assert (
        len(scoring) == 2 and "gold scores come from one of them" in scoring[0] and "without policy.path" in scoring[1]
    )
    assert "judge=False uses no verifier" in ScoreExperiment(reward=RewardConfig(fn="code")).problems()[0]


def test_scoring_of_sampled_and_of_existing_responses() -> None:
    sampled = ScoreExperiment(policy=ModelSpec("p"), ensemble=TWO, judge=True)
    assert [m.name for m in sampled.graph().mfcs] == ["gen", "rew_0_inf", "rew_1_inf", "rew_inf", "gold_inf"]
    assert sampled.graph().dataset_keys == ("prompts", "row") and sampled.task is Task.math
    assert ScoreExperiment(policy=ModelSpec("p")).task is Task.prompt
    existing = ScoreExperiment(rew=ModelSpec("r"), gold=ModelSpec("g", offload=True))
    assert existing.graph().dataset_keys == ("tokens", "prompt_mask", "row") and existing.task is Task.answer
    assert existing.graph().offloaded == ("gold",) and existing.graph()["gold_inf"].outputs == ("gold",)
    for experiment in (sampled, existing):
        assert set(experiment.roles()) == set(experiment.graph().roles) and experiment.problems() == []
        assert set(experiment.placements()) == {m.name for m in experiment.graph().mfcs}


def test_verifiers_need_solutions_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    row = {"prompt": "p", "answer": "4"}
    for more, n_problems in [({"fields": None}, 1), ({"fields": {"solutions": ["4"]}}, 0), ({"solutions": ["4"]}, 0)]:
        file.write_text(json.dumps({**row, **more}))
        existing = ScoreExperiment(judge=True, dataset=DatasetConfig(path=str(file)))
        assert len(existing.problems()) == n_problems
    file.write_text(json.dumps(row))
    assert existing.problems() == [f"judge=True: rows of {file} have no 'solutions' (keys: prompt, answer)"]
    existing.reward.fn = "code"
    assert "have no 'input_output' or 'test'" in existing.problems()[0]


def test_best_of_n_has_one_stage_with_its_options(tmp_path: Path) -> None:
    experiment = BestOfNExperiment(policy=ModelSpec("p"), ensemble=TWO, seed=7)
    stage = next(iter(experiment.stages(tmp_path)))
    assert isinstance(experiment, MultiStageExperiment) and (stage.name, stage.experiment) == ("scored", "score")
    assert isinstance(stage.config, ScoreExperiment) and stage.config.n_logged_generations == -1
    assert (stage.config.ensemble, stage.config.seed, stage.config.sampling.n) == (TWO, 7, 16)


def generations(tmp_path: Path, rows: list[dict]) -> None:
    folder = tmp_path / "scored" / "generations"
    folder.mkdir(parents=True)
    for step, row in enumerate(rows, 1):
        (folder / f"step_{step}.jsonl").write_text(json.dumps(row) + "\n")


def test_curves_of_sampled_responses(tmp_path: Path) -> None:
    scores = [(1.0, 3.0, 0.0), (2.0, 4.0, 1.0), (0.0, 9.0, 0.0), (5.0, 5.0, 1.0)]
    keys = [{"prompt_id": i // 2, "sample": i % 2, "fields": None, "rewards": 0.0} for i in range(4)]
    rows = [{**key, "score_0": a, "score_1": b, "gold": gold} for key, (a, b, gold) in zip(keys, scores, strict=True)]
    generations(tmp_path, rows[::-1])
    experiment = BestOfNExperiment(policy=ModelSpec("p"), ensemble=TWO)
    list(experiment.stages(tmp_path))
    result = json.loads((tmp_path / "bon.json").read_text())
    assert (result["n_prompts"], result["n_answers"], result["members"]) == (2, 2, ["a", "b"])
    best = {name: entries[1]["gold_score"] for name, entries in result["curves"].items()}
    # second prompt: scores 0 and 9, mean 4.5, variance 20.25; and 5 and 5
    assert best == {"member_0": 1.0, "member_1": 0.5, "mean": 1.0, "WCO": 1.0, "UWO": 1.0, "gold": 1.0}
    assert [e["proxy_score"] for e in result["curves"]["WCO"]] == pytest.approx([(1.5 + 2.5) / 2, (2 + 5) / 2])
    assert result["curves"]["UWO"][0]["proxy_score"] == pytest.approx((1.75 + 2.75 - 0.5625 + 5.0) / 4)
    assert [e["gold_score"] for e in result["entries"]] == [0.5, 0.5]  # all rewards are equal


def test_answers_of_a_file_become_single_rows(tmp_path: Path) -> None:
    file, single = tmp_path / "answers.json", tmp_path / "single.jsonl"
    rows = [{"prompt": "p", "answers": ["x", "y"], "gold_scores": [1, 0], "id": 5}, {"prompt": "q", "answers": ["z"]}]
    file.write_text(json.dumps(rows))
    data = write_single_answers(DatasetConfig(path=str(file)), single)
    assert data.path == str(single) and not data.shuffle
    lines = [json.loads(line) for line in single.read_text().splitlines()]
    assert lines == [
        {"prompt": "p", "id": 5, "prompt_number": 0, "answer": "x", "gold": 1},
        {"prompt": "p", "id": 5, "prompt_number": 0, "answer": "y", "gold": 0},
        {"prompt": "q", "prompt_number": 1, "answer": "z"},
    ]
    scored = [{"prompt_id": i, "sample": 0, "rewards": float(i), "fields": row} for i, row in enumerate(lines)]
    prompts = by_prompt(reversed(scored))
    assert [[row["rewards"] for row in responses] for responses in prompts] == [[0.0, 1.0], [2.0]]
    with pytest.raises(UserError, match="1 answers have no gold score, others do"):
        best_of_n(prompts, EnsembleConfig(), [])
    (entry,) = best_of_n(prompts[:1], EnsembleConfig(), [2])["entries"]
    assert (entry["proxy_score"], entry["gold_score"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p"}, "'answers' must be a non-empty list of texts; to sample responses set policy.path"),
        ({"prompt": "p", "answers": []}, "'answers' must be a non-empty list of texts"),
        ({"prompt": "p", "answers": ["x"], "gold_scores": [1, 2]}, "'gold_scores' must be a number for each of the 1"),
    ],
)
def test_invalid_rows_of_answers(tmp_path: Path, row: dict, words: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"answers.jsonl:1: {words}"):
        write_single_answers(DatasetConfig(path=str(file)), tmp_path / "single.jsonl")


def test_scores_of_each_member_are_normalised(tmp_path: Path) -> None:
    for name, mean in (("a", 3.0), ("b", -1.0)):
        (tmp_path / name).mkdir()
        evaluation = {
            "metrics": {"rw_eval/score": mean, "rw_eval/score_sq": mean**2 + 2.0},
            "counts": {"rw_eval/score": 9.0},
        }
        (tmp_path / name / "evaluation.json").write_text(json.dumps(evaluation))
    ensemble = EnsembleConfig([str(tmp_path / "a"), str(tmp_path / "b")])
    experiment = PPOExperiment(ensemble=ensemble, score=ScoreConfig(normalise=True))
    configs = [experiment.graph()[f"rew_{i}_inf"].interface.config for i in range(2)]
    assert experiment.problems() == [] and [c["reward_output_bias"] for c in configs] == [3.0, -1.0]
    assert [c["reward_output_scaling"] for c in configs] == pytest.approx([(2 * 9 / 8) ** -0.5] * 2)
    (tmp_path / "b" / "evaluation.json").unlink()
    assert f"no scores of held-out rows in {tmp_path}/b/evaluation.json" in experiment.problems()[0]


@pytest.mark.parametrize("judge", [False, True])
def test_responses_without_a_score_are_left_out(tmp_path: Path, judge: bool) -> None:
    rows = [{"prompt_id": i // 3, "sample": i % 3, "fields": None, "rewards": float(i), "gold": float(i)}
            for i in range(6)]  # fmt: skip
    del rows[1]["rewards"], rows[5]["gold"]
    experiment = BestOfNExperiment(judge=judge, policy=ModelSpec("model"))
    next(stages := experiment.stages(tmp_path))
    folder = tmp_path / "scored" / "generations"
    folder.mkdir(parents=True)
    (folder / "step_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (rows if judge else rows[:5])))
    assert list(stages) == []
    result = json.loads((tmp_path / "bon.json").read_text())
    assert (result["n_answers"], result["gold_failed"]) == (2, pytest.approx(2 / 6 if judge else 1 / 5))
    assert [entry["proxy_score"] for entry in result["entries"]] == [(1.0 + 3.5) / 2, 3.0]
