"""Console output of a run: banner, plan, one line per step, summary. No progress bar without a terminal."""

import sys
import time
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from realhf.api.messages import Ready
from realhf.base.errors import UserError
from realhf.base.version import __version__
from realhf.plan.run_spec import RunSpec

HEADER = (
    f"{'step':>6} {'reward':>8} {'loss':>8} {'kl':>8} {'len':>6} {'tok/s':>8} {'time':>7} {'(pred)':>9}  share of calls"
)
HEADER_LIMITS = HEADER.replace(" (pred)", "(limit)")  # without a profile


class Console:
    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self.out = open_console()
        self.start = time.monotonic()
        self.progress: Progress | None = None

    def banner(self) -> None:
        run, config = self.run, self.run.config
        self.out.print(f"[bold]realhf {__version__}[/]  {run.experiment}  {run.device} x {run.plan.n_workers}  "
                       f"seed {config.seed}")  # fmt: skip
        self.out.print(f"run     {run.paths.root}")
        held_out = f", {run.n_held_out} held out" if run.n_held_out else ""
        self.out.print(f"data    {config.portable(config.dataset.path)}: {run.n_rows} rows{held_out}, "
                       f"{run.schedule.batch_size} per step, {run.schedule.n_steps} steps")  # fmt: skip
        if expected := run.expected:
            label, hint = "predicted", ""
            if not expected.is_measured:
                label, hint = "limits ", "; realhf profile measures this machine"
            self.out.print(f"{label} {expected.step_s:.3g} s per step, peak memory over workers "
                           f"{expected.peak_bytes / 1e9:.2f} GB, from {expected.source}{hint}")  # fmt: skip
        self.out.print(plan_table(run))

    def ready(self, workers: dict[int, Ready]) -> None:
        slowest = max(w.info.get("seconds", 0.0) for w in workers.values())
        header = HEADER_LIMITS if self.run.expected and not self.run.expected.is_measured else HEADER
        self.out.print(f"workers {len(workers)} ready after {time.monotonic() - self.start:.1f} s "
                       f"(models and data {slowest:.1f} s)\n{header}")  # fmt: skip
        if self.out.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.progress = Progress(*columns, console=self.out, transient=True)
            self.progress.start()
            self.progress.add_task("steps", total=self.run.schedule.n_steps)

    def step(self, metrics: dict[str, float]) -> None:
        self.out.print(step_line(metrics))
        limit = self.run.config.logprob_diff_warning
        for name, value in metrics.items():
            if name.endswith("/logprob_diff") and 0 < limit < value:
                self.out.print(f"warning {name}: trainer and generator log-probs differ by {value:.3g} nats per token "
                               f"(limit {limit:g}); ppo.recompute_logprobs=True corrects for it")  # fmt: skip
        if self.progress is not None:
            self.progress.advance(self.progress.task_ids[0])
        sys.stdout.flush()

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        calls: dict[str, list[str]] = {}
        for name, value in metrics.items():
            mfc, _, stat = name.partition("/")
            calls.setdefault(mfc, []).append(f"{stat} {value:.4f}")
        for mfc, stats in calls.items():
            self.out.print(f"eval    step {step}: {mfc}  {'  '.join(stats)}")
        sys.stdout.flush()

    def saved(self, role: str, path: Path) -> None:
        self.out.print(f"saved   {role} -> {path}")

    def kept(self, metric: str, value: float, path: Path) -> None:
        self.out.print(f"best    {metric} {value:.4f} -> {path}")

    def failed(self, failure: str) -> None:
        self.out.print(f"warning a response has no reward: {failure}", markup=False)
        sys.stdout.flush()

    def summary(self, models: dict[str, Path], best: Path | None = None) -> None:
        self.close()
        self.out.print(f"done    {self.run.schedule.n_steps} steps in {time.monotonic() - self.start:.1f} s")
        for role, path in models.items():
            self.out.print(f"model   {role}: {path}")
        if best is not None:
            self.out.print(f"best    {best}")
        self.out.print(f"metrics {self.run.paths.metrics}   trace {self.run.paths.trace}")

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


class _PipeConsole(RichConsole):
    def on_broken_pipe(self) -> None:
        """Raise the error, which ends the run with its own exit code; rich would exit with 1."""
        raise


def open_console() -> RichConsole:
    """Return a console that wraps lines only on a terminal."""
    console = _PipeConsole(highlight=False, soft_wrap=True)
    return console if console.is_terminal else _PipeConsole(highlight=False, soft_wrap=True, width=200)


def write_out(path: Path, content: str) -> None:
    """Write the file of ``--out``, and print its path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from error
    open_console().print(f"wrote {path}", markup=False)


def plan_table(run: RunSpec) -> Table:
    table = Table(box=None, pad_edge=False)
    for header in ("call", "kind", "role", "layout", "batch", "instructions", "outputs"):
        table.add_column(header, overflow="fold")
    for mfc in run.graph.topological:
        steps = " ".join(type(step).__name__ for step in run.program[mfc.name])
        table.add_row(mfc.name, mfc.kind.value, mfc.role or "-", str(run.plan[mfc.name]), str(mfc.batch_size), steps,
                      " ".join(mfc.outputs))  # fmt: skip
    return table


def step_line(metrics: dict[str, float]) -> str:
    def cell(name: str, width: int, digits: int) -> str:
        return f"{metrics[name]:>{width}.{digits}f}" if name in metrics else " " * (width - 1) + "-"

    seconds = {k[5:-2]: v for k, v in metrics.items() if k.startswith("time/") and k.endswith("_s")}
    step_s = seconds.pop("step")
    expected = f"({metrics['predicted/step_s']:.2f}s)" if "predicted/step_s" in metrics else ""
    longest = sorted(((v, call) for call, v in seconds.items()), reverse=True)
    parts = " ".join(f"{call} {100 * v / step_s:.0f}%" for v, call in longest if v / step_s >= 0.005)
    return (
        f"{int(metrics['step']):>6} {cell('reward/mean', 8, 3)} {cell('loss', 8, 4)} {cell('kl/ref', 8, 4)} "
        f"{cell('length/response', 6, 1)} {cell('tokens/per_s', 8, 0)} {step_s:>6.2f}s {expected:>9}  {parts}"
    )
