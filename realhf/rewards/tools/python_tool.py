"""A tool that runs a model's Python programs in the sandbox."""

from functools import cache

from realhf.base.isolation.restrict import MIB, Limits
from realhf.rewards.sandbox.sandbox import Reason, Sandbox

WRAPPER = """
import contextlib as _contextlib, linecache as _linecache, sys as _sys, traceback as _traceback
_sys.stderr = _sys.stdout
_source = {source!r}
_linecache.cache["program.py"] = (len(_source), None, (_source + "\\n").splitlines(True), "program.py")
try:
    exec(compile(_source, "program.py", "exec"), globals())
except SystemExit:
    raise
except BaseException as _error:
    with _contextlib.suppress(Exception):
        _frames = _error.__traceback__.tb_next
        print("".join(_traceback.format_exception(type(_error), _error, _frames)), end="", flush=True)
    raise
"""
HEAD_AND_TAIL = "\n... ({} characters are not shown) ...\n"


@cache
def shared_sandbox(memory: int, output: int) -> Sandbox:
    """Return the sandbox of this process for these limits in bytes; its server ends with the process."""
    return Sandbox(Limits(memory=memory, output=output))


class PythonTool:
    """A tool that runs Python programs, each in a new isolated process without files and network.

    ``seconds`` limits time, ``memory_mb`` address space in MiB, and ``max_output`` the shown characters.
    """

    def __init__(self, seconds: float = 6.0, memory_mb: int = 1024, max_output: int = 4000) -> None:
        self._seconds, self._max_output = seconds, max_output
        self._sandbox = shared_sandbox(memory_mb * MIB, MIB)

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Programs share no variables and no files.

        Args:
            code: The source of the program; it must print its results
        """
        result = self._sandbox.run(WRAPPER.format(source=code), seconds=self._seconds)
        output = self._cut(result.stdout.strip("\n"))
        if result.reason is Reason.ok:
            return output or "(no output)"
        ending = output.rpartition("\n")[2]
        problem = "" if result.reason is Reason.error and result.detail == ending else _problem(result.reason)
        shown = f"{problem}: {result.detail}".strip(": ") if problem else ""
        return "\n".join(part for part in (output, shown) if part)

    def _cut(self, output: str) -> str:
        """Return the start and the end of a long output."""
        if len(output) <= self._max_output:
            return output
        half = self._max_output // 2
        return output[:half] + HEAD_AND_TAIL.format(len(output) - 2 * half) + output[len(output) - half :]


def _problem(reason: Reason) -> str:
    texts = {
        Reason.timeout: "The program was stopped",
        Reason.memory: "The program had too little memory",
        Reason.output: "The program wrote too much",
        Reason.forbidden: "The program tried what is not permitted",
        Reason.killed: "The program was killed",
    }
    return texts.get(reason, "The program failed")
