"""Writes metrics, events, traces and generations of a run, and shows its progress in a ``ProgressView``."""

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from realhf.api.batch_meta import BatchMeta
from realhf.api.config import RewardConfig
from realhf.api.config.choices import Backend
from realhf.api.graph import MFC, Kind
from realhf.api.messages import Done, PrepareCall, Ready, Stats
from realhf.api.model_config import ModelConfig
from realhf.arch.flops import forward_flops, generate_bytes, generate_flops, train_flops
from realhf.base.errors import RunFailed
from realhf.plan.compile.schedule import RowsReady
from realhf.plan.run_spec import RunSpec
from realhf.system.metrics.sinks import MetricSink
from realhf.system.metrics.trace import TRACE_END, open_trace
from realhf.system.metrics.worker_metrics import StepMetrics

Metrics = dict[str, float]
EVALUATION = "evaluation.json"
"""File next to a saved model: means of the evaluation on held-out rows, and the number of values of each."""

METRIC_ALIASES = {
    "reward/mean": ("rew_inf/reward",),
    "reward/accuracy": ("rew_inf/accuracy",),
    "reward/failed": ("rew_inf/failed", "gold_inf/failed"),
    "env/turns": ("actor_gen/turns",),
    "env/failed": ("actor_gen/failed",),
    "tokens/drifted": ("actor_gen/drifted",),
    "kl/ref": ("actor_train/kl",),
    "length/response": ("actor_gen/response_length", "gen/response_length"),
    "loss": ("sft_train/loss", "rw_train/loss", "actor_train/actor_loss", "actor_train/loss"),
}
"""Names that all experiments share, and the metrics that they stand for."""
EVAL_ALIASES = {
    "eval/accuracy": ("eval_rew/accuracy", "rw_eval/accuracy", "actor_eval/accuracy"),
    "eval/reward": ("eval_rew/reward",),
    "eval/failed": ("eval_rew/failed",),
    "eval/loss": ("sft_eval/loss", "rw_eval/loss", "actor_eval/loss"),
    "eval/response_length": ("eval_gen/response_length",),
    "eval/truncated": ("eval_gen/truncated",),
}
EPISODES = "turn_rewards"
"""Output of calls that play episodes."""
GENERATION_COLUMNS = ("prompt_id", "sample", "prompt", "response", "answer_tokens")


class ProgressView(Protocol):
    """Shows the progress of a run to the user."""

    def ready(self, workers: dict[int, Ready]) -> None: ...

    def step(self, metrics: Metrics) -> None: ...

    def evaluated(self, step: int, metrics: Metrics) -> None: ...

    def saved(self, role: str, path: Path) -> None: ...

    def kept(self, metric: str, value: float, path: Path) -> None: ...

    def failed(self, failure: str) -> None: ...


@dataclass
class _Step:
    """What the workers have reported of a step; operations and bytes read by MFC."""

    workers: StepMetrics
    sums: Stats = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    prompts: Metrics = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)
    bytes_read: Counter[str] = field(default_factory=Counter)


class Telemetry:
    """Turns the replies of a step into one line of metrics, and appends to the files of the run directory."""

    logged_keys = ("tokens", "prompt_mask", "rewards", "truncated", "row")

    def __init__(self, run: RunSpec, view: ProgressView, sinks: list[MetricSink], first_step: int = 0) -> None:
        self.run, self.view, self.sinks = run, view, sinks
        self.models: dict[str, Path] = {}
        self.best: Path | None = None
        self.last: Metrics = {}
        self.evaluation: dict[str, Any] = {}
        self.first_failure = ""
        self._steps: defaultdict[int, _Step] = defaultdict(lambda: _Step(StepMetrics(run.plan.n_workers)))
        self._n_written = first_step
        self._step_began = time.monotonic()
        self._events = run.paths.events.open("ab")
        self._trace = open_trace(run.paths.trace, resumed=first_step > 0)

    def ready(self, workers: dict[int, Ready]) -> None:
        self._step_began = time.monotonic()
        self.view.ready(workers)

    def event(self, event: RowsReady) -> None:
        self._events.write(msgspec.json.encode(event) + b"\n")

    def reply(self, step: int, mfc: str, done: Done) -> None:
        """Add the trace and the worker metrics of a reply; ``mfc`` is empty if the request is not of an MFC."""
        self._trace.write(done.trace)
        if step >= self._n_written:  # a save completes after the line of its step
            self._steps[step].workers.add(mfc, done)

    def call_done(self, call: PrepareCall, replies: list[Done]) -> None:
        """Add a call's statistics, tokens and floating-point operations to its step."""
        step, mfc = self._steps[call.step], self.run.graph[call.mfc]
        stats = sum_stats([reply.stats for reply in replies])
        step.sums = sum_stats([step.sums, {f"{call.mfc}/{name}": value for name, value in stats.items()}])
        if stats.get("failed", (0.0,))[0]:
            self._failed(call, step.sums[f"{call.mfc}/failed"], [reply.values for reply in replies])
        outputs = [reply.outputs for reply in replies if reply.outputs]
        if mfc.resamples:
            step.counts["prompts/sampled"] += len({row.prompt for row in call.inputs.ids})
            step.counts["prompts/used"] += len({row.prompt for part in outputs for row in part.ids})
        if mfc.role is None:
            return
        config = self.run.models[mfc.role]
        if mfc.kind is Kind.GENERATE:
            n_tokens, flops = _generated_tokens(mfc, config, call, outputs, stats)
            if self.run.expected and self.run.expected.peak_bandwidth:
                step.bytes_read[call.mfc] += sum(_bytes_read(self.run, mfc, config, call, part) for part in outputs)
            step.counts["tokens/generated"] += n_tokens
        else:
            lengths = call.inputs.columns[mfc.graph_key("tokens")].lengths
            flops = train_flops(config, lengths) if mfc.is_train else forward_flops(config, lengths)
            if mfc.is_train:
                step.counts["tokens/trained"] = max(step.counts["tokens/trained"], sum(lengths))
        step.flops[call.mfc] += flops

    def _failed(self, call: PrepareCall, failed: tuple[float, float], values: Sequence[dict[str, Any]]) -> None:
        """Show the first failure of a reward; ``RunFailed`` if too many of the step's responses have no reward."""
        is_evaluation = call.step >= self.run.eval_schedule.first_step
        where = f"{call.mfc} of {'an evaluation' if is_evaluation else f'step {call.step + 1}'}"
        if not self.first_failure:
            reported = (part["failure"] for part in values if "failure" in part)
            self.first_failure = f"{where}: {next(reported, 'a reward is not a finite number')}"
            self.run.paths.failure.write_text(self.first_failure + "\n", "utf-8")
            self.view.failed(self.first_failure)
        reward, env = (vars(self.run.config).get(name) for name in ("reward", "env"))
        options, remedy = reward, "; correct the reward function, or increase reward.max_failures" if reward else ""
        if env is not None and env.cls:
            options, remedy = env, "; correct the environment, or increase env.max_failures"
        if problem := too_many_failures(*failed, (options or RewardConfig()).max_failures):
            raise RunFailed(f"{where}: {problem}; the first failure is in {self.run.paths.failure}{remedy}")

    def add_metrics(self, step: int, metrics: Metrics) -> None:
        """Add metrics that the master knows to the line of a step."""
        self._steps[step].prompts |= metrics

    def step_done(self, step: int, is_evaluated: bool = False) -> None:
        """Show the step and write its line, unless an evaluation follows, which writes it."""
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        self._n_written = step + 1
        done = self._steps[step]
        del self._steps[step]
        metrics: Metrics = {"step": step + 1, "time/step_s": seconds, **done.counts, **done.prompts,
                            **done.workers.metrics(), **done.workers.shares(seconds)}  # fmt: skip
        tokens = metrics.get("tokens/trained") or metrics.get("tokens/generated", 0)
        metrics["tokens/per_s"] = tokens / seconds
        metrics["flops/model_per_s"] = done.flops.total() / seconds
        metrics |= self._utilisation(done, metrics)
        for name, (value, weight) in sorted(done.sums.items()):
            metrics[name] = value / weight if weight else value
        metrics |= _aliased(metrics, METRIC_ALIASES)
        if expected := self.run.expected:
            word = "predicted" if expected.is_measured else "limit"
            metrics |= {f"{word}/{name}_s": s for name, s in {"step": expected.step_s, **expected.calls}.items()}
        self.last = metrics
        if not is_evaluated:
            self._write(metrics)
        self.view.step(metrics)

    def _utilisation(self, step: _Step, metrics: Metrics) -> Metrics:
        """Return model FLOPS and bandwidth utilisation of the calls, relative to the peaks of the data sheet."""
        shares: Metrics = {}
        if not (expected := self.run.expected) or not expected.peak_flops:
            return shares
        for mfc, flops in step.flops.items():
            device_seconds = len(self.run.plan[mfc].layout.mesh.ranks) * metrics.get(f"time/{mfc}_s", 0.0)
            if device_seconds:
                shares[f"mfu/{mfc}"] = flops / device_seconds / expected.peak_flops
            if device_seconds and step.bytes_read[mfc]:
                shares[f"mbu/{mfc}"] = step.bytes_read[mfc] / device_seconds / expected.peak_bandwidth
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
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:  # surrogates as JSON escapes
            for row in samples if limit < 0 else samples[:limit]:
                row.setdefault("fields", rows.get((row["prompt_id"], -1), {}).get("fields"))
                ordered = {key: row[key] for key in sorted(row, key=_column_order)}
                file.write(json.dumps(ordered, ensure_ascii=False) + "\n")

    def evaluated(self, step: int) -> Metrics:
        """Write, show and return the metrics of the evaluation after ``step`` steps; they are part of the step's line.

        Its time is not part of the next step, unless it runs beside it. Before the first step, the line has the
        evaluation only.
        """
        schedule = self.run.eval_schedule
        parts = [self._steps.pop(step) for step in range(schedule.first_step, schedule.n_steps) if step in self._steps]
        sums = sum_stats([part.sums for part in parts])
        now = time.monotonic()
        seconds = now - self._step_began
        if not self.run.evaluates_beside_training:
            self._step_began = now
        means = {
            n: value / weight if weight else value for n, (value, weight) in sorted(sums.items()) if weight or value
        }
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
        with contextlib.ExitStack() as files:  # each is closed even if another fails, as on a full disk
            for sink in self.sinks:
                files.callback(sink.close)
            files.callback(self._events.close)
            files.callback(self._trace.close)
            self._trace.write(TRACE_END)


def too_many_failures(failed: float, total: float, limit: float) -> str:
    """Return the problem if more than the fraction ``limit`` of ``total`` responses has no reward, else nothing."""
    problem = f"{failed:.0f} of {total:.0f} responses have no reward, more than a fraction of {limit:g}"
    return problem if failed / total > limit else ""


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


def _generated_tokens(
    mfc: MFC, config: ModelConfig, call: PrepareCall, outputs: Sequence[BatchMeta], stats: Stats
) -> tuple[int, int]:
    """Return the number of generated tokens of a call, and its floating-point operations."""
    is_continued = mfc.graph_key("rollouts") in mfc.outputs  # from several positions of each row
    key = mfc.graph_key("rollouts" if is_continued else "tokens")
    rows = [n for part in outputs for n in part.columns[key].lengths]
    if is_continued:
        inputs = call.inputs.columns[mfc.graph_key("tokens")].lengths
        return sum(rows), forward_flops(config, inputs, head_tokens=0) + forward_flops(config, rows)
    prompts = call.inputs.columns[mfc.graph_key("prompts")].lengths
    if EPISODES in mfc.outputs:  # an episode need not begin with the prompt of its row
        return int(stats["sampled_tokens"][0]), generate_flops(config, (1,) * len(rows), rows)
    n_tokens = sum(rows) - len(rows) // max(1, len(prompts)) * sum(prompts)
    return n_tokens, generate_flops(config, prompts, rows)


def _bytes_read(run: RunSpec, mfc: MFC, config: ModelConfig, call: PrepareCall, outputs: BatchMeta) -> int:
    """Return the minimum of bytes that a replica reads to generate ``outputs``; 0 for continuations."""
    sampling = run.config.sampling_options()
    if mfc.graph_key("rollouts") in mfc.outputs or sampling is None or mfc.role is None:
        return 0
    prompt_lengths = call.inputs.columns[mfc.graph_key("prompts")].lengths
    if EPISODES in mfc.outputs:
        prompt_lengths = (1,) * len(prompt_lengths)
    length_of = {row.prompt: n for row, n in zip(call.inputs.ids, prompt_lengths, strict=True)}
    placement = run.plan[mfc.name]
    if placement.backend is Backend.vllm:
        slots = run.config.vllm.max_num_seqs
    else:
        slots = placement.micro_batching.limit_num_seqs(sampling.max_num_seqs)
    lengths = outputs.columns[mfc.graph_key("tokens")].lengths
    prompts = [length_of[row.prompt] for row in outputs.ids]
    itemsize = 2 if run.roles[mfc.role].spec.bf16 else 4
    return generate_bytes(config, prompts, lengths, slots, itemsize)
