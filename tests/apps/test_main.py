"""The command line: exit codes and messages."""

import subprocess
import sys
from pathlib import Path

import pytest

from realhf.apps.main import COMMANDS, EXIT_BROKEN_PIPE, EXIT_USER, run
from tests.conftest import Task


def test_a_broken_pipe_ends_the_command_silently() -> None:
    """As ``realhf quickstart ppo --help | head -1`` does."""
    command = [sys.executable, "-m", "realhf", "quickstart", "ppo", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == EXIT_BROKEN_PIPE == 141


def test_other_systems_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert run(["env"]) == EXIT_USER
    assert capsys.readouterr().err == "error: realhf runs on Linux, this is darwin; use a container: Dockerfile\n"


@pytest.mark.parametrize("word, hint", [("ppo-math", "; use realhf quickstart ppo-math"), ("resme", "resume")])
def test_an_unknown_command_gives_a_suggestion(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([word]) == EXIT_USER
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(f"error: unknown command '{word}'") and hint in first


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", [["{}", "--help"], ["{}", "-h"], ["help", "{}"]])
def test_every_command_explains_itself(command: str, form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([word.format(command) for word in form]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: realhf " + command) and shown.err == ""


BAD_INPUTS = {
    "quickstart": "missing EXPERIMENT",
    "quickstart grp": "unknown experiment 'grp'",
    "quickstart none.py:X": "there is no file",
    "quickstart sft": "dataset.path",
    "quickstart sft dataset.path=/none.jsonl": "/none.jsonl",
    "quickstart sft learning_rate=1": "did you mean model.optimizer.lr ?",
    "quickstart sft batch_size=1": "did you mean dataset.train_bs_n_seqs ?",
    "quickstart sft epochs=2": "did you mean exp_ctrl.total_train_epochs ?",
    "quickstart sft max_length=5": "did you mean dataset.max_seqlen ?",
    "quickstart sft model=x": "model is a group of options",
    "quickstart sft seed": "not of the form key=value",
    "quickstart sft seed=x": "seed=x: expected int",
    "quickstart sft seed=-1": "must be >= 0",
    "quickstart sft seed=": "seed",
    "quickstart sft mode=cloud": "mode=cloud: expected local|inline|ray|slurm",
    "quickstart sft +seed=1": "cannot be added",
    "quickstart sft ~seed": "not of the form key=value",
    "quickstart sft devices=[1": "cannot be parsed",
    "quickstart sft --dryrun": "--dryrun",
    "quickstart sft --config": "--config needs a file",
    "quickstart sft --config none.yaml": "there is no such file",
    "quickstart sft trial_name=${nope}": "nope",
    "quickstart sft mode=inline n_gpus_per_node=2 model.path=/none": "mode=inline",
    "quickstart grpo actor.path=/none dataset.path=/none.jsonl": "/none",
    "quickstart ppo-math reward.fn=nope": "nope",
    "plan": "missing EXPERIMENT",
    "plan sft --out x.bmp": "the suffix must be",
    "plan sft --wy": "unknown flag --wy  did you mean --why ?",
    "plan sft --compare": "--compare needs a value",
    "plan sft model.config=/none model.init_from_scratch=True": "/none",
    "plan restem": "consists of several runs",
    "resume": "missing RUN_DIR",
    "resume /none": "/none has no run",
    "report": "missing RUN_DIR",
    "report /none": "/none has no run",
    "report a --port": "invalid arguments",
    "stop": "missing RUN_DIR",
    "stop /none": "no run in progress",
    "master": "RUN_DIR",
    "profile seconds=-1": "seconds=-1.0: must be > 0",
    "profile model=/none": "/none",
    "profile nope=1": "unknown option nope",
    "verifier": "usage: realhf verifier serve",
    "verifier serve port=99999": "port=99999: must be <= 65535",
    "verifier serve host=0.0.0.0": "token_env",
    "verifier serve fn=nope": "nope",
    "demo --where x": "usage: realhf demo",
    "completion tcsh": "bash, zsh or fish",
    "quikstart": "unknown command 'quikstart'  did you mean quickstart ?",
}


@pytest.mark.parametrize(("line", "part"), BAD_INPUTS.items())
def test_a_bad_input_is_exit_code_2_and_a_short_message(
    line: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(line.split()) == EXIT_USER
    shown = capsys.readouterr()
    assert shown.out == "" and part in shown.err and shown.err.startswith(("error: ", "usage: "))
    assert "Traceback (" not in shown.err and len(shown.err.splitlines()) <= 15
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_checks_and_writes_nothing(
    tmp_path: Path, actor_folder: Path, task: Task, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        f"model.path={actor_folder}",
        f"dataset.path={task.train}",
        "device=cpu",
        "--dry-run",
        "sampling.max_new_tokens=8",
    ]
    sft = [*words, "n_gpus_per_node=2", "dataset.train_bs_n_seqs=4"]
    assert run(["quickstart", "gen", *sft]) == 0
    assert "d2t1p1@0-1" in (shown := capsys.readouterr().out) and shown.endswith("nothing was written or launched\n")
    assert run(["quickstart", "gen", *sft, "dataset.max_prompt_len=1"]) == EXIT_USER
    stages = [*words, "validation.max_new_tokens=8", "reward.fn=math", "dataset.train_bs_n_seqs=4"]
    assert run(["quickstart", "restem", *stages]) == 0
    assert "stage   round1-sample: gen" in capsys.readouterr().out
    assert run(["quickstart", "restem", *stages, "model.path=null"]) == EXIT_USER
    assert list(tmp_path.iterdir()) == []
