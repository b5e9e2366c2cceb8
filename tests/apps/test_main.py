"""The command line: exit codes and messages."""

import subprocess
import sys

import pytest

from realhf.apps.main import EXIT_BROKEN_PIPE, EXIT_USER, run


def test_a_broken_pipe_ends_the_command_silently() -> None:
    """As ``realhf quickstart ppo --help | head -1`` does."""
    command = [sys.executable, "-m", "realhf", "quickstart", "ppo", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == EXIT_BROKEN_PIPE == 141


@pytest.mark.parametrize("word, hint", [("ppo-math", "; use realhf quickstart ppo-math"), ("resme", "resume")])
def test_an_unknown_command_gives_a_suggestion(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([word]) == EXIT_USER
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(f"error: unknown command '{word}'") and hint in first
