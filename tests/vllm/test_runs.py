"""Whole runs that generate with vLLM: data parallel, tensor parallel, on separate workers; and failures."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import REWARDS, Run, Started, run_all, same_curve, start
from tests.integration.test_resume import kill, resume
from tests.vllm.model import INTERPRETER

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.dist]
WITH_VLLM = "actor_gen.backend=vllm"
VARIANTS = {
    "one": [WITH_VLLM],
    "two": ["n_gpus_per_node=2", WITH_VLLM],
    "tensor": ["n_gpus_per_node=2", "allocation_mode=actor_gen:t2,*:d2", WITH_VLLM],
    "separate": ["n_gpus_per_node=2", "allocation_mode=vllm.d1+d1"],
}


@pytest.fixture(scope="module")
def options(sums: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rewards = tmp_path_factory.mktemp("reward") / "rewards.py"
    rewards.write_text(REWARDS)
    return [
        f"actor.config={sums / 'model'}",
        "actor.init_from_scratch=True",
        f"actor.tokenizer={sums / 'tokenizer'}",
        f"dataset.path={sums / 'train.jsonl'}",
        f"reward.fn={rewards}:graded",
        "dataset.train_bs_n_seqs=6",
        "ppo.gen.max_new_tokens=12",
        "ppo.group_size=2",
        "ppo.ppo_n_minibatches=2",
        "exp_ctrl.total_train_steps=5",
        "verify_reallocation=True",
        f"vllm.python={INTERPRETER}",
        "vllm.timeout=120",
    ]


@pytest.fixture(scope="module")
def runs(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every step compares the weight checksums of vLLM and the trainer before it samples."""
    return run_all("ppo-math", tmp_path_factory.mktemp("vllm"), VARIANTS, options)


@pytest.mark.parametrize("other", ["two", "tensor", "separate"])
def test_the_curve_does_not_depend_on_the_placement_of_vllm(other: str, runs: dict[str, Run]) -> None:
    assert not same_curve(runs["one"], runs[other])


def test_trainer_and_generator_log_probabilities_agree(runs: dict[str, Run]) -> None:
    for run in runs.values():
        assert len(run.metrics) == 5
        assert all(line["actor_train/logprob_diff"] < 1e-5 for line in run.metrics)


def test_adapters_beside_the_base_and_merged(options: list[str], tmp_path: Path) -> None:
    """The checksums of base and adapters, or of merged weights, are compared, and the reference is the base."""
    lora = ["actor.lora.rank=4", "actor.optimizer.lr=3e-3", WITH_VLLM]
    variants = {
        "one": [],
        "tensor": ["n_gpus_per_node=2", "allocation_mode=actor_gen:t2,*:d2"],
        "merged": ["vllm.merge_lora=True"],
    }
    found = run_all("ppo-math", tmp_path, variants, [*options, *lora])
    for other in ("tensor", "merged"):
        assert not same_curve(found["one"], found[other])
    assert all(line["actor_train/logprob_diff"] < 1e-5 for run in found.values() for line in run.metrics)
    logs = {name: (run.root / "logs" / "worker-0.log").read_text() for name, run in found.items()}
    reason = "vLLM gets merged weights of actor: vllm.merge_lora=True"
    assert [name for name, log in logs.items() if reason in log] == ["merged"]
    assert abs(found["one"].metrics[-1]["kl/ref"]) > 1e-6 and found["one"].metrics[-1]["actor_train/grad_norm"] > 0


def test_a_run_with_adapters_resumes(options: list[str], tmp_path: Path) -> None:
    """vLLM gets the base and the adapters of the checkpoint."""
    words = [*options, "actor.lora.rank=4", "actor.optimizer.lr=3e-3", WITH_VLLM, "exp_ctrl.ckpt_freq_steps=1"]
    (tmp_path / "whole").mkdir()
    whole = start("ppo-math", tmp_path / "whole", words).finish()
    cut = start("ppo-math", tmp_path, words)
    cut.wait_for_checkpoint()
    kill(cut, 1, "master")
    assert not same_curve(whole, resume(cut.root))


@pytest.fixture
def started(options: list[str], tmp_path: Path) -> Callable[..., Started]:
    return lambda *more: start("ppo-math", tmp_path, [*options, *more])


def test_a_killed_vllm_fails_the_run(started: Callable[..., Started]) -> None:
    run = started(WITH_VLLM, "exp_ctrl.total_train_steps=500", "exp_ctrl.total_train_epochs=500")
    run.wait_for_step()
    os.kill(vllm_of(run), signal.SIGKILL)
    began, ended = time.monotonic(), run.finish()
    assert ended.code != 0 and time.monotonic() - began < 60
    assert (
        "worker 0 failed during actor_gen" in ended.output
        and "vLLM of worker 0 ended by signal SIGKILL" in ended.output
    )


def test_a_hung_vllm_fails_the_run(started: Callable[..., Started]) -> None:
    run = started(WITH_VLLM, "exp_ctrl.total_train_steps=500", "exp_ctrl.total_train_epochs=500", "vllm.timeout=30")
    run.wait_for_step()
    pid = vllm_of(run)
    os.kill(pid, signal.SIGSTOP)
    ended = run.finish()
    assert ended.code != 0 and "within 30 s (vllm.timeout)" in ended.output
    assert not Path(f"/proc/{pid}").exists()


def test_an_interpreter_without_vllm_is_rejected(started: Callable[..., Started]) -> None:
    ended = started(WITH_VLLM, "vllm.python=/usr/bin/env").finish()
    assert ended.code == 2 and "backend=vllm: /usr/bin/env cannot import vllm" in ended.output


def vllm_of(run: Started) -> int:
    """Return the pid of a run's vLLM process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                above = Path(f"/proc/{parent}/cmdline").read_bytes().decode()
            except OSError:
                continue
            if any(word.endswith("realhf_server.py") for word in words) and str(run.root) in above:
                return int(folder.name)
    raise AssertionError(f"{run.root} has no vLLM process")


ENVIRONMENT = '''
from realhf.environments import Turn


class Echo:
    """Answers three times with a digit that depends on the reply."""

    def reset(self, row, seed):
        self.left = 3
        return Turn()

    def step(self, reply):
        self.left -= 1
        digit = sum(reply.tokens) % 10
        return Turn(text=f" {digit}\\n", reward=digit / 10, done=not self.left)
'''


def test_episodes_with_vllm(options: list[str], tmp_path: Path) -> None:
    """The trainer computes the log-probabilities of vLLM; one worker and two play the same episodes."""
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    words = [*(word for word in options if not word.startswith("reward.fn")), f"env.cls={tmp_path}/echo.py:Echo",
             "ppo.recompute_logprobs=True", "exp_ctrl.total_train_steps=3", "n_logged_generations=-1"]  # fmt: skip
    variants = {"one": [WITH_VLLM], "two": VARIANTS["two"], "tensor": VARIANTS["tensor"]}
    runs = run_all("grpo", tmp_path, variants, words)
    whole = runs["one"]
    assert len(whole.metrics) == 3 and whole.metrics[0]["env/turns"] == 3
    for run in runs.values():
        assert all(line["actor_train/logprob_diff"] < 1e-5 for line in run.metrics)
        assert [row["turns"] for row in run.generations(1)] == [row["turns"] for row in whole.generations(1)]


FORKS = '''
from realhf.environments import Turn


class Forks:
    """Sends the whole conversation as tokens: goes on, forks at the first reply, and returns to the longest."""

    def reset(self, row, seed):
        self.seen = [[5, 6, 7]]
        return Turn(tokens=self.seen[0], whole=True)

    def step(self, reply):
        self.seen.append([*self.seen[-1], *reply.tokens, 5 + len(self.seen)])
        if len(self.seen) == 4:
            self.seen[-1] = [*self.seen[1], 9]
        if len(self.seen) == 5:
            self.seen[-1] = [*self.seen[2], 8]
        return Turn(tokens=self.seen[-1], whole=True, reward=sum(reply.tokens) % 7 / 7, done=len(self.seen) == 6)
'''


def test_forked_and_partial_episodes_with_vllm(options: list[str], tmp_path: Path) -> None:
    """The trainer computes the log-probabilities of vLLM in every row; unfinished episodes go on a step later."""
    (tmp_path / "forks.py").write_text(FORKS)
    words = [*(word for word in options if not word.startswith("reward.fn")), f"env.cls={tmp_path}/forks.py:Forks",
             "ppo.recompute_logprobs=True", "exp_ctrl.total_train_steps=3", "n_logged_generations=-1"]  # fmt: skip
    partial = [WITH_VLLM, "env.partial_tokens=16", "exp_ctrl.total_train_steps=6"]
    runs = run_all("grpo", tmp_path, {"whole": [WITH_VLLM], "partial": partial}, words)
    whole, later = runs["whole"], runs["partial"]
    assert all(line["actor_train/logprob_diff"] < 1e-5 for line in whole.metrics)
    assert whole.metrics[0]["actor_gen/rows"] > 2 and whole.metrics[0]["tokens/drifted"] == 0
    assert later.metrics[0]["actor_gen/carried"] > 0 and max(line["actor_gen/token_age"] for line in later.metrics) > 0
