"""What a run writes down: metrics, events, trace, generations, TensorBoard, wandb. Shown by a ``View``."""

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from realhf.api.graph import Kind
from realhf.api.messages import Done, PrepareCall, Ready, Stats
from realhf.arch.flops import forward_flops, train_flops
from realhf.plan.compile.schedule import RowsReady
from realhf.plan.run_spec import RunSpec
from realhf.system.metrics.decode_stats import decode_bytes_read, generated
from realhf.system.metrics.sinks import MetricSink

Metrics = dict[str, float]
TRACE_BUFFER = 1 << 20  # bytes; what a step leaves there goes to the disk with its line
MEMORY = ("memory/worker_peak_gb", "memory/worker_gb")
EVALUATION = "evaluation.json"
"""Beside a saved model: means of what held-out rows gave, and over how many values each of them is."""

METRIC_ALIASES = {
    "reward/mean": ("rew_inf/reward",),
    "reward/accuracy": ("rew_inf/accuracy",),
    "kl/ref": ("actor_train/kl",),
    "length/response": ("actor_gen/response_length", "gen/response_length"),
    "loss": ("sft_train/loss", "rw_train/loss", "actor_train/actor_loss", "actor_train/loss"),
}
"""The few names that every experiment with them shares, and what they are of."""
EVAL_ALIASES = {
    "eval/accuracy": ("eval_rew/accuracy", "rw_eval/accuracy", "actor_eval/accuracy"),
    "eval/reward": ("eval_rew/reward",),
    "eval/loss": ("sft_eval/loss", "rw_eval/loss", "actor_eval/loss"),
    "eval/response_length": ("eval_gen/response_length",),
    "eval/truncated": ("eval_gen/truncated",),
}
"""The same for held-out rows."""


class ProgressView(Protocol):
    """Who shows the run to a person."""

    def ready(self, workers: dict[int, Ready]) -> None: ...

    def step(self, metrics: Metrics) -> None: ...

    def evaluated(self, step: int, metrics: Metrics) -> None: ...

    def saved(self, role: str, path: Path) -> None: ...

    def kept(self, metric: str, value: float, path: Path) -> None: ...


@dataclass(slots=True)
class StepTimings:
    """What the workers spent on a step: microseconds of each of them, by MFC where it computed; bytes of the largest.

    Made once a step, filled in by every reply.
    """

    moved: "array[int]"
    computed: "dict[str, array[int]]" = field(default_factory=dict)
    peak: int = -1
    present: int = -1

    def metrics(self) -> Metrics:
        """Return seconds and gigabytes; a call takes as long as its slowest worker."""
        times = {f"time/{mfc}_s": max(took) / 1e6 for mfc, took in self.computed.items()}
        moved = {"time/move_s": max(self.moved) / 1e6} if any(self.moved) else {}
        return times | moved | dict(zip(MEMORY, (self.peak / 1e9, self.present / 1e9), strict=True))


class Telemetry:
    """Gathers a step's replies into one line of metrics, and appends to the files of the run directory."""

    logged_keys = ("tokens", "prompt_mask", "rewards", "truncated", "row")

    def __init__(self, run: RunSpec, view: ProgressView, sinks: list[MetricSink], first_step: int = 0) -> None:
        self.run, self.view, self.sinks = run, view, sinks
        self.models: dict[str, Path] = {}
        self.best: Path | None = None
        self.last: Metrics = {}
        self.evaluation: dict[str, Any] = {}
        self._steps: dict[int, Metrics] = {}
        self._spent: dict[int, StepTimings] = {}
        self._sums: dict[int, dict[str, tuple[float, float]]] = {}
        self._work: dict[int, dict[str, tuple[int, int]]] = {}  # operations of a step's calls, bytes that they read
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
        """File what a worker spent its time on when it did its part of a request, of an MFC unless that is empty."""
        self._trace.write(done.trace)
        if step < self._n_written:  # saving comes after its line
            return
        if (spent := self._spent.get(step)) is None:
            spent = self._spent[step] = StepTimings(self._of_all_workers())
        if done.moved:
            spent.moved[done.rank] += done.moved
        if done.computed:
            if (computed := spent.computed.get(mfc)) is None:
                computed = spent.computed[mfc] = self._of_all_workers()
            computed[done.rank] += done.computed
        peak, present = done.memory
        if peak > spent.peak:
            spent.peak = peak
        if present > spent.present:
            spent.present = present

    def _of_all_workers(self) -> "array[int]":
        return array("q", bytes(8 * self.run.plan.n_workers))

    def call_done(self, call: PrepareCall, replies: list[Done]) -> None:
        """Add a call's statistics, tokens and operations to its step."""
        sums = self._sums.setdefault(call.step, {})
        for name, (value, weight) in summed([reply.stats for reply in replies if reply.stats]).items():
            before = sums.get(f"{call.mfc}/{name}", (0.0, 0.0))
            sums[f"{call.mfc}/{name}"] = (before[0] + value, before[1] + weight)
        mfc = self.run.graph[call.mfc]
        if mfc.resamples:
            kept = {row.prompt for reply in replies if reply.outputs for row in reply.outputs.ids}
            self._add(call.step, "prompts/sampled", len({row.prompt for row in call.inputs.ids}))
            self._add(call.step, "prompts/used", len(kept))
        if mfc.role is None:
            return
        config, nbytes = self.run.models[mfc.role], 0
        if mfc.kind is Kind.GENERATE:
            n_drawn, flops = generated(mfc, config, call, replies)
            if self.run.expected and self.run.expected.peak_bandwidth:
                nbytes = sum(
                    decode_bytes_read(self.run, mfc, config, call, reply.outputs) for reply in replies if reply.outputs
                )
            self._add(call.step, "tokens/generated", n_drawn)
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
        """Show the step and write its line; where held-out rows are tried after it, ``evaluated`` writes it."""
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        self._n_written = step + 1
        metrics: Metrics = {"step": step + 1, "time/step_s": seconds, **self._steps.pop(step, {})}
        if (spent := self._spent.pop(step, None)) is not None:
            metrics |= spent.metrics()
        tokens = metrics.get("tokens/trained") or metrics.get("tokens/generated", 0)
        metrics["tokens/per_s"] = tokens / seconds
        metrics["flops/model_per_s"] = metrics.pop("flops/model", 0) / seconds
        metrics |= self._utilisation(self._work.pop(step, {}), metrics)
        for name, (value, weight) in sorted(self._sums.pop(step, {}).items()):
            metrics[name] = value / weight if weight else 0.0
        metrics.update(_picked(metrics, METRIC_ALIASES))
        if expected := self.run.expected:
            metrics["predicted/step_s"] = expected.step_s
            metrics |= {f"predicted/{mfc}_s": calls for mfc, calls in expected.calls.items()}
        self.last = metrics
        if not is_evaluated:
            self._write(metrics)
        self.view.step(metrics)

    def _utilisation(self, work: dict[str, tuple[int, int]], metrics: Metrics) -> Metrics:
        """Return shares of what the devices' data sheet says: MFU of every call, MBU of those that draw."""
        found: Metrics = {}
        if not (expected := self.run.expected) or not expected.peak_flops:
            return found
        for mfc, (flops, nbytes) in work.items():
            devices = len(self.run.plan[mfc].layout.mesh.ranks) * metrics.get(f"time/{mfc}_s", 0.0)
            if devices:
                found[f"mfu/{mfc}"] = flops / devices / expected.peak_flops
            if devices and nbytes and expected.peak_bandwidth:
                found[f"mbu/{mfc}"] = nbytes / devices / expected.peak_bandwidth
        return found

    def _write(self, metrics: Metrics) -> None:
        with self.run.paths.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        self._events.flush()
        self._trace.flush()
        for sink in self.sinks:
            sink.write(metrics)

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

    def evaluated(self, step: int) -> Metrics:
        """Write what held-out rows gave after ``step`` steps, also into the step's line, show and return it.

        Its time is not part of the next step. Before the first step, the line is of the evaluation alone.
        """
        sums: dict[str, tuple[float, float]] = {}
        length = self.run.eval_schedule
        for part in range(length.first_step, length.n_steps):
            for kept in (self._steps, self._spent, self._work):
                kept.pop(part, None)
            for name, (value, weight) in self._sums.pop(part, {}).items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + value, before[1] + weight)
        seconds, self._step_began = time.monotonic() - self._step_began, time.monotonic()
        found = {name: value / weight for name, (value, weight) in sorted(sums.items()) if weight}
        metrics = {**_picked(found, EVAL_ALIASES), "eval/prompts": float(self.run.n_held_out), **found}
        counts = {name: sums[name][1] for name in found}
        self.evaluation = {"step": step, "seconds": seconds, "metrics": metrics, "counts": counts}
        with self.run.paths.evaluation.open("a") as file:
            file.write(json.dumps(self.evaluation) + "\n")
        self._write({**(self.last or {"step": step}), "time/eval_s": seconds, **metrics})
        self.view.evaluated(step, metrics)
        return metrics

    def saved(self, role: str, path: Path) -> None:
        """Note where a model is; what held-out rows gave at the same step is put beside its weights."""
        self.models[role] = path
        if self.evaluation and path == self.run.paths.model(role, self.evaluation["step"]):
            self.describe(path, self.evaluation)
        self.view.saved(role, path)

    @staticmethod
    def describe(path: Path, evaluation: dict[str, Any]) -> None:
        """Put what held-out rows gave beside a model's weights."""
        (path / EVALUATION).write_text(json.dumps(evaluation, indent=1) + "\n")

    def kept(self, metric: str, value: float, path: Path) -> None:
        """Note where the best models so far are."""
        self.best = path
        self.view.kept(metric, value, path)

    def close(self) -> None:
        self._trace.write(b'{"name": "end", "ph": "i", "pid": 0, "tid": 0, "ts": 0, "s": "g"}\n]\n')
        self._trace.close()
        self._events.close()
        for sink in self.sinks:
            sink.close()


def _picked(metrics: Metrics, sources: dict[str, tuple[str, ...]]) -> Metrics:
    """Return what there is of ``sources`` under the names that experiments share."""
    return {name: metrics[s] for name, options in sources.items() for s in options if s in metrics}


def _place(key: str) -> tuple[int, str]:
    """Where a key of a written row stands, whichever worker told it first."""
    first = ("prompt_id", "sample", "prompt", "answer", "answer_tokens")
    return (first.index(key), key) if key in first else (len(first) + (key == "fields"), key)


def summed(stats: Sequence[Stats]) -> Stats:
    """Return sums and counts of all workers, by name."""
    found: Stats = {}
    for of_worker in stats:
        for name, (value, weight) in of_worker.items():
            before = found.get(name, (0.0, 0.0))
            found[name] = (before[0] + value, before[1] + weight)
    return found
