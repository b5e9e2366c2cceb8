"""A run in other processes, followed from Python."""

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from realhf.base.errors import RunFailed, RunStopped, UserError
from realhf.base.paths import RunDir

STARTED_BY_RUN = "REALHF_STARTED_BY_RUN"
"""Environment variable of the processes of a run that was started from Python."""

COMMAND = (sys.executable, "-m", "realhf")
POLL_S = 0.05
MODELS = "**/models/*/step_*"


class Run:
    """A run that ``realhf.run`` has started. Iterate over it for the metrics of each step as they come."""

    def __init__(self, arguments: Sequence[str], paths: RunDir, is_multi_stage: bool, quiet: bool) -> None:
        self._paths, self._is_multi_stage, self._quiet = paths, is_multi_stage, quiet
        self._marker = paths.stages if is_multi_stage else paths.plan  # written after the checks
        self._before = _identity(self._marker)
        self._lines: list[str] = []
        self._n_shown = 0
        self._errors: list[str] = []
        self._process = subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.DEVNULL,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                                         env={**os.environ, STARTED_BY_RUN: "1"})  # fmt: skip
        pipes = (self._lines.extend, self._process.stdout), (self._errors.extend, self._process.stderr)
        self._readers = [threading.Thread(target=target, args=(pipe,), daemon=True) for target, pipe in pipes]
        for reader in self._readers:
            reader.start()
        atexit.register(self._at_exit)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._paths.root

    @property
    def output(self) -> str:
        """What the command has printed so far."""
        return "".join(self._lines)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of all steps so far; those of a multi-stage experiment have the key ``stage``."""
        return [line for file in self._metrics_files() for line in self._parsed(file, _read_lines(file)[0])]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of every step once, from the first, until the end of the run; raise as ``wait`` does."""
        seen: set[tuple[str, int]] = set()  # a run that restarts after a failure repeats steps
        read: dict[Path, int] = {}
        ended = False
        while not ended:
            ended = not self.is_running  # before reading: the last lines are complete
            self._show()
            for file in self._metrics_files():
                lines, read[file] = _read_lines(file, read.get(file, 0))
                for line in self._parsed(file, lines):
                    if (step := (file.parent.name, line["step"])) not in seen:
                        seen.add(step)
                        yield line
            if not ended:
                time.sleep(POLL_S)
        self.wait()

    def wait(self) -> "Run":
        """Wait for the end of the run. Raises ``UserError``, ``RunFailed`` or ``RunStopped`` as the command would."""
        atexit.unregister(self._at_exit)
        try:
            while self.is_running:
                self._show()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(POLL_S)
        except KeyboardInterrupt:
            self._process.send_signal(signal.SIGINT)  # a notebook interrupts only its own process
            self._process.wait()
            raise
        for reader in self._readers:
            reader.join()
        self._show()
        message = "".join(self._errors).strip()
        match self._process.returncode:
            case 0:
                print(message, file=sys.stderr) if message and not self._quiet else None
            case 2:
                problems = re.findall(r"^  \d+\. (.*)$", message, re.MULTILINE)
                raise UserError(problems or message.removeprefix("error: "))
            case 130:
                raise RunStopped(message or f"the run was stopped; continue with realhf resume {self.directory}")
            case code:
                raise RunFailed(message.removeprefix("error: ") or f"the run ended with exit code {code}")
        return self

    def stop(self) -> None:
        """End the run after its current step, with a checkpoint, and wait for its end."""
        if self.is_running:
            subprocess.run(
                [sys.executable, "-m", "realhf", "stop", str(self.directory)], capture_output=True, check=False
            )
        with contextlib.suppress(RunStopped):
            self.wait()

    @property
    def models(self) -> dict[str, Path]:
        """The folder of the last saved model of every role, in the Hugging Face format."""
        steps = {(path.stat().st_mtime_ns, path.parent.name): path for path in self.directory.glob(MODELS)
                 if path.name.removeprefix("step_").isdigit()}  # fmt: skip
        return {role: path for (_, role), path in sorted(steps.items())}

    @property
    def model_path(self) -> Path:
        """The folder of the trained policy, or of the only trained model, after the end of the run."""
        models = self.wait().models
        if not models:
            raise FileNotFoundError(
                f"{self.directory} has no model: {type(self).__name__}.output says what the run did"
            )
        return models.get("actor") or next(reversed(models.values()))

    def report(self, path: "str | os.PathLike[str] | None" = None) -> Path:
        """Write the page of ``realhf report``, by default to ``report.html`` in the run directory; return its path."""
        target = Path(path) if path is not None else self.directory / "report.html"
        done = subprocess.run([*COMMAND, "report", str(self.directory), "--out", str(target)],
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            raise UserError(done.stderr.strip().removeprefix("error: "))
        return target

    def wait_for_checks(self) -> None:
        """Return when the run has been checked and launched, or has ended; raise as ``wait`` does."""
        while self.is_running:
            self._show()
            if (now := _identity(self._marker)) and now != self._before:
                return
            time.sleep(POLL_S)
        if self._process.returncode:
            self.wait()

    def __repr__(self) -> str:
        code = self._process.poll()
        state = "running" if code is None else "done" if code == 0 else f"exit code {code}"
        return f"<Run {self.directory}: {state}, {len(self.metrics)} steps>"

    def _metrics_files(self) -> list[Path]:
        if not self._is_multi_stage:
            return [self._paths.metrics]
        files = self.directory.glob(f"*/{self._paths.metrics.name}")
        return sorted(files, key=lambda path: path.stat().st_ctime_ns)

    def _parsed(self, file: Path, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            yield json.loads(line) | ({"stage": file.parent.name} if self._is_multi_stage else {})

    def _show(self) -> None:
        """Print new output, in the thread of the caller: from another one it would break the caller's own lines."""
        new = self._lines[self._n_shown :]
        self._n_shown += len(new)
        if new and not self._quiet:
            print("".join(new), end="", flush=True)

    def _at_exit(self) -> None:
        """Do not end before the run, or with success after its failure."""
        try:
            self.wait()
        except (Exception, KeyboardInterrupt) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(self._process.returncode or 1)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is replaced; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _read_lines(file: Path, start: int = 0) -> tuple[list[bytes], int]:
    """Return the complete lines after ``start`` bytes, and where they end; all lines if the file was shortened."""
    try:
        with file.open("rb") as opened:
            start = start if start <= os.fstat(opened.fileno()).st_size else 0
            opened.seek(start)
            complete = opened.read().rpartition(b"\n")[0]
    except OSError:
        return [], start
    return complete.splitlines(), start + len(complete) + bool(complete)
