"""Several reward models: PPO, equal scores of stored responses, and best of n."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.base.best_of_n import curve
from tests.conftest import Task
from tests.integration.conftest import Run

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def members(
    realhf_all: Callable[..., dict[str, Run]], task: Task, actor_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Three reward models with different seeds."""
    words = [
        f"model.path={actor_folder}",
        f"dataset.path={task.root}/preferences.jsonl",
        "dataset.train_bs_n_seqs=8",
        "model.optimizer.lr=1e-3",
    ]
    variants = {str(seed): [f"seed={seed}"] for seed in (1, 2, 3)}
    runs = realhf_all("rw", tmp_path_factory.mktemp("members"), variants, words)
    return [str(run.model("model", 3)) for run in runs.values()]


@pytest.fixture(scope="module")
def ppo(
    realhf: Callable[..., Run], members: list[str], task: Task, actor_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:  # fmt: skip
    words = [
        f"actor.path={actor_folder}",
        f"dataset.path={task.train}",
        "dataset.train_bs_n_seqs=7",
        f"ensemble.members=[{','.join(members)}]",
        "ensemble.objective=UWO",
        "ppo.gen.max_new_tokens=8",
        "ppo.group_size=2",
        "ppo.ppo_n_minibatches=2",
        "exp_ctrl.total_train_steps=2",
        "n_gpus_per_node=2",
        "n_logged_generations=-1",
    ]
    return realhf("ppo", tmp_path_factory.mktemp("ppo"), words)


def test_rewards_combine_all_members(ppo: Run) -> None:
    for line in ppo.metrics:
        rows = ppo.generations(int(line["step"]))
        for row in rows:
            scores = [row[f"score_{i}"] for i in range(3)]
            mean = sum(scores) / 3
            variance = sum((score - mean) ** 2 for score in scores) / 3
            assert variance > 0 and row["rewards"] == pytest.approx(mean - 0.1 * variance, abs=1e-5)
        assert line["reward/mean"] == pytest.approx(sum(row["rewards"] for row in rows) / len(rows), abs=1e-6)
        assert line["rew_1_inf/reward"] == pytest.approx(sum(row["score_1"] for row in rows) / len(rows), abs=1e-6)
        assert sum(line[f"rew_inf/lowest_{i}"] for i in range(3)) == pytest.approx(1.0)
    assert {p.name for p in (ppo.root / "models").iterdir()} == {"actor", "critic"}


def test_stored_responses_are_scored_again(
    realhf: Callable[..., Run], ppo: Run, members: list[str], tmp_path: Path
) -> None:
    """The text of a response encodes to its tokens, with an EOS only if it had one."""
    words = [
        f"dataset.path={ppo.root}/generations/step_1.jsonl",
        f"rew.path={members[1]}",
        f"gold.path={members[2]}",
        "dataset.train_bs_n_seqs=5",
        "dataset.shuffle=False",
        "mode=inline",
    ]
    run = realhf("score", tmp_path, words)
    scored = [row for step in (1, 2, 3) for row in run.generations(step)]
    before = ppo.generations(1)
    assert len(scored) == len(before) == 14 and {row["truncated"] for row in before} == {0, 1}
    n_whole = 0
    for old, new in zip(before, scored, strict=True):
        assert new["response"] == old["response"]
        if len(old["response"]) + (not old["truncated"]) == old["answer_tokens"]:  # else it has a special token
            scores = [old["score_1"], old["score_2"]]
            assert [new["rewards"], new["gold"]] == pytest.approx(scores, abs=1e-5)
            n_whole += 1
    assert n_whole >= 5


def test_best_of_n_of_sampled_and_of_stored_responses(
    realhf_all: Callable[..., dict[str, Run]], members: list[str], task: Task, actor_folder: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in task.valid.read_text().splitlines()]
    given = [{**row, "answers": ["#### 1", row["solutions"][0], "#### 3"], "gold_scores": [0, 1, 0]} for row in rows]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in given))
    sampled = [
        f"dataset.path={task.valid}",
        f"policy.path={actor_folder}",
        "sampling.n=4",
        "sampling.max_new_tokens=6",
        "judge=True",
        "n_grid=[1,3,4]",
    ]
    variants = {"sampled": sampled, "given": [f"dataset.path={answers}"]}
    words = [f"ensemble.members=[{','.join(members)}]", "ensemble.objective=WCO", "dataset.train_bs_n_seqs=5"]
    runs = realhf_all("bon", tmp_path, variants, words)
    results = {name: json.loads((run.root / "bon.json").read_text()) for name, run in runs.items()}
    shapes = {name: (r["n_prompts"], r["n_answers"], [e["n"] for e in r["entries"]]) for name, r in results.items()}
    assert shapes == {"sampled": (5, 4, [1, 3, 4]), "given": (5, 3, [1, 2, 3])}
    assert [results[name]["gold_failed"] for name in ("sampled", "given")] == [0.0, 0.0]
    for result in results.values():
        assert result["entries"] == result["curves"]["WCO"]
        assert all(e["gold_score"] <= best["gold_score"] + 1e-9
                   for curve in result["curves"].values()
                   for e, best in zip(curve, result["curves"]["gold"], strict=True))  # fmt: skip
    assert [e["gold_score"] for e in results["given"]["curves"]["gold"]] == pytest.approx([1 / 3, 2 / 3, 1])
    written = Run(0, "", runs["sampled"].root / "scored").generations(1)
    worst = [[min(r[f"score_{i}"] for i in range(3)) for r in written if r["prompt_id"] == p] for p in range(5)]
    proxy = [entry["proxy_score"] for entry in curve(worst, grid=(1, 3, 4))]
    assert [e["proxy_score"] for e in results["sampled"]["entries"]] == pytest.approx(proxy, abs=1e-5)
