"""Compares the analytic estimator with published times of training and generation on GPUs.

    python benchmarks/bench_published.py [FILE ...] [--all]

Prints the errors by source; ``--all`` prints every point. Points are in published_performance.jsonl and in FILEs of the
same format, each with its source and its conditions. They are of other engines: fully sharded ones count as ZeRO-1
here, and overlap, attention kernels and fusion are those of ``Roofline``, not theirs.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published_engines import PublishedEngine, engine_of
from realhf.api.config.choices import Recompute
from realhf.api.machine import Hardware
from realhf.api.model_config import ModelConfig
from realhf.arch.param_specs import stage_layers
from realhf.plan.compile.pipeline import train_schedule
from realhf.plan.cost.hardware import read_hardware
from realhf.plan.cost.pipeline_time import uniform_makespan
from realhf.plan.cost.roofline import Roofline
from realhf.plan.cost.speed import CollectiveKind, StageShard, Work, shard_numels

POINTS = Path(__file__).with_name("published_performance.jsonl")
MACHINES = {"a100-80g": "a100", "h100": "h100"}
GATED = ("llama", "mixtral")
RECOMPUTE = {"none": None, "selective": Recompute.selective, "full": Recompute.full}
Point = Mapping[str, Any]


def model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Return a model of these sizes; norms, biases and positions are those of llama."""
    heads, n_experts = fields["heads"], fields.get("experts", 0)
    return ModelConfig(
        "mixtral" if n_experts else "llama", fields["layers"], fields["hidden"], heads, fields.get("kv_heads", heads),
        fields.get("head_dim", fields["hidden"] // heads), fields["intermediate"], fields["vocab"], 1 << 20,
        mlp="gated" if fields["family"] in GATED else "ungated", n_experts=n_experts,
        experts_per_token=fields.get("experts_per_token", 0),
        expert_intermediate=fields["intermediate"] if n_experts else 0,
    )  # fmt: skip


def training_seconds(point: Point, hardware: Hardware) -> float:
    """Return the predicted seconds of a step: passes of all micro-batches, and the update."""
    engine = engine_of(point)
    model, speed = model_of(point["model"]), Roofline(hardware, engine.traits)
    tp, pp = point["tp"], point["pp"]
    stages, last = stage_layers(model, pp), model.n_layers + 1
    shards = [
        StageShard(model, tp, len(layers) - (0 in layers) - (last in layers), 0 in layers, last in layers, True,
                   RECOMPUTE[point["recompute"]], point.get("sequence_parallel", tp > 1))
        for layers in stages
    ]  # fmt: skip
    work = Work.of([point["seq"]] * point["micro_batch"])
    n = point["global_batch"] // point["dp"] // point["micro_batch"]
    forward, backward = zip(*(speed.train(shard, work, range(tp)) for shard in shards), strict=True)
    if point.get("zero") == 3:
        seconds = n * _sharded_pass(point, speed, shards[0], forward[0], backward[0])
    elif pp == 1:
        seconds = n * (forward[0] + backward[0])
    else:
        sends = (speed.send(work.tokens * model.hidden * 2 / tp, 0, tp),) * pp
        seconds = uniform_makespan(train_schedule, n, forward, backward, sends)
        bubble = seconds - n * max(f + b for f, b in zip(forward, backward, strict=True))
        seconds -= bubble * (1 - 1 / point.get("virtual_stages", 1))
    return seconds + _update_seconds(point, engine, speed, shards[0], forward[0], backward[0])


def _sharded_pass(point: Point, speed: Roofline, shard: StageShard, forward: float, backward: float) -> float:
    """Return the seconds of a micro-batch with ZeRO-3: blocks are gathered while the previous one computes."""
    n, replicas = shard.n_blocks, range(0, point["dp"] * point["tp"], point["tp"])
    block = replace(shard.model, n_layers=1, vocab=1)
    nbytes = 2 * max(shard_numels(block, shard.tp, 1))
    gather = speed.collective(CollectiveKind.ALL_GATHER, nbytes, replicas)
    reduce = speed.collective(CollectiveKind.REDUCE_SCATTER, nbytes, replicas)
    return max(forward, n * gather) + max(backward, n * (gather + reduce)) + gather + reduce


def _update_seconds(
    point: Point, engine: PublishedEngine, speed: Roofline, shard: StageShard, forward: float, backward: float
) -> float:
    dp, tp = point["dp"], point["tp"]
    numel, replicas = max(shard_numels(shard.model, tp, point["pp"])), range(0, dp * tp, tp)
    seconds = speed.optimizer(shard, numel // dp)
    if point.get("zero") == 3:
        return seconds
    reduce = speed.collective(CollectiveKind.REDUCE_SCATTER, engine.gradient_bytes * numel, replicas)
    gather = speed.collective(CollectiveKind.ALL_GATHER, 2 * numel, replicas)
    if engine.overlaps_data_parallel:
        reduce, gather = max(0.0, reduce - backward), max(0.0, gather - forward)
    return seconds + reduce + gather


def generation_seconds(point: Point, hardware: Hardware) -> float:
    """Return the predicted seconds of a batch, with its prefill if the point includes it."""
    model, speed = model_of(point["model"]), Roofline(hardware, engine_of(point).traits)
    ranks = range(point["tp"])
    shard = StageShard(model, point["tp"], model.n_layers, True, True, True)
    context = point["prompt"] + point["new"] / 2
    seconds = point["new"] * speed.decode(shard, point["batch"], context, ranks)
    if point["kind"] == "generate":
        seconds += speed.forward(shard, Work.of([point["prompt"]] * point["batch"]), ranks)
    return seconds


def machine_of(point: Point) -> Hardware:
    return replace(read_hardware(MACHINES[point["hardware"]]), compute_capability=9.0)  # decoding is captured


def ratio(point: Point, hardware: Hardware) -> float:
    """Return the predicted time divided by the published one."""
    if point["kind"] == "train":
        return training_seconds(point, hardware) / float(point["seconds"])
    return generation_seconds(point, hardware) * float(point["tokens_per_s"]) / (point["batch"] * point["new"])


def describe(point: Point) -> str:
    keys = ("seq", "dp", "tp", "pp", "micro_batch", "recompute", "batch", "prompt", "new")
    conditions = " ".join(f"{key}={point[key]}" for key in keys if key in point)
    return f"{point['hardware']} {point['model']['layers']}x{point['model']['hidden']} {conditions}"


def points(files: Sequence[Path]) -> Iterator[Point]:
    for file in files:
        yield from map(json.loads, file.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="print every point")
    options = parser.parse_args()
    by_source: dict[tuple[str, str], list[float]] = {}
    for point in points([POINTS, *options.files]):
        found = ratio(point, machine_of(point))
        by_source.setdefault((point["kind"], point["source"]), []).append(found)
        if options.all:
            print(f"{found:5.2f}  {describe(point)}")
    for (kind, source), ratios in by_source.items():
        errors = sorted(abs(one - 1) for one in ratios)
        p90 = errors[int(0.9 * (len(errors) - 1))]
        print(f"{kind:8} {len(ratios):3} points: median error {statistics.median(errors):.0%}, 90 % below {p90:.0%}, "
              f"predicted / published {min(ratios):.2f} to {max(ratios):.2f}: {source}")  # fmt: skip


if __name__ == "__main__":
    main()
