"""The command as a shell sees it."""

import subprocess
import sys

from realhf.apps.main import EXIT_UNHEARD


def test_a_reader_who_leaves_ends_the_command_without_a_word() -> None:
    """As ``realhf quickstart ppo --help | head -1`` does."""
    command = [sys.executable, "-m", "realhf", "quickstart", "ppo", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == EXIT_UNHEARD == 141
