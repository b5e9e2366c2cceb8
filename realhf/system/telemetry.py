"""What a run writes down: metrics, events, trace, generations, TensorBoard, wandb. Shown by a ``View``."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from realhf.api.codec import to_plain
from realhf.api.graph import MFC, Kind
from realhf.api.messages import Call, Done, Ready
from realhf.api.model import ModelConfig
from realhf.plan.flops import forward_flops, generate_flops, train_flops
from realhf.plan.schedule import RowsReady
from realhf.system.run import RunSpec
from realhf.system.sinks import MetricSink

Metrics = dict[str, float]
MOVES = ("Transfer", "Reallocate")
EVALUATION = "evaluation.json"
"""Beside a saved model: means of what held-out rows gave, and over how many values each of them is."""


class View(Protocol):
    """Who shows the run to a person."""

    def ready(self, workers: dict[int, Ready]) -> None: ...

    def step(self, metrics: Metrics) -> None: ...

    def evaluated(self, step: int, metrics: Metrics) -> None: ...

    def saved(self, role: str, path: Path) -> None: ...


class Telemetry:
    """Gathers a step's replies into one line of metrics, and appends to the files of the run directory."""

    logged_keys = ("tokens", "prompt_mask", "rewards", "truncated", "row")

    def __init__(self, run: RunSpec, view: View, sinks: list[MetricSink], first_step: int = 0) -> None:
        self.run, self.view, self.sinks = run, view, sinks
        self.models: dict[str, Path] = {}
        self.last: Metrics = {}
        self.evaluation: dict[str, Any] = {}
        self._steps: dict[int, Metrics] = {}
        self._seconds: dict[int, dict[tuple[str, int], float]] = {}  # by metric and worker
        self._kinds: dict[str, tuple[str, str]] = {}  # of a span's name: how it is written, and its metric, if any
        self._sums: dict[int, dict[str, tuple[float, float]]] = {}
        self._n_written = first_step
        self._step_began = time.monotonic()
        self._events = run.paths.events.open("a")
        self._trace = run.paths.trace.open("a" if first_step else "w")
        if not first_step:
            self._trace.write("[\n")

    def ready(self, workers: dict[int, Ready]) -> None:
        self._step_began = time.monotonic()
        self.view.ready(workers)

    def event(self, event: RowsReady) -> None:
        self._events.write(json.dumps(to_plain(event)) + "\n")

    def reply(self, step: int, done: Done) -> None:
        """Note what one worker spent its time on."""
        kept = step >= self._n_written  # saving comes after its line
        metrics, seconds = (self._steps.setdefault(step, {}), self._seconds.setdefault(step, {})) if kept else ({}, {})
        lines, where, tail = [], f'"ph": "X", "pid": {done.rank}, "tid": 0', f', "args": {{"step": {step + 1}}}}},\n'
        for name, start, duration in done.spans:
            quoted, kind = self._kinds.get(name) or self._kinds.setdefault(name, (json.dumps(name), _kind(name)))
            lines.append(f'{{"name": {quoted}, {where}, "ts": {start}, "dur": {duration}')
            if kind:
                slot = kind, done.rank
                seconds[slot] = seconds.get(slot, 0.0) + duration / 1e6
        if lines:
            self._trace.write(tail.join((*lines, "")))
        for name, size in zip(("memory/worker_peak_gb", "memory/worker_gb"), done.memory, strict=True):
            if size / 1e9 > metrics.get(name, 0.0):
                metrics[name] = size / 1e9

    def call_done(self, call: Call, replies: list[Done]) -> None:
        """Add a call's statistics, tokens and operations to its step."""
        sums = self._sums.setdefault(call.step, {})
        for reply in replies:
            for name, (value, weight) in reply.stats.items():
                before = sums.get(f"{call.mfc}/{name}", (0.0, 0.0))
                sums[f"{call.mfc}/{name}"] = (before[0] + value, before[1] + weight)
        mfc = self.run.graph[call.mfc]
        if mfc.role is None:
            return
        config = self.run.models[mfc.role]
        if mfc.kind is Kind.GENERATE:
            n_drawn, flops = generated(mfc, config, call, replies)
            self._add(call.step, "tokens/generated", n_drawn)
        else:
            lengths = call.inputs.columns[mfc.graph_key("tokens")].lengths
            flops = train_flops(config, lengths) if mfc.is_train else forward_flops(config, lengths)
            if mfc.is_train:
                trained = self._steps.setdefault(call.step, {})
                trained["tokens/trained"] = max(trained.get("tokens/trained", 0), sum(lengths))
        self._add(call.step, "flops/model", flops)

    def _add(self, step: int, name: str, value: float) -> None:
        metrics = self._steps.setdefault(step, {})
        metrics[name] = metrics.get(name, 0) + value

    def step_done(self, step: int, versions: dict[str, int]) -> None:
        """Write the step's line and show it."""
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        self._n_written = step + 1
        metrics: Metrics = {"step": step + 1, "time/step_s": seconds, **self._steps.pop(step, {})}
        for (name, _), value in self._seconds.pop(step, {}).items():  # a call takes as long as its slowest worker
            metrics[name] = max(metrics.get(name, 0.0), value)
        tokens = metrics.get("tokens/trained") or metrics.get("tokens/generated", 0)
        metrics["tokens/per_s"] = tokens / seconds
        metrics["flops/model_per_s"] = metrics.pop("flops/model", 0) / seconds
        for name, (value, weight) in sorted(self._sums.pop(step, {}).items()):
            metrics[name] = value / weight if weight else 0.0
        metrics.update(_headlines(metrics))
        if expected := self.run.expected:
            metrics["predicted/step_s"] = expected.step_s
            metrics |= {f"predicted/{mfc}_s": calls for mfc, calls in expected.calls.items()}
        self.last = metrics
        with self.run.paths.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        self._events.flush()
        self._trace.flush()
        for sink in self.sinks:
            sink.write(metrics)
        self.view.step(metrics)

    def generations(self, step: int, parts: list[dict[str, Any]], limit: int) -> None:
        """Merge what several workers know of the same rows, and write one line per row."""
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for part in parts:
            rows.setdefault((part["prompt_id"], part["sample"]), {}).update(part)
        path = self.run.paths.generations(step)
        path.parent.mkdir(exist_ok=True)
        shown = [row for at, row in sorted(rows.items()) if at[1] >= 0]
        for row in shown:
            row.setdefault("fields", rows.get((row["prompt_id"], -1), {}).get("fields"))
        shown = [{key: row[key] for key in sorted(row, key=_place)} for row in shown]
        with path.open("w") as file:
            file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in (shown if limit < 0 else shown[:limit]))

    def evaluated(self, step: int) -> None:
        """Write what held-out rows gave after ``step`` steps, and show it; its time is not part of the next step."""
        sums: dict[str, tuple[float, float]] = {}
        length = self.run.trial_length
        for part in range(length.first_step, length.n_steps):
            self._steps.pop(part, None)
            self._seconds.pop(part, None)
            for name, (value, weight) in self._sums.pop(part, {}).items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + value, before[1] + weight)
        seconds, self._step_began = time.monotonic() - self._step_began, time.monotonic()
        metrics = {name: value / weight for name, (value, weight) in sorted(sums.items()) if weight}
        counts = {name: sums[name][1] for name in metrics}
        self.evaluation = {"step": step, "seconds": seconds, "metrics": metrics, "counts": counts}
        with self.run.paths.evaluation.open("a") as file:
            file.write(json.dumps(self.evaluation) + "\n")
        for sink in self.sinks:
            sink.write({"step": step, **metrics})
        self.view.evaluated(step, metrics)

    def saved(self, role: str, path: Path) -> None:
        """Note where a model is; what held-out rows gave at the same step is put beside its weights."""
        self.models[role] = path
        if self.evaluation and path == self.run.paths.model(role, self.evaluation["step"]):
            (path / EVALUATION).write_text(json.dumps(self.evaluation, indent=1) + "\n")
        self.view.saved(role, path)

    def close(self) -> None:
        self._trace.write('{"name": "end", "ph": "i", "pid": 0, "tid": 0, "ts": 0, "s": "g"}\n]\n')
        self._trace.close()
        self._events.close()
        for sink in self.sinks:
            sink.close()


def _kind(span: str) -> str:
    """Return the metric that a span's time belongs to; empty where it has none."""
    mfc, _, instruction = span.partition("/")
    return f"time/{mfc}_s" if instruction == "Compute" else "time/move_s" if instruction in MOVES else ""


def _headlines(metrics: Metrics) -> Metrics:
    """The few names that every experiment with them shares."""
    sources = {
        "reward/mean": ("rew_inf/reward",),
        "reward/accuracy": ("rew_inf/accuracy",),
        "kl/ref": ("actor_train/kl",),
        "length/answer": ("actor_gen/answer_length", "gen/answer_length"),
        "loss": ("sft_train/loss", "rw_train/loss", "actor_train/actor_loss", "actor_train/loss"),
    }
    return {name: metrics[s] for name, options in sources.items() for s in options if s in metrics}


def _place(key: str) -> tuple[int, str]:
    """Where a key of a written row stands, whichever worker told it first."""
    first = ("prompt_id", "sample", "prompt", "answer", "answer_tokens")
    return (first.index(key), key) if key in first else (len(first) + (key == "fields"), key)


def generated(mfc: MFC, config: ModelConfig, call: Call, replies: Sequence[Done]) -> tuple[int, int]:
    """Return how many tokens a generating call drew, and its operations."""
    columns = [reply.outputs.columns for reply in replies if reply.outputs]
    if (key := mfc.graph_key("rollouts")) in mfc.outputs:  # continuations of rows, drawn from several places in each
        read = call.inputs.columns[mfc.graph_key("tokens")].lengths
        drawn = [n for some in columns for n in some[key].lengths]
        return sum(drawn), forward_flops(config, read, head_tokens=0) + forward_flops(config, drawn)
    prompts = call.inputs.columns[mfc.graph_key("prompts")].lengths
    rows = [n for some in columns for n in some[mfc.graph_key("tokens")].lengths]
    n_drawn = sum(rows) - len(rows) // max(1, len(prompts)) * sum(prompts)
    return n_drawn, generate_flops(config, prompts, rows)
