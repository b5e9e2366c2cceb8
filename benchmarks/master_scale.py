"""Master time per call and worker for large clusters: the real master with simulated workers.

    python benchmarks/master_scale.py [--workers 1000,4000,16000] [--steps 4] [--profile]

Runs PPO (rollout and actor training on all workers, reward, reference and critic on halves) with one row per worker.
Master, schedule, telemetry, encoding and signatures are those of a run; messages pass through memory instead of a
socket, and workers reply in random order. The time of simulated workers is not counted. Reports processor time of the
fastest step. Exits with 1 if a call takes more than 20 us per worker at the largest size, or memory exceeds 2 GB.
"""

import argparse
import cProfile
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from realhf.api.batch_meta import BatchMeta, ColumnMeta, RowId
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.messages import (
    Done,
    ExecuteCall,
    Fetch,
    Hello,
    PrepareCall,
    ReadRows,
    Ready,
    Save,
    Start,
    ToMaster,
    ToWorker,
)
from realhf.base.paths import RunDir
from realhf.experiments.ppo import PPOExperiment
from realhf.plan.compile.program import layout_ranks
from realhf.plan.run_spec import RunSpec
from realhf.system.master import Master, relax_gc
from realhf.system.metrics.telemetry import Metrics, Telemetry
from realhf.system.metrics.trace import trace_lines
from realhf.system.metrics.worker_metrics import microseconds
from realhf.system.transport.auth import Direction, SignatureVerifier, Signer
from realhf.system.transport.channel import pack, unpack

LIMIT_US, LIMIT_GB = 20.0, 2.0
GROUP = 4  # responses per prompt
KEY = bytes(32)
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def layouts(n: int) -> dict[str, Layout]:
    """Return the layouts of PPO's calls; ``n`` is a multiple of 40."""

    def on(ranks: range, tp: int, pp: int) -> Layout:
        return Layout(DeviceMesh(tuple(ranks)), ParallelStrategy(len(ranks) // (tp * pp), tp, pp))

    everyone, first, second = range(n), range(n // 2), range(n // 2, n)
    return {
        "actor_gen": on(everyone, 8, 1),
        "rew_inf": on(first, 4, 1),
        "ref_inf": on(second, 4, 1),
        "critic_inf": on(second, 4, 5),
        "critic_train": on(second, 4, 5),
        "actor_train": on(everyone, 8, 5),
    }


def run_of(n: int, steps: int, folder: Path) -> RunSpec:
    model = folder / "config.json"
    model.write_text(json.dumps(LLAMA_7B))
    config = PPOExperiment()
    config.dataset.train_bs_n_seqs = n // GROUP
    config.exp_ctrl.total_train_steps = steps
    config.ppo.group_size = GROUP
    for spec in (config.actor, config.critic, config.ref, config.rew):
        spec.init_from_scratch, spec.config = True, str(model)
    plan = ExecutionPlan(n, {name: Placement(layout) for name, layout in layouts(n).items()})
    return RunSpec("ppo", config, config.task, config.graph(), config.roles(), plan, RunDir(folder), "cpu",
                   steps * n // GROUP)  # fmt: skip


@dataclass
class Cluster:
    """Simulated workers behind an in-process channel. ``worker_seconds`` is the time of the simulation itself."""

    run: RunSpec
    worker_seconds: float = 0.0
    calls_made: int = 0
    n_requests: int = 0
    n_events: int = 0
    calls: dict[tuple[int, int], PrepareCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.run.plan.n_workers
        self.verifier = SignatureVerifier(KEY, (Direction.to_master, Direction.heartbeat), range(n))
        self.signer = Signer(KEY, Direction.to_worker)
        self.signers = [Signer(KEY, Direction.to_master) for _ in range(n)]
        self.rng = random.Random(0)
        self.now = 0.0
        self.free_at = [0.0] * n
        self.pending: list[tuple[float, int, list[bytes]]] = []
        self.sent: list[tuple[int, ToWorker]] = []
        self.n_fetchers = len(self.run.fetch_ranks)
        self.meshes = {name: layout_ranks(program) for name, program in self.run.program.items()}
        self.heads = {name: {rank: d for d, rank in enumerate(placement.layout.dp_heads())}
                      for name, placement in self.run.plan.placements.items()}  # fmt: skip
        for rank in range(n):
            self.reply(Hello(rank, 1, "here", 7), 1.0)
        self.pending.sort(reverse=True)

    def send(self, ranks: Collection[int], message: ToWorker) -> None:
        self.calls_made += isinstance(message, PrepareCall)
        pack(self.signer, ranks, message)
        self.sent += [(rank, message) for rank in ranks]

    def receive(self, timeout_s: float) -> ToMaster | None:
        if self.sent:
            start = time.thread_time()
            for rank, sent in self.sent:
                self.handle(rank, sent)
            self.sent.clear()
            self.pending.sort(reverse=True)
            self.worker_seconds += time.thread_time() - start
        self.n_events += 1
        self.now, _, frames = self.pending.pop()
        opened = unpack(self.verifier, frames)
        assert opened is not None
        return opened[1]

    def close(self) -> None: ...

    def reply(self, message: ToMaster, seconds: float) -> None:
        rank = message.rank
        self.free_at[rank] = max(self.free_at[rank], self.now) + seconds * self.rng.uniform(0.9, 1.1)
        frames = list(pack(self.signers[rank], (rank,), message))
        self.pending.append((self.free_at[rank], self.rng.getrandbits(62), frames))

    def handle(self, rank: int, message: ToWorker) -> None:
        match message:
            case Start():
                self.reply(Ready(rank, {"seconds": 1.0}), 10.0)
            case Fetch(request, _, start, stop):
                at = self.heads["actor_gen"][rank]
                first, last = (start + (stop - start) * k // self.n_fetchers for k in (at, at + 1))
                ids = tuple(RowId(p, -1) for p in range(first, last))
                self.done(request, rank, 0.1, "fetch", self.rows(ids, self.run.graph.dataset_keys))
            case PrepareCall(request):
                self.n_requests += 1
                if rank in self.meshes[message.mfc]:
                    self.calls[request, rank] = message
                else:
                    self.done(request, rank, 0.1, f"{message.mfc}/Transfer")
            case ExecuteCall(request):
                self.execute(request, rank, self.calls.pop((request, rank)))
            case ReadRows(request):
                self.reply(Done(request, rank, values={"rows": []}), 0.1)
            case Save(request):
                self.reply(Done(request, rank), 10.0)

    def execute(self, request: int, rank: int, call: PrepareCall) -> None:
        mfc, d = self.run.graph[call.mfc], self.heads[call.mfc].get(rank)
        outputs = None
        if d is not None and not mfc.is_train:
            ids = tuple(call.inputs.ids[i] for i in call.assignment[d])
            if mfc.kind is Kind.GENERATE:
                ids = tuple(RowId(row.prompt, sample) for row in ids for sample in range(GROUP))
            outputs = self.rows(ids, mfc.outputs)
        stats = {f"statistic_{i}": (1.0, 2.0) for i in range(12)} if d is not None else {}
        self.done(request, rank, 20.0, f"{call.mfc}/Transfer", outputs, stats, f"{call.mfc}/Reallocate",
                  f"{call.mfc}/Compute", f"{call.mfc}/Release")  # fmt: skip

    def done(
        self,
        request: int,
        rank: int,
        seconds: float,
        span: str,
        outputs: BatchMeta | None = None,
        stats: dict[str, tuple[float, float]] | None = None,
        *spans: str,
    ) -> None:
        at = int(1.7e15 + self.now * 1e6)
        activities = [(name, at, int(seconds * 1e6)) for name in (span, *spans)]
        times = microseconds(activities, "Compute"), microseconds(activities, "Transfer", "Reallocate")
        metrics = *times, 2 << 30, 1 << 30  # in the order of WORKER_METRICS
        trace = trace_lines(activities, rank, 0)
        self.reply(Done(request, rank, outputs, stats or {}, None, {}, trace, metrics), seconds)

    def rows(self, ids: tuple[RowId, ...], keys: tuple[str, ...]) -> BatchMeta:
        lengths = tuple(self.rng.randrange(200, 2000) for _ in ids)
        scalars = {"rewards", "truncated"}
        return BatchMeta(ids, {
            key: ColumnMeta("float32", (1,) * len(ids) if key in scalars else lengths) for key in keys
        })  # fmt: skip


class Stopwatch:
    """A progress view that records the master's time at every step; the first step includes start-up."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.laps: list[tuple[float, int, int, int]] = []

    def ready(self, workers: dict[int, Ready]) -> None: ...

    def step(self, metrics: Metrics) -> None:
        cluster = self.cluster
        self.laps.append(
            (time.thread_time() - cluster.worker_seconds, cluster.calls_made, cluster.n_requests, cluster.n_events)
        )

    def steps(self) -> list[tuple[float, int, int, int]]:
        """Return seconds, calls, requests to workers and events of all steps but the first."""
        return [tuple(b - a for a, b in zip(*laps, strict=True)) for laps in pairwise(self.laps)]  # type: ignore[misc]

    def evaluated(self, step: int, metrics: Metrics) -> None: ...

    def kept(self, metric: str, value: float, path: Path) -> None: ...

    def saved(self, role: str, path: Path) -> None: ...


def measure(n: int, steps: int, profile: bool) -> tuple[float, float]:
    """Print a line for ``n`` workers; return microseconds per request, and gigabytes."""
    with tempfile.TemporaryDirectory() as scratch:
        run = run_of(n, steps, Path(scratch))
        cluster = Cluster(run)
        view = Stopwatch(cluster)
        telemetry = Telemetry(run, view, [])
        master = Master(run, cluster, dict, telemetry)
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        master.train()
        if profile:
            profiler.disable()
            profiler.print_stats("tottime")
        telemetry.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    seconds, calls, requests, events = min(view.steps())
    print(f"{n:>8} {requests:>9} {seconds:>9.2f} {seconds / calls * 1e3:>9.1f} {seconds / requests * 1e6:>18.1f} "
          f"{events / seconds:>11.0f} {memory:>7.2f}", flush=True)  # fmt: skip
    return seconds / requests * 1e6, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", default="1000,4000,16000")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    relax_gc()
    print(f"{'workers':>8} {'requests':>9} {'s':>9} {'ms/call':>9} {'us/request':>18} {'events/s':>11} {'GB':>7}")
    for size in options.workers.split(","):
        each, memory = measure(int(size), options.steps, options.profile)
    sys.exit(each > LIMIT_US or memory > LIMIT_GB)


if __name__ == "__main__":
    main()
