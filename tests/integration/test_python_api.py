"""``realhf.run`` and ``realhf.plan`` in scripts: results, errors, interrupts."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import realhf
from realhf.base.errors import RunFailed, RunStopped, UserError
from tests.conftest import EXAMPLES, TIMEOUT_S, Task, reset_signals

pytestmark = [pytest.mark.dist]


@pytest.fixture(autouse=True)
def one_thread_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def options(task: Task) -> dict[str, Any]:
    return {
        "model": {"init_from_scratch": True, "config": task.model, "tokenizer": task.tokenizer},
        "dataset": {"path": [{"prompt": f"{n}+1=\n", "answer": f"{n + 1}\n"} for n in range(8)], "train_bs_n_seqs": 4},
        "device": "cpu",
        "quiet": True,
    }


def test_the_example_trains_with_a_function_and_reports(task: Task, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "grpo.py"), str(task.root)], capture_output=True, text=True,
                          timeout=TIMEOUT_S)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rewards = [float(line.rpartition(" ")[2]) for line in lines if re.match(r"step \d", line)]
    model, report = map(Path, lines[-1].split())
    metrics = [json.loads(line) for line in (report.parent / "metrics.jsonl").read_text().splitlines()]
    assert rewards == [round(line["reward/mean"], 3) for line in metrics] and len(rewards) == 4
    assert (model / "model.safetensors").is_file() and "<html" in report.read_text()
    assert any(line.startswith("saved   actor") for line in lines), "the output of the command is shown"
    assert len((EXAMPLES / "grpo.py").read_text().splitlines()) <= 25


@pytest.mark.slow
def test_metrics_come_as_steps_end(options: dict[str, Any]) -> None:
    run = realhf.run("sft", "exp_ctrl.total_train_epochs=40", wait=False, **options)
    seen = []
    for metrics in run:
        seen.append(metrics["step"])
        if metrics["step"] == 1:
            assert run.is_running and "running" in repr(run)
    assert seen == list(range(1, 81)) == [line["step"] for line in run.metrics]
    assert not run.is_running and "done, 80 steps" in repr(run)
    assert run.model_path == run.models["model"] == run.directory / "models" / "model" / "step_80"


def test_output_is_printed_by_the_caller(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread would print between a line of the caller and its end."""
    writers: list[int] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            writers.append(threading.get_ident())
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", recorder := Recorder())
    run = realhf.run("sft", wait=False, **{**options, "quiet": False})
    assert [metrics["step"] for metrics in run] == [1, 2]
    assert recorder.getvalue() == run.output and "done    2 steps" in run.output
    assert set(writers) == {threading.get_ident()}


def test_invalid_options_and_checks_are_user_errors(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^unknown option modle +did you mean mode"):
        realhf.run("sft", modle="x", **options)
    with pytest.raises(UserError, match=r"seed=-1: must be"):
        realhf.run("sft", **{**options, "seed": -1})
    with pytest.raises(UserError, match="train_bs_n_seqs=99 is larger than the 8 rows"):
        realhf.run("sft", "dataset.train_bs_n_seqs=99", **options)
    with pytest.raises(UserError, match="unknown experiment"):
        realhf.run("stf")
    with pytest.raises(UserError) as error:
        realhf.run("sft", dataset="nowhere.jsonl")
    assert [problem.partition(" ")[0] for problem in error.value.problems] == [
        "model.path",
        "dataset.path=nowhere.jsonl:",
    ]
    for rows in ([{"prompt": object()}], [3]):
        with pytest.raises(UserError, match=r"dataset.path: expected rows"):
            realhf.run("sft", dataset=rows)
    with pytest.raises(UserError, match="expected a value of JSON, got a object"):
        realhf.run("sft", seed=object())
    assert not list((tmp_path / "runs").glob("sft/*"))


@pytest.mark.slow
def test_a_run_that_fails_raises_its_error(options: dict[str, Any], reward_file: Path, actor_folder: Path) -> None:
    rows = [{"prompt": f"{n}+1=\n"} for n in range(8)]
    with pytest.raises(RunFailed, match="responses have no reward, .*first_failure.txt"):
        realhf.run("grpo", actor=actor_folder, dataset={"path": rows, "train_bs_n_seqs": 8}, device="cpu", quiet=True,
                   reward=f"{reward_file}:failing", ppo={"gen": {"max_new_tokens": 24}, "group_size": 8})  # fmt: skip


@pytest.mark.slow
def test_a_stopped_run_is_resumable_and_a_killed_one_failed(options: dict[str, Any]) -> None:
    endless = {**options, "exp_ctrl": {"total_train_epochs": 100_000, "ckpt_freq_steps": 1}}
    run = realhf.run("sft", wait=False, **endless)
    next(iter(run))
    run.stop()
    assert (run.directory / "checkpoints" / "latest").is_file()
    with pytest.raises(RunStopped, match="realhf resume"):
        run.wait()
    run = realhf.run("sft", wait=False, **endless)
    next(iter(run))
    run._process.kill()
    with pytest.raises(RunFailed, match="exit code -9"):
        run.wait()


SCRIPT = """
import sys
import realhf
run = realhf.run("sft", *sys.argv[1:], wait=False)
print("started", flush=True)
next(iter(run))
print("first step", flush=True)
{end}
"""


def script(end: str, options: dict[str, Any], folder: Path, *words: str) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(end=end))
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in options["dataset"]["path"]))
    model = [f"model.{key}={value}" for key, value in options["model"].items()]
    return subprocess.Popen([sys.executable, str(path), *model, f"dataset.path={rows}", "device=cpu",
                             "dataset.train_bs_n_seqs=4", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True, preexec_fn=reset_signals)  # fmt: skip


@pytest.mark.slow
def test_a_script_that_ends_early_waits_and_fails_with_its_run(options: dict[str, Any], tmp_path: Path) -> None:
    good = script("", options, tmp_path)
    out, err = good.communicate(timeout=TIMEOUT_S)
    assert good.returncode == 0 and "done    2 steps" in out, err
    bad = script("run._process.kill()", options, tmp_path, "exp_ctrl.total_train_epochs=100000")
    out, err = bad.communicate(timeout=TIMEOUT_S)
    assert bad.returncode != 0 and "error: the run ended with exit code -9" in err


@pytest.mark.slow
def test_an_interrupt_of_the_script_alone_ends_the_run(options: dict[str, Any], tmp_path: Path) -> None:
    started = script("run.wait()", options, tmp_path, "exp_ctrl.total_train_epochs=100000", "trial_name=t")
    while (line := started.stdout.readline()) != "first step\n":
        assert line, started.stderr.read()
    time.sleep(0.2)
    os.kill(started.pid, signal.SIGINT)  # as a notebook's interrupt: not of the process group
    _, err = started.communicate(timeout=TIMEOUT_S)
    assert started.returncode != 0 and "KeyboardInterrupt" in err
    assert not (tmp_path / "runs" / "sft" / "t" / "channel.key").exists()


@pytest.mark.slow
def test_a_file_that_the_run_reads_cannot_start_another(tmp_path: Path, options: dict[str, Any]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import realhf\nfrom realhf.experiments.sft import SFTExperiment\n"
                    "class Mine(SFTExperiment):\n    pass\nrealhf.run(Mine, quiet=True)\n")  # fmt: skip
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode != 0 and "call it under if __name__ == '__main__'" in done.stderr


def test_a_plan_has_layouts_time_and_a_page(task: Task, options: dict[str, Any], tmp_path: Path) -> None:
    del options["quiet"]
    planned = realhf.plan("sft", "n_gpus_per_node=2", **options)
    assert planned.layouts == {"sft_train": "d2t1p1@0-1"} and planned.fits and planned.seconds > 0
    assert "allocation" in str(planned) and f"{planned.seconds:.4g} s" in str(planned)
    planned.save(tmp_path / "plan.html")
    assert "<svg" in (tmp_path / "plan.html").read_text()
    with pytest.raises(UserError, match="consists of several runs"):
        realhf.plan("restem")
