"""The content of a run directory as the page shows it. Damaged and missing files are problems, not errors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from realhf.api.execution_plan import ExecutionPlan
from realhf.apps.prepare.launching import read_run
from realhf.apps.prepare.preflight import plan_report
from realhf.apps.view.report.metrics_file import MetricsFile, file_identity
from realhf.apps.view.report.responses import MAX_TOTAL, Responses, RowCache, read_responses, step_files
from realhf.apps.view.report.status import RunState, RunStatus, read_status
from realhf.apps.view.report.text import clean
from realhf.apps.view.report.trace import measured
from realhf.base.errors import UserError, damage_reported
from realhf.base.paths import RunDir
from realhf.plan.cost.memory import Bytes
from realhf.plan.run_spec import RunSpec
from realhf.plan.search.timeline import Timeline

T = TypeVar("T")
MAX_TEXT = 256 << 10  # bytes of a text file on the page


@dataclass(frozen=True)
class PlanPrediction:
    """Prediction of the current planner for the plan of a run. ``usable`` is the memory of a worker in bytes.

    ``step_error`` is the expected relative error of the step's seconds.
    """

    timeline: Timeline
    memory: dict[int, Bytes]
    usable: float
    step_error: float


class RunReader:
    """Reads a run directory, and again the files that have changed."""

    def __init__(self, root: Path, name: str = "", response_budget: int = MAX_TOTAL) -> None:
        self.paths, self.name, self.response_budget = RunDir(root), name or root.name, response_budget
        self.spec: RunSpec | None = None
        self.prediction: PlanPrediction | None = None
        self.prediction_note = ""
        self.metrics = MetricsFile(self.paths.metrics)
        self.responses = Responses()
        self.measured: tuple[int, Timeline] | None = None
        self.failure = self.config_text = ""
        self.status: RunStatus | None = None
        self._rows: RowCache = {}
        self._problems: dict[str, list[str]] = {}
        self._seen: dict[str, object] = {}

    @property
    def problems(self) -> list[str]:
        """Files that are missing or damaged, and what the page lacks."""
        found = [problem for part in self._problems.values() for problem in part]
        if not self.paths.root.is_dir():
            return [f"{self.paths.root} no longer exists: this page shows what was read from it", *found]
        if n := self.metrics.n_damaged:
            found.append(f"{self.paths.metrics.name}: {n} lines are damaged or out of order, and left out")
        if n := self.metrics.file.n_long:
            found.append(f"{self.paths.metrics.name}: {n} lines are too long, and left out")
        if n := len(self.metrics.omitted_names):
            found.append(f"{self.paths.metrics.name}: at least {n} metrics are left out")
        if not self.metrics.n_steps and not self.metrics.series:
            found.append(f"{self.paths.metrics.name} has no steps yet")
        return found

    @property
    def n_steps(self) -> int | None:
        return self.spec.schedule.n_steps if self.spec else None

    def update(self) -> bool:
        """Read the files that have changed; return True if the page changes."""
        if not self.paths.root.is_dir() and self.status:
            return self._update_status()
        changed = self._if_changed("plan", [self.paths.plan, self.paths.config], self._read_spec)
        changed |= bool(self._attempt("metrics.jsonl", self.metrics.update))
        changed |= self._if_changed("trace", [self.paths.trace], self._read_trace)
        changed |= self._if_changed("failure", [self.paths.failure], self._read_failure)
        steps = self._attempt("generations", partial(step_files, self.paths.samples)) or {}
        changed |= self._if_changed("generations", list(steps.values())[-2:], self._read_responses)
        return self._update_status() or changed

    def _update_status(self) -> bool:
        before = self.status
        reason = partial(read_status, self.paths, self.metrics.n_steps, self.n_steps)
        unknown = RunStatus(RunState.UNKNOWN, "the status cannot be read")
        self.status = self._attempt("status", reason) or before or unknown
        return self.status != before

    def _if_changed(self, name: str, files: list[Path], read: Callable[[], None]) -> bool:
        identity = [(str(path), file_identity(path)) for path in files]
        if name in self._seen and self._seen[name] == identity:
            return False
        self._seen[name] = identity
        self._attempt(name, read)
        return True

    def _attempt(self, name: str, read: Callable[[], T]) -> T | None:
        """Return the result of ``read``; or record its problem, and return None."""
        self._problems.pop(name, None)
        try:
            with damage_reported(self.paths.root / name, "the page lacks it"):
                return read()
        except UserError as error:
            self._problems[name] = error.problems
            return None

    def _read_spec(self) -> None:
        self.spec = self.prediction = None
        self.prediction_note = self.config_text = ""
        self.config_text = read_text(self.paths.config)
        self.spec = read_run(self.paths.root)
        self.metrics.max_logprob_diff = self.spec.config.logprob_diff_warning
        try:
            self.prediction = predict(self.spec)
        except (UserError, ValueError, OSError) as error:
            self.prediction_note = f"No prediction: {error}"

    def _read_trace(self) -> None:
        self.measured = measured(self.spec) if self.spec else None

    def _read_failure(self) -> None:
        self.failure = read_text(self.paths.failure)

    def _read_responses(self) -> None:
        self.responses = read_responses(self.paths.samples, self.response_budget, self._rows)


def predict(run: RunSpec) -> PlanPrediction:
    report = plan_report(run.experiment, run.config)
    placements = {mfc.name: run.plan[mfc.name] for mfc in run.graph.mfcs}
    prediction = report.planner.predict(ExecutionPlan(run.plan.n_workers, placements))
    error = report.relative_error_of(prediction)
    return PlanPrediction(prediction.timeline, prediction.memory, report.machine.hardware.usable, error)


def read_text(path: Path) -> str:
    """Return the first part of a text file, empty if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return clean(file.read(MAX_TEXT).decode("utf-8", "replace"))
