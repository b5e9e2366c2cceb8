"""The command line in separate processes."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from realhf.system.metrics.descriptions import describe
from tests.conftest import TIMEOUT_S, Task, reset_signals
from tests.warm_start import ADDRESS, PROGRAM, address

REPOSITORY = Path(__file__).parents[2]
TIMING_METRICS = (
    "time/",
    "actor_gen/env_step",
    "eval_gen/env_step",
    "memory/",
    "tokens/per_s",
    "flops/model_per_s",
    "predicted/",
    "limit/",
    "mfu/",
    "mbu/",
)
REWARDS = '''
def graded(prompt: str, answer: str, row: dict) -> float:
    """Small numbers are good, and so are short answers: every answer gets its own reward."""
    return (answer.count("1") + 2 * answer.count("2") - len(answer) / 4) / 8


def rare(prompt: str, answer: str, row: dict) -> float:
    """Right is what has a one in it: all answers to a prompt may be alike."""
    return float("1" in answer)


def failing(prompt: str, answer: str, row: dict) -> float:
    """Fails at some answers."""
    if "3" in answer:
        raise RuntimeError("three is too many")
    return 1.0
'''


@dataclass(frozen=True)
class Run:
    """A finished run: exit code, output and directory."""

    code: int
    output: str
    root: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.root / "metrics.jsonl").read_text().splitlines()]

    @property
    def curve(self) -> list[dict[str, float]]:
        """The metrics that do not depend on the speed of the machine or on the layout."""
        is_result = lambda key: not (key.startswith(TIMING_METRICS) or key.endswith("/router_max_rank_load"))
        return [{k: v for k, v in line.items() if is_result(k)} for line in self.metrics]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / "evaluation.jsonl").read_text().splitlines()]

    def model(self, role: str, step: int) -> Path:
        return self.root / "models" / role / f"step_{step}"

    def generations(self, step: int) -> list[dict[str, Any]]:
        path = self.root / "generations" / f"step_{step}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Started:
    process: subprocess.Popen
    root: Path

    def finish(self, timeout_s: float = TIMEOUT_S) -> Run:
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its workers end with it
            raise
        assert not (unknown := undescribed_metrics(self.root)), f"no description of {', '.join(sorted(unknown))}"
        return Run(self.process.returncode, output, self.root)

    def wait_for_step(self) -> None:
        """Wait until the first line of metrics is written."""
        self._wait_for(self.root / "metrics.jsonl")

    def wait_for_checkpoint(self) -> None:
        """Wait for the first checkpoint."""
        self._wait_for(self.root / "checkpoints" / "latest")

    def _wait_for(self, file: Path) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not (file.exists() and file.read_text()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"there is no {file}"
            time.sleep(0.05)


def undescribed_metrics(root: Path) -> set[str]:
    """Return the metrics of a run that the registry does not describe. A line that cannot be read is skipped."""
    keys: set[str] = set()
    for path in (*root.glob("**/metrics.jsonl"), *root.glob("**/evaluation.jsonl")):
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
            with contextlib.suppress(json.JSONDecodeError):
                found = json.loads(line)
                keys |= set(found.get("metrics", found))
    return {key for key in keys if describe(key) is None}


def start(
    experiment: str, folder: Path, words: Sequence[str], command: Sequence[str] = (), prefix: Sequence[str] = ()
) -> Started:
    """Start ``realhf quickstart`` with its run in ``folder/t/trial``, or another command on a run in ``folder``.

    ``prefix`` is a command that executes its arguments.
    """
    common = [f"fileroot={folder}", "experiment_name=t", "trial_name=trial", "device=cpu", "threads_per_worker=1"]
    process = subprocess.Popen(
        [*prefix, *PROGRAM, *(command or ["quickstart", experiment, *common]), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=reset_signals,
    )
    return Started(process, folder if command else folder / "t" / "trial")


def run(experiment: str, folder: Path, words: Sequence[str]) -> Run:
    """Return a run that has succeeded."""
    done = start(experiment, folder, words).finish()
    assert done.code == 0, done.output
    return done


def run_all(experiment: str, folder: Path, variants: dict[str, list[str]], words: Sequence[str]) -> dict[str, Run]:
    """Run each variant in its own folder, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(run, experiment, folder / name, [*words, *more]) for name, more in variants.items()}
        return {name: future.result() for name, future in runs.items()}


def same_curve(expected: Run, found: Run) -> list[str]:
    """Return the differences of two curves beyond float32 rounding: relative 1e-4, absolute 1e-6."""
    assert [line.keys() for line in found.curve] == [line.keys() for line in expected.curve]
    return [
        f"step {line['step']}: {name} is {line[name]}, not {value}"
        for before, line in zip(expected.curve, found.curve, strict=True)
        for name, value in before.items()
        if line[name] != pytest.approx(value, rel=1e-4, abs=1e-6)
    ]


@pytest.fixture(scope="session", autouse=True)
def warm_start(request: pytest.FixtureRequest) -> None:
    """``make test`` starts its runs as users do; the many runs of the other tests are started warm."""
    if request.config.getoption("markexpr") != "not slow":
        os.environ[ADDRESS] = address()


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="session")
def ppo_words(task: Task, actor_folder: Path, reward_file: Path) -> list[str]:
    """17 sums, 7 a step: three steps, the last of three sums."""
    return [
        f"actor.path={actor_folder}",
        f"dataset.path={task.train}",
        f"reward.fn={reward_file}:graded",
        "dataset.train_bs_n_seqs=7",
        "ppo.gen.max_new_tokens=12",
        "ppo.group_size=2",
        "ppo.ppo_n_minibatches=2",
        "ppo.kl_ctl=0.05",
        "actor.optimizer.lr=1e-3",
        "critic.optimizer.lr=1e-3",
    ]


@pytest.fixture(scope="session")
def four_worker_run(ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """PPO on four workers of this machine, the reference of other tests."""
    return run("ppo-math", tmp_path_factory.mktemp("four"), [*ppo_words, "n_gpus_per_node=4"])


@pytest.fixture(scope="session")
def sft_words(task: Task) -> list[str]:
    return [
        "model.init_from_scratch=True",
        f"model.config={task.model}",
        f"model.tokenizer={task.tokenizer}",
        f"dataset.path={task.sft}",
        "dataset.train_bs_n_seqs=15",
        "model.optimizer.lr=3e-3",
    ]


@pytest.fixture(scope="session")
def realhf() -> Callable[..., Run]:
    return run


@pytest.fixture(scope="session")
def realhf_all() -> Callable[..., dict[str, Run]]:
    return run_all


@pytest.fixture(scope="session")
def realhf_start() -> Callable[..., Started]:
    return start
