"""Multi-turn rollouts with environments: layouts, interruptions, environments that fail."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.conftest import REPOSITORY, TIMEOUT_S, Run, same_curve, start
from tests.integration.kills import changed_by_deaths, changed_by_kill

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Runs = dict[str, Run]
GAME = REPOSITORY / "examples" / "guess_number.py"
BROKEN = '''
import os, time
from pathlib import Path
from examples.guess_number import GuessNumber


class Flaky(GuessNumber):
    """Fails for some secrets."""

    def __init__(self, fault, most):
        self.fault, self.most = fault, most

    def step(self, reply):
        if self.secret % 8 < self.most:
            if self.fault == "raise":
                raise ValueError("the board is lost")
            time.sleep(1000) if self.fault == "hang" else os._exit(5)
        return super().step(reply)
'''


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A random model, whose decoding kernel computes rows independently."""
    folder = tmp_path_factory.mktemp("game")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, GAME, folder, "--games", "10"], check=True, env=environment, timeout=TIMEOUT_S)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps({'secret': row['secret']})}\n" for row in rows[:16]))
    return [
        "actor.init_from_scratch=True", f"actor.config={folder}/model", f"actor.tokenizer={folder}/tokenizer",
        f"dataset.path={folder}/train.jsonl", "dataset.train_bs_n_seqs=6", "ppo.gen.max_new_tokens=3",
        "ppo.gen.stop_token_ids=[3,4,5,6,7]", "actor.optimizer.lr=1e-3", "env.max_turns=4", "env.timeout=20",
        "exp_ctrl.total_train_epochs=4", "exp_ctrl.total_train_steps=4", "n_logged_generations=-1",
        "tensorboard.enabled=False",
    ]  # fmt: skip


LOOSE = '''
from realhf.environments import Turn
from examples.guess_number import GuessNumber
from tests.integration.agents import die_once


class Loose(GuessNumber):
    """Takes any text as a guess; its hints depend on it."""

    def __init__(self, deaths=None):
        self.deaths, self.said = deaths, ""

    def step(self, reply):
        self.said += f"{self.secret} {reply.tokens}"
        die_once(self.deaths, self.said)
        value = sum(reply.tokens) % 16
        if value == self.secret:
            return Turn(reward=1.0, done=True)
        return Turn(text="+" * (value % 5) + "\\n", reward=-value / 16, info={"value": value})
'''


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("loose") / "loose.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n{LOOSE}")
    return f"env.cls={file}:Loose"


LAYOUTS = {
    "d1": [],
    "d2": ["n_gpus_per_node=2"],
    "t2": ["n_gpus_per_node=2", "allocation_mode=t2"],
    "p2": ["n_gpus_per_node=2", "allocation_mode=p2"],
    "slow": ["env.workers=1", "ppo.gen.max_num_seqs=2", "env.max_episodes=3"],
}
KINDS = {
    "grpo": ["ppo.group_size=3", "ppo.advantage=turn", "ppo.ppo_n_minibatches=2"],
    "ppo-math": ["ppo.group_size=2", "critic.optimizer.lr=1e-3", "ppo.ppo_n_minibatches=2", "ppo.discount=0.9"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_do_not_depend_on_the_layout(
    kind: str, words: list[str], loose: str, realhf_all: Callable[..., Runs], tmp_path: Path
) -> None:
    runs = realhf_all(kind, tmp_path, LAYOUTS, [*words, loose, *KINDS[kind], "exp_ctrl.total_train_steps=2"])
    whole = runs["d1"]
    assert whole.curve[1]["actor_train/grad_norm"] > 0 and whole.curve[0]["env/turns"] > 2
    for name, run in runs.items():
        assert same_curve(whole, run) == [], name
        for step in (1, 2):
            assert [row["turns"] for row in run.generations(step)] == [row["turns"] for row in whole.generations(step)]
    rewards = [sum(turn.get("reward", 0.0) for turn in row["turns"]) for row in whole.generations(1)]
    assert rewards == pytest.approx([row["rewards"] for row in whole.generations(1)], abs=1e-5)


OFTEN = ["exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_steps=9", "n_gpus_per_node=2", *KINDS["grpo"]]


def test_kills_do_not_change_the_result(
    words: list[str], loose: str, realhf: Callable[..., Run], tmp_path: Path
) -> None:
    """Of the master, of a worker, and of the environments' processes."""
    options = [*words, loose, *OFTEN]
    whole = realhf("grpo", tmp_path / "whole", options)
    for whom in ("master", "worker"):
        assert changed_by_kill(whole, tmp_path / whom, options, 4, whom) == []
    assert changed_by_deaths(whole, tmp_path / "environment", options, "env.options.deaths={folder}", at_least=5) == []


@pytest.fixture(scope="module")
def flaky(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("flaky") / "flaky.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n{BROKEN}")
    return f"env.cls={file}:Flaky"


@pytest.mark.parametrize("fault", ["raise", "hang", "die"])
def test_failed_episodes_are_dropped_and_counted(
    fault: str, words: list[str], flaky: str, realhf: Callable[..., Run], tmp_path: Path
) -> None:
    few = ["env.max_failures=0.9", "exp_ctrl.total_train_steps=2", "ppo.group_size=2", "env.timeout=1"]
    run = realhf("grpo", tmp_path, [*words, flaky, *few, "env.options={fault: " + fault + ", most: 3}"])
    assert any(line["env/failed"] > 0 for line in run.metrics)
    assert (
        {"raise": "ValueError: the board is lost", "hang": "no answer after 1 s", "die": "exit code 5"}[fault]
        in (run.root / "first_failure.txt").read_text()
        if (run.root / "first_failure.txt").exists()
        else run.output
    )


def test_a_reward_model_scores_whole_episodes(
    words: list[str], loose: str, realhf_all: Callable[..., Runs], tmp_path: Path
) -> None:
    """Its score is added to the rewards of turns; a failed episode has none."""
    (config,) = (word.partition("=")[2] for word in words if word.startswith("actor.config="))
    models = [
        f"{role}.{option}" for role in ("rew", "critic") for option in ("init_from_scratch=True", f"config={config}")
    ]
    options = [*words, loose, *models, "ppo.group_size=2", "exp_ctrl.total_train_steps=2", "dataset.eval_fraction=0.3"]
    runs = realhf_all("ppo", tmp_path, {"d1": [], "d2": ["n_gpus_per_node=2"]}, options)
    run = runs["d1"]
    assert same_curve(run, runs["d2"]) == []
    rows = run.generations(1)
    turns = [sum(turn.get("reward", 0.0) for turn in row["turns"]) for row in rows]
    assert [row["rewards"] for row in rows] == pytest.approx(
        [total + row["model_scores"] for total, row in zip(turns, rows, strict=True)], abs=1e-5
    )
    assert len({row["model_scores"] for row in rows}) > 2 and "eval/reward" in run.evaluations[-1]["metrics"]


SOMETIMES = """
import random
from pathlib import Path
from realhf.environments import Turn
from loose import Loose


class Sometimes(Loose):
    \"\"\"Fails once for each prompt, as a service that was not reachable.\"\"\"

    def step(self, reply):
        flag = Path(__file__).with_name(f"failed-{self.secret}")
        if not flag.exists():
            flag.write_text("")
            raise ConnectionError("the service is not reachable")
        return super().step(reply)
"""


def test_a_retried_episode_is_the_same(
    words: list[str], loose: str, realhf: Callable[..., Run], tmp_path: Path
) -> None:
    file = Path(loose.removeprefix("env.cls=").removesuffix(":Loose")).with_name("sometimes.py")
    file.write_text(SOMETIMES)
    options = [*words, *KINDS["grpo"], "exp_ctrl.total_train_steps=2"]
    whole = realhf("grpo", tmp_path / "whole", [*options, loose])
    run = realhf("grpo", tmp_path / "retried", [*options, f"env.cls={file}:Sometimes", "env.retries=1"])
    assert run.curve[0]["env/failed"] == 0 and run.curve[0]["actor_gen/retried"] > 0
    for step in (1, 2):
        assert [row["turns"] for row in run.generations(step)] == [row["turns"] for row in whole.generations(step)]
    names = {json.loads(line.rstrip(",\n"))["name"] for line in (run.root / "trace.json").open() if '"name"' in line}
    assert {"environment/reset", "environment/step"} <= names


def test_too_many_failures_stop_the_run(words: list[str], flaky: str, tmp_path: Path) -> None:
    started = start("grpo", tmp_path, [*words, flaky, "env.options={fault: raise, most: 8}", "ppo.group_size=2"])
    run = started.finish()
    assert run.code != 0 and "env.max_failures" in run.output and "the board is lost" in run.output
    assert "realhf/environments" not in run.output  # the traceback is the user's


PROBLEMS: dict[str, Sequence[str]] = {
    r"env.cls='.*nothing.py:Env': no such file": ["env.cls=/nothing.py:Env"],
    r"does not define 'Gess'.*": [f"env.cls={GAME}:Gess"],
    r"rewards come from the environment": [f"env.cls={GAME}:GuessNumber", "reward.fn=code"],
    r"SingleReply loads its function later": [
        "env.cls=realhf.environments.single_reply:SingleReply",
        "env.sandbox=True",
    ],
    r"ppo.overlong_buffer is for single responses": [f"env.cls={GAME}:GuessNumber", "ppo.overlong_buffer=2"],
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_invalid_options_are_found_before_the_launch(problem: str, words: list[str], tmp_path: Path) -> None:
    run = start("grpo", tmp_path, [*words, *PROBLEMS[problem]]).finish()
    assert run.code == 2 and re.search(problem, run.output), run.output


@pytest.mark.parametrize("experiment", ["vineppo", "remax"])
def test_algorithms_for_single_responses_refuse_environments(experiment: str, words: list[str], tmp_path: Path) -> None:
    run = start(experiment, tmp_path, [*words, f"env.cls={GAME}:GuessNumber"]).finish()
    assert run.code == 2 and "this algorithm is for single responses" in run.output
