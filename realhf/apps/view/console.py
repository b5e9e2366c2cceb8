"""Console output of a run: banner, plan, one line per step, summary. No progress bar without a terminal."""

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from statistics import median

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from realhf.api.messages import Ready
from realhf.apps.view.error_text import agreement_text, expected_step_text, with_error
from realhf.apps.view.step_warnings import step_warnings
from realhf.base.errors import UserError
from realhf.base.version import __version__
from realhf.plan.run_spec import ExpectedPerformance, RunSpec
from realhf.system.metrics.telemetry import EVAL_ALIASES


@dataclass(frozen=True)
class ConsoleColumn:
    """A column of the step lines: it shows the first of its metrics that the step has."""

    title: str
    metrics: tuple[str, ...]
    width: int
    digits: int
    form: str = "{}"

    def cell(self, metrics: dict[str, float]) -> str:
        value = next((metrics[name] for name in self.metrics if name in metrics), None)
        if value is None:
            return "-".rjust(self.width)
        rounded = round(value, self.digits) + 0.0  # no negative zero
        return self.form.format(f"{rounded:.{self.digits}f}").rjust(self.width)


COLUMNS = (
    ConsoleColumn("step", ("step",), 6, 0),
    ConsoleColumn("reward", ("reward/mean",), 8, 3),
    ConsoleColumn("acc", ("reward/accuracy", "rw_train/accuracy", "actor_train/accuracy"), 6, 3),
    ConsoleColumn("prompts", ("prompts/active",), 7, 0),
    ConsoleColumn("loss", ("loss",), 8, 4),
    ConsoleColumn("kl", ("kl/ref",), 8, 4),
    ConsoleColumn("len", ("length/response",), 6, 1),
    ConsoleColumn("tok/s", ("tokens/per_s",), 8, 0),
    ConsoleColumn("time", ("time/step_s",), 7, 2, "{}s"),
    ConsoleColumn("(pred)", ("predicted/step_s",), 9, 2, "({}s)"),
)
PREDICTED = COLUMNS[-1]
N_EARLIER = 20  # steps with which a step is compared
MIN_SHARE = 0.005  # smaller ones are not shown


class Console:
    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self.out = open_console()
        self.start = time.monotonic()
        self.progress: Progress | None = None
        self.columns: tuple[ConsoleColumn, ...] = ()
        self.known_columns = (*COLUMNS[:-1], predicted_column(run.expected))
        self.step_seconds: list[float] = []
        self.earlier: deque[dict[str, float]] = deque(maxlen=N_EARLIER)
        self.warned: set[str] = set()

    def banner(self) -> None:
        run, config = self.run, self.run.config
        self.out.print(f"[bold]realhf {__version__}[/]  {run.experiment}  {run.device} x {run.plan.n_workers}  "
                       f"seed {config.seed}")  # fmt: skip
        self.out.print(f"run     {run.paths.root}")
        held_out = f", {run.n_held_out} held out" if run.n_held_out else ""
        self.out.print(f"data    {config.data_text}: {run.n_rows} rows{held_out}, "
                       f"{run.schedule.batch_size} per step, {run.schedule.n_steps} steps")  # fmt: skip
        if expected := run.expected:
            label, hint = ("", "") if expected.is_measured else ("limits  ", "; realhf profile measures this machine")
            peak = with_error(f"{expected.peak_bytes / 1e9:.2f} GB", expected.memory_error)
            self.out.print(f"{label}{expected_step_text(expected)} per step, peak memory over workers {peak}, "
                           f"from {expected.source}{hint}")  # fmt: skip
            if expected.checkpoints:
                self.out.print(f"ckpt    {expected.checkpoints}")
        self.out.print(plan_table(run))

    def ready(self, workers: dict[int, Ready]) -> None:
        slowest = max(w.info.get("seconds", 0.0) for w in workers.values())
        self.out.print(f"workers {len(workers)} ready after {time.monotonic() - self.start:.1f} s "
                       f"(models and data {slowest:.1f} s)")  # fmt: skip
        if self.out.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.progress = Progress(*columns, console=self.out, transient=True)
            self.progress.start()
            self.progress.add_task("steps", total=self.run.schedule.n_steps)

    def step(self, metrics: dict[str, float]) -> None:
        known = self.known_columns
        columns = tuple(c for c in known if c in self.columns or any(name in metrics for name in c.metrics))
        if columns != self.columns:  # at the first step
            self.columns = columns
            self.out.print(" ".join(c.title.rjust(c.width) for c in columns) + "  share of worker time")
        self.out.print(step_line(metrics, columns))
        warnings = step_warnings(metrics, self.run.config.logprob_diff_warning, self.earlier)
        for kind in warnings.keys() - self.warned:  # not again while it lasts
            self.out.print(f"warning {warnings[kind]}", markup=False)
        self.warned = set(warnings)
        self.earlier.append(metrics)
        self.step_seconds.append(metrics["time/step_s"])
        if self.progress is not None:
            self.progress.advance(self.progress.task_ids[0])
        sys.stdout.flush()

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Show each result once: under its common name if it has one, else under its call."""
        common = {name for alias in metrics for name in EVAL_ALIASES.get(alias, ())}
        calls: dict[str, list[str]] = {}
        for name, value in metrics.items():
            mfc, _, stat = name.partition("/")
            if name not in common and not stat.endswith("_sq"):
                calls.setdefault(mfc, []).append(f"{stat} {value:.4f}")
        for mfc, stats in calls.items():
            call = "" if mfc == "eval" else f"{mfc}  "
            self.out.print(f"eval    step {step}: {call}{'  '.join(stats)}")
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
        if self.step_seconds and (expected := self.run.expected):
            typical = median(self.step_seconds[1:] or self.step_seconds)  # the first step includes warm-up
            self.out.print(f"step    {agreement_text(typical, expected)}")
        for role, path in models.items():
            self.out.print(f"model   {role}: {path}")
        if best is not None:
            self.out.print(f"best    {best}")
        self.out.print(f"metrics {self.run.paths.metrics}   trace {self.run.paths.trace}")
        self.out.print(f"report  realhf report {quote(str(self.run.paths.root))}")
        final = (best / role if best else path for role, path in models.items())
        for (role, _), path in zip(models.items(), final, strict=True):
            if usage := self._usage(role, quote(str(path))):
                self.out.print(f"use     {usage}")

    def _usage(self, role: str, path: str) -> str:
        """Return how to use a trained model; empty for a critic, which is of no use without its actor."""
        spec, is_scalar = self.run.roles[role].spec, self.run.roles[role].scalar_head
        if is_scalar and role != "model":
            return ""
        if spec.lora.rank and not spec.lora.merge_on_save:
            if spec.init_from_scratch:
                return f"none: the random base of these adapters is not saved; set {role}.lora.merge_on_save=True"
            if is_scalar:
                options = f"rew.lora.rank={spec.lora.rank} rew.lora.alpha={spec.lora.alpha:g}"
                return f"realhf quickstart ppo rew.path={spec.path} rew.lora.init_from={path} {options} ..."
            served = f"vllm serve {spec.path} --enable-lora --lora-modules {role}={path}"
            return f"{served}, or in peft PeftModel.from_pretrained(model, {path!r})"
        if is_scalar:
            return f"realhf quickstart ppo rew.path={path} ..."
        return f"vllm serve {path}, or in transformers AutoModelForCausalLM.from_pretrained({path!r})"

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def predicted_column(expected: ExpectedPerformance | None) -> ConsoleColumn:
    """Return the column of predicted seconds, with their expected error."""
    form = f"({with_error('{}s', expected.step_error if expected else 0.0)})"
    return replace(PREDICTED, form=form, width=PREDICTED.width + len(form) - len(PREDICTED.form))


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


def step_line(metrics: dict[str, float], columns: Sequence[ConsoleColumn] = COLUMNS) -> str:
    shares = {k[5:-6]: v for k, v in metrics.items() if k.startswith("time/") and k.endswith("_share")}
    shares |= {"idle": 1 - sum(shares.values())} if shares else {}
    longest = sorted(shares.items(), key=lambda part: -part[1])
    parts = " ".join(f"{call} {share:.0%}" for call, share in longest if share >= MIN_SHARE)
    return f"{' '.join(column.cell(metrics) for column in columns)}  {parts}".rstrip()
