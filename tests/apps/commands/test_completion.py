"""Completion in real shells, and its candidates."""

import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from realhf.apps.commands.completion import SCRIPTS, candidates
from realhf.apps.main import COMMANDS, run
from realhf.experiments import EXPERIMENTS
from tests.conftest import TIMEOUT_S

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], {*COMMANDS, "--help", "--version"}),
        (["res"], {"resume"}),
        (["quickstart", "gr"], {"grpo"}),
        (["plan", "reinforce"], {"reinforce-pp"}),
        (["quickstart", "grpo", "ppo.kl_i"], {"ppo.kl_in="}),
        (["quickstart", "grpo", "ppo.kl_in="], {"ppo.kl_in=reward", "ppo.kl_in=loss", "ppo.kl_in=none"}),
        (["quickstart", "grpo", "overwrite=T"], {"overwrite=True"}),
        (["quickstart", "grpo", "a"], {"actor.", "allocation_mode=", "actor_gen.", "actor_inf.", "actor_train."}),
        (["quickstart", "grpo", "--d"], {"--dry-run"}),
        (["plan", "grpo", "--w"], {"--why"}),
        (["quickstart", "grpo", "no.such="], set()),
        (["quickstart", "nope", "x"], set()),
        (["verifier", ""], {"serve"}),
        (["verifier", "serve", "max_i"], {"max_items="}),
        (["profile", "bf16="], {"bf16=True", "bf16=False"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["env", "x"], set()),
        ([], {*COMMANDS, "--help", "--version"}),
    ],
)  # fmt: skip
def test_candidates(words: list[str], expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(candidates(words)) == expected


def test_paths_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "rows\udcff\n.jsonl").write_text("")  # cannot be printed in a line
    (tmp_path / "runs" / "plan.json").write_text('{"experiment": "sft"}')
    assert candidates(["quickstart", "sft", "dataset.path=r"]) == ["dataset.path=rows.jsonl", "dataset.path=runs/"]
    assert candidates(["report", "ru"]) == ["runs/"] and candidates(["plan", "sft", "--config", "ro"]) == ["rows.jsonl"]
    assert candidates(["resume", "runs", "seq"]) == ["seq_mean="], "the options of the run's experiment"
    (tmp_path / "runs" / "plan.json").write_text("[")
    assert candidates(["resume", "runs", "seq"]) == []


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a command ``realhf``."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "realhf").write_text(f'#!/bin/sh\nexec {sys.executable} -m realhf "$@"\n')
    (folder / "realhf").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder),
            "TERM": "dumb", "PS1": "PROMPT> "}  # fmt: skip


TYPED = [
    ("realhf quickstart gr\t", "realhf quickstart grpo "),
    ("realhf quickstart grpo ppo.kl_i\tl\t", "realhf quickstart grpo ppo.kl_in=loss "),
    ("realhf quickstart sft mode=in\t", "realhf quickstart sft mode=inline "),
    ("realhf verif\ts\tmax_it\t", "realhf verifier serve max_items="),
]
"""Typed keys, and the command line after the completions."""


@pytest.mark.parametrize(("keys", "line"), TYPED)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell: str, keys: str, line: str, environment: dict[str, str], tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    setup = "autoload -U compinit; compinit -u; " if shell == "zsh" else ""
    script.write_text(setup + f'eval "$(realhf completion {shell})"\n')
    command = [shell, "-f", "-i"] if shell == "zsh" else [shell, "--norc", "--noprofile", "-i"]
    primary, secondary = os.openpty()
    with subprocess.Popen(
        command,
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    ) as process:
        os.close(secondary)
        try:
            os.write(primary, f". {script}; echo REA''DY\n".encode())
            read_until(primary, "READY\r\n", "PROMPT> ")  # keys before the prompt are not completed
            os.write(primary, keys.encode() + b"\x01echo '\x05'END\n")  # ctrl-a, ctrl-e: the line is printed, not run
            text = read_until(primary, "END\r\n", "PROMPT> ")  # of the next command: after the output
            assert re.search(rf"\n.*{re.escape(line.rstrip())} ?END\r", text), text
        finally:
            process.kill()
            os.close(primary)


def read_until(fd: int, *marks: str) -> str:
    """Read a terminal until its output contains the marks, in order."""
    text, deadline = "", time.monotonic() + TIMEOUT_S
    while not re.search(".*".join(map(re.escape, marks)), text, re.DOTALL):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {marks} in {text!r}"
        text += os.read(fd, 4096).decode(errors="replace")
    return text


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [("realhf quickstart gr", ["grpo"]), ("realhf quickstart grpo ppo.kl_in=l", ["ppo.kl_in=loss"]),
     ("realhf quickstart ", list(EXPERIMENTS))],
)  # fmt: skip
def test_fish_completes(line: str, expected: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    code = f"realhf completion fish | source; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert sorted(done.stdout.split()) == sorted(expected), done.stderr


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"], ["fsh"]])
def test_other_shells_are_refused_with_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(shell in error for shell in SCRIPTS)
