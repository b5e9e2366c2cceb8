"""Writes metrics, events, traces and generations of a run, and shows its progress in a ``ProgressView``."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from realhf.api.graph import Kind
from realhf.api.messages import Done, PrepareCall, Ready, Stats
from realhf.arch.flops import forward_flops, train_flops
from realhf.plan.compile.schedule import RowsReady
from realhf.plan.run_spec import RunSpec
from realhf.system.metrics.decode_stats import decode_bytes_read, generated_tokens
from realhf.system.metrics.sinks import MetricSink
from realhf.system.metrics.worker_metrics import StepMetrics

Metrics = dict[str, float]
TRACE_BUFFER = 1 << 20  # bytes; flushed after every step
EVALUATION = "evaluation.json"
"""File next to a saved model: means of the evaluation on held-out rows, and the number of values of each."""

METRIC_ALIASES = {
    "reward/mean": ("rew_inf/reward",),
    "reward/accuracy": ("rew_inf/accuracy",),
    "kl/ref": ("actor_train/kl",),
    "length/response": ("actor_gen/response_length", "gen/response_length"),
    "loss": ("sft_train/loss", "rw_train/loss", "actor_train/actor_loss", "actor_train/loss"),
}
"""Names that all experiments share, and the metrics that they stand for."""
EVAL_ALIASES = {
    "eval/accuracy": ("eval_rew/accuracy", "rw_eval/accuracy", "actor_eval/accuracy"),
    "eval/reward": ("eval_rew/reward",),
    "eval/loss": ("sft_eval/loss", "rw_eval/loss", "actor_eval/loss"),
    "eval/response_length": ("eval_gen/response_length",),
    "eval/truncated": ("eval_gen/truncated",),
}
GENERATION_COLUMNS = ("prompt_id", "sample", "prompt", "response", "answer_tokens")


class ProgressView(Protocol):
    """Shows the progress of a run to the user."""

    def ready(self, workers: dict[int, Ready]) -> None: ...

    def step(self, metrics: Metrics) -> None: ...

    def evaluated(self, step: int, metrics: Metrics) -> None: ...

    def saved(self, role: str, path: Path) -> None: ...

    def kept(self, metric: str, value: float, path: Path) -> None: ...


class Telemetry:
    """Turns the replies of a step into one line of metrics, and appends to the files of the run directory."""

    logged_keys = ("tokens", "prompt_mask", "rewards", "truncated", "row")

    def __init__(self, run: RunSpec, view: ProgressView, sinks: list[MetricSink], first_step: int = 0) -> None:
        self.run, self.view, self.sinks = run, view, sinks
        self.models: dict[str, Path] = {}
        self.best: Path | None = None
        self.last: Metrics = {}
        self.evaluation: dict[str, Any] = {}
        self._steps: dict[int, Metrics] = {}
        self._workers: dict[int, StepMetrics] = {}
        self._sums: dict[int, Stats] = {}
        self._work: dict[int, dict[str, tuple[int, int]]] = {}  # by step and MFC: floating-point operations, bytes read
        self._n_written = first_step
        self._step_began = time.monotonic()
        self._events = run.paths.events.open("ab")
        self._trace = run.paths.trace.open("ab" if first_step else "wb", TRACE_BUFFER)
        if not first_step:
            self._trace.write(b"[\n")

    def ready(self, workers: dict[int, Ready]) -> None:
        self._step_began = time.monotonic()
        self.view.ready(workers)

    def event(self, event: RowsReady) -> None:
        self._events.write(msgspec.json.encode(event) + b"\n")

    def reply(self, step: int, mfc: str, done: Done) -> None:
        """Add the trace and the worker metrics of a reply; ``mfc`` is empty if the request is not of an MFC."""
        self._trace.write(done.trace)
        if step < self._n_written:  # a save completes after the line of its step
            return
        if (workers := self._workers.get(step)) is None:
            workers = self._workers[step] = StepMetrics(self.run.plan.n_workers)
        workers.add(mfc, done)

    def call_done(self, call: PrepareCall, replies: list[Done]) -> None:
        """Add a call's statistics, tokens and floating-point operations to its step."""
        stats = sum_stats([reply.stats for reply in replies if reply.stats])
        named = {f"{call.mfc}/{name}": value for name, value in stats.items()}
        self._sums[call.step] = sum_stats([self._sums.get(call.step, {}), named])
        mfc = self.run.graph[call.mfc]
        if mfc.resamples:
            used = {row.prompt for reply in replies if reply.outputs for row in reply.outputs.ids}
            self._add(call.step, "prompts/sampled", len({row.prompt for row in call.inputs.ids}))
            self._add(call.step, "prompts/used", len(used))
        if mfc.role is None:
            return
        config, nbytes = self.run.models[mfc.role], 0
        if mfc.kind is Kind.GENERATE:
            n_tokens, flops = generated_tokens(mfc, config, call, replies)
            if self.run.expected and self.run.expected.peak_bandwidth:
                nbytes = sum(
                    decode_bytes_read(self.run, mfc, config, call, reply.outputs) for reply in replies if reply.outputs
                )
            self._add(call.step, "tokens/generated", n_tokens)
        else:
            lengths = call.inputs.columns[mfc.graph_key("tokens")].lengths
            flops = train_flops(config, lengths) if mfc.is_train else forward_flops(config, lengths)
            if mfc.is_train:
                trained = self._steps.setdefault(call.step, {})
                trained["tokens/trained"] = max(trained.get("tokens/trained", 0), sum(lengths))
        self._add(call.step, "flops/model", flops)
        work = self._work.setdefault(call.step, {})
        before = work.get(call.mfc, (0, 0))
        work[call.mfc] = (before[0] + flops, before[1] + nbytes)

    def _add(self, step: int, name: str, value: float) -> None:
        metrics = self._steps.setdefault(step, {})
        metrics[name] = metrics.get(name, 0) + value

    def step_done(self, step: int, versions: dict[str, int], is_evaluated: bool = False) -> None:
        """Show the step and write its line; ``evaluated`` writes it if an evaluation follows."""
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        self._n_written = step + 1
        metrics: Metrics = {"step": step + 1, "time/step_s": seconds, **self._steps.pop(step, {})}
        if (workers := self._workers.pop(step, None)) is not None:
            metrics |= workers.metrics()
        tokens = metrics.get("tokens/trained") or metrics.get("tokens/generated", 0)
        metrics["tokens/per_s"] = tokens / seconds
        metrics["flops/model_per_s"] = metrics.pop("flops/model", 0) / seconds
        metrics |= self._utilisation(self._work.pop(step, {}), metrics)
        for name, (value, weight) in sorted(self._sums.pop(step, {}).items()):
            metrics[name] = value / weight if weight else 0.0
        metrics |= _aliased(metrics, METRIC_ALIASES)
        if expected := self.run.expected:
            metrics["predicted/step_s"] = expected.step_s
            metrics |= {f"predicted/{mfc}_s": call_s for mfc, call_s in expected.calls.items()}
        self.last = metrics
        if not is_evaluated:
            self._write(metrics)
        self.view.step(metrics)

    def _utilisation(self, work: dict[str, tuple[int, int]], metrics: Metrics) -> Metrics:
        """Return model FLOPS and bandwidth utilisation of the calls, relative to the peaks of the data sheet."""
        shares: Metrics = {}
        if not (expected := self.run.expected) or not expected.peak_flops:
            return shares
        for mfc, (flops, nbytes) in work.items():
            device_seconds = len(self.run.plan[mfc].layout.mesh.ranks) * metrics.get(f"time/{mfc}_s", 0.0)
            if device_seconds:
                shares[f"mfu/{mfc}"] = flops / device_seconds / expected.peak_flops
            if device_seconds and nbytes and expected.peak_bandwidth:
                shares[f"mbu/{mfc}"] = nbytes / device_seconds / expected.peak_bandwidth
        return shares

    def _write(self, metrics: Metrics) -> None:
        with self.run.paths.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        self._events.flush()
        self._trace.flush()
        for sink in self.sinks:
            sink.write(metrics)

    def generations(self, step: int, parts: list[dict[str, Any]], limit: int) -> None:
        """Merge the workers' parts of rows, and write one line per row."""
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for part in parts:
            rows.setdefault((part["prompt_id"], part["sample"]), {}).update(part)
        path = self.run.paths.generations(step)
        path.parent.mkdir(exist_ok=True)
        samples = [row for (_, sample), row in sorted(rows.items()) if sample >= 0]
        with path.open("w") as file:
            for row in samples if limit < 0 else samples[:limit]:
                row.setdefault("fields", rows.get((row["prompt_id"], -1), {}).get("fields"))
                ordered = {key: row[key] for key in sorted(row, key=_column_order)}
                file.write(json.dumps(ordered, ensure_ascii=False) + "\n")

    def evaluated(self, step: int) -> Metrics:
        """Write, show and return the metrics of the evaluation after ``step`` steps; they are part of the step's line.

        Its time is not part of the next step. Before the first step, the line has the evaluation only.
        """
        schedule = self.run.eval_schedule
        parts = range(schedule.first_step, schedule.n_steps)
        sums = sum_stats([self._sums.pop(part, {}) for part in parts])
        for part in parts:
            for by_step in (self._steps, self._workers, self._work):
                by_step.pop(part, None)
        seconds, self._step_began = time.monotonic() - self._step_began, time.monotonic()
        means = {name: value / weight for name, (value, weight) in sorted(sums.items()) if weight}
        metrics = {**_aliased(means, EVAL_ALIASES), "eval/prompts": float(self.run.n_held_out), **means}
        counts = {name: sums[name][1] for name in means}
        self.evaluation = {"step": step, "seconds": seconds, "metrics": metrics, "counts": counts}
        with self.run.paths.evaluation.open("a") as file:
            file.write(json.dumps(self.evaluation) + "\n")
        self._write({**(self.last or {"step": step}), "time/eval_s": seconds, **metrics})
        self.view.evaluated(step, metrics)
        return metrics

    def saved(self, role: str, path: Path) -> None:
        """Record the path of a model, and save the evaluation of the same step with it."""
        self.models[role] = path
        if self.evaluation and path == self.run.paths.model(role, self.evaluation["step"]):
            self.describe(path, self.evaluation)
        self.view.saved(role, path)

    @staticmethod
    def describe(path: Path, evaluation: dict[str, Any]) -> None:
        """Save an evaluation with a model."""
        (path / EVALUATION).write_text(json.dumps(evaluation, indent=1) + "\n")

    def kept(self, metric: str, value: float, path: Path) -> None:
        """Record the path of the best models so far."""
        self.best = path
        self.view.kept(metric, value, path)

    def close(self) -> None:
        self._trace.write(b'{"name": "end", "ph": "i", "pid": 0, "tid": 0, "ts": 0, "s": "g"}\n]\n')
        self._trace.close()
        self._events.close()
        for sink in self.sinks:
            sink.close()


def _aliased(metrics: Metrics, aliases: dict[str, tuple[str, ...]]) -> Metrics:
    return {alias: metrics[name] for alias, names in aliases.items() for name in names if name in metrics}


def _column_order(key: str) -> tuple[int, str]:
    """Return a sort key: the fixed columns first, ``fields`` last."""
    if key in GENERATION_COLUMNS:
        return GENERATION_COLUMNS.index(key), key
    return len(GENERATION_COLUMNS) + (key == "fields"), key


def sum_stats(stats: Sequence[Stats]) -> Stats:
    """Return sums and counts by name."""
    totals: Stats = {}
    for part in stats:
        for name, (value, weight) in part.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value, before[1] + weight)
    return totals
