"""Whole runs with a language model as judge, and with a reward model beside a verifier."""

from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.rewards.llm_judge.reply_cache import request_key
from tests.integration.conftest import Run, Started
from tests.integration.test_resume import OFTEN, files, kill, resume
from tests.rewards.llm_judge.endpoint import Endpoint, Faults, served

pytestmark = [pytest.mark.dist, pytest.mark.slow]
PRICES = ["reward.judge.price_in=2", "reward.judge.price_out=8"]
JUDGE = "rew_inf/judge_"
INLINE = ["mode=inline", "n_gpus_per_node=1"]
Realhf = Callable[..., Run]
Start = Callable[..., Started]


@pytest.fixture(scope="module")
def words(ppo_words: list[str]) -> list[str]:
    """Four steps of up to seven sums on two workers, whose rewards are those of the judge only."""
    others = [word for word in ppo_words if not word.startswith(("reward.fn=", "critic."))]
    return [*others, *OFTEN, "n_gpus_per_node=2", "exp_ctrl.total_train_steps=4", "ppo.group_size=4", "reward.fn=none",
            "reward.judge.model=m", *PRICES]  # fmt: skip


def at(endpoint: Endpoint, preset: str = "pairwise") -> list[str]:
    return [f"reward.group_fn={preset}", f"reward.judge.base_url={endpoint.url}"]


def cost(endpoint: Endpoint) -> float:
    return (endpoint.tokens_in * 2 + endpoint.tokens_out * 8) / 1e6


def without_judge(run: Run) -> list[dict[str, float]]:
    """The curve without the numbers of requests, which faults change."""
    return [{key: value for key, value in line.items() if not key.startswith(JUDGE)} for line in run.curve]


def spent(run: Run) -> float:
    return sum(line[f"{JUDGE}usd"] for line in run.metrics)


@pytest.fixture(scope="module")
def whole(realhf: Realhf, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose endpoint has no faults."""
    with served(Endpoint()) as endpoint:
        run = realhf("grpo", tmp_path_factory.mktemp("whole"), [*words, *at(endpoint)])
        assert spent(run) == pytest.approx(cost(endpoint)) and spent(run) > 0
        assert sum(line[f"{JUDGE}requests"] for line in run.metrics) == len(endpoint.bodies)
    assert all(line["rew_inf/reward"] == pytest.approx(0.5) for line in run.metrics)  # each comparison gives 1 to two
    assert all(line["actor_train/grad_norm"] > 0 for line in run.metrics)
    return run


def test_faults_and_a_kill_do_not_change_the_run_and_nothing_is_asked_again(
    realhf_start: Start, whole: Run, words: list[str], tmp_path: Path
) -> None:
    """The endpoint is slow, drops 5 %, answers nonsense 2 %, and is busy 2 % of the time."""
    faults = Faults(dropped=0.05, nonsense=0.02, busy=0.02, seconds=0.02, seed=5)
    with served(Endpoint(faults=faults)) as endpoint:
        started = realhf_start("grpo", tmp_path, [*words, *at(endpoint)])
        started.wait_for_checkpoint()
        kill(started, 2, "master")
        known = {path.stem for path in (started.root / "judge").rglob("*.json")}
        before = len(endpoint.bodies)
        found = resume(started.root)
        assert found.code == 0, found.output
        again = [body for body in endpoint.bodies[before:] if request_key(body) in known]
        assert not again and len(known) > 0 and "repeat  step" in found.output
        assert endpoint.counts["dropped"] > 0 and endpoint.counts.get("nonsense", 0) > 0
        largest = max(len(body["messages"][0]["content"].split()) for body in endpoint.bodies) * 2 / 1e6 + 1e-4
        lost = cost(endpoint) - spent(found)  # replies to requests that were in progress at the kill
        assert -1e-9 <= lost <= 2 * 16 * largest
    assert without_judge(found) == without_judge(whole) and files(found) == files(whole)
    asked, expected = (sum(line[f"{JUDGE}requests"] for line in run.metrics) for run in (found, whole))
    assert expected < asked <= expected + endpoint.counts["nonsense"]
    assert sum(line[f"{JUDGE}retries"] for line in found.metrics) > 0
    assert sum(line[f"{JUDGE}failures"] for line in found.metrics) == 0


def test_a_run_over_its_budget_stops_and_resumes_with_a_larger_one(
    realhf_start: Start, whole: Run, words: list[str], tmp_path: Path
) -> None:
    first, second, third = (line[f"{JUDGE}usd"] for line in whole.metrics[:3])
    limit = ["exp_ctrl.total_train_steps=3", *INLINE, f"reward.judge.budget={first + second + third / 3}"]
    with served(Endpoint()) as endpoint:
        stopped = realhf_start("grpo", tmp_path, [*words, *at(endpoint), *limit]).finish()
        assert stopped.code == 1 and "the judge's requests have cost" in stopped.output, stopped.output
        assert "the limit is reward.judge.budget=" in stopped.output
        assert first + second < cost(endpoint) < first + second + third
        found = resume(stopped.root, "reward.judge.budget=1")
        assert found.code == 0, found.output
        assert cost(endpoint) == pytest.approx(spent(found))  # and none of it twice


def test_a_reward_model_beside_a_verifier(
    realhf: Realhf, ppo_words: list[str], actor_folder: Path, tmp_path: Path
) -> None:
    """The rewards are those of both, and a held-out prompt is scored by both."""
    both = ["rew.path=" + str(actor_folder), "rew.init_critic_from_actor=True", "ppo.reward_output_scaling=2",
            "ppo.rm_output_scaling=0.5", "ppo.disable_value=True", "ppo.advantage=group", "score.type=outcome", *INLINE,
            "exp_ctrl.total_train_steps=1", "dataset.eval_fraction=0.2", "n_logged_generations=-1"]  # fmt: skip
    run = realhf("ppo-math", tmp_path, [*(word for word in ppo_words if not word.startswith("critic.")), *both])
    (line,) = [line for line in run.metrics if line["step"]]
    assert {"rew_0_inf/reward", "rew_inf/reward", "eval_rew_0/reward", "eval_rew/reward"} <= line.keys()
    models = []
    for row in run.generations(1):
        answer = row["response"]
        models.append((row["rewards"] - 2 * (answer.count("1") + 2 * answer.count("2") - len(answer) / 4) / 8) / 0.5)
    assert all(0 < model < 1 for model in models)  # a probability
    assert sum(models) / len(models) == pytest.approx(line["rew_0_inf/reward"], rel=1e-4)
