"""Compares the analytic estimator with published times, memory and whole RL steps on GPUs.

    python -m benchmarks.bench_published [FILE ...] [--all]

Prints the errors by source with the worst point, and in total by kind; ``--all`` prints every point. Points are in
published_performance.jsonl and in FILEs of the same format, each with its source and its conditions; those that lack
conditions are listed with the reason. published_engines.py describes their engines, published_memory.py and
published_rl.py predict memory and RL steps, and calibrate.py fits the constants of GPUs. Context parallelism counts as
an even division of the tokens, expert parallelism as an exchange of their hidden states.
"""

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import published_memory, published_rl
from benchmarks.published_engines import PublishedEngine, engine_of
from benchmarks.published_models import model_of
from realhf.api.config.choices import Recompute
from realhf.api.layout import ParallelStrategy
from realhf.api.machine import Hardware, Link
from realhf.api.model_config import ModelConfig
from realhf.arch.param_specs import stage_layers
from realhf.plan.cost.speed import CollectiveKind, StageShard, Work, shard_numels
from realhf.plan.machines.hardware import read_hardware
from realhf.plan.machines.roofline import Roofline

POINTS = Path(__file__).with_name("published_performance.jsonl")
MACHINES = {"a100-80g": "a100", "h100": "h100"}
TUNED_PRODUCTS = {"a100-80g": 1.04, "h100": 1.29}  # fitted by calibrate.py, for engines in TUNED
TIMED = ("train", "generate", "decode", "prefill")
TARGETS = {"memory": 0.1, "rl": 0.25}  # largest error
RECOMPUTE = {"none": None, "selective": Recompute.selective, "full": Recompute.full}
POWER_LIMIT_W = 700  # of an H100 SXM; the clock grows with the cube root of the power
NETWORK_EFFICIENCY = 0.85  # as in machines/*.yaml
Point = Mapping[str, Any]


def machine_of(point: Point) -> Hardware:
    """Return the machine of a point, whose constants are fitted."""
    return _read_machine(MACHINES[point["hardware"]])


@cache
def _read_machine(name: str) -> Hardware:
    return replace(read_hardware(name), compute_capability=9.0)  # decoding is captured


def adjusted(hardware: Hardware, point: Point) -> Hardware:
    """Return the machine with the network, memory and power limit of a point."""
    if "node_network_gbps" in point:
        bandwidth = point["node_network_gbps"] * 1e9 / 8 / hardware.node_size * NETWORK_EFFICIENCY
        hardware = replace(hardware, cluster=Link(bandwidth, hardware.cluster.latency))
    if "memory_bandwidth" in point:
        share = point["memory_bandwidth"] / hardware.peak_bandwidth
        hardware = replace(hardware, memory_bandwidth=hardware.memory_bandwidth * share)
    if "power_limit_w" in point:
        hardware = replace(hardware, flops=hardware.flops * (point["power_limit_w"] / POWER_LIMIT_W) ** (1 / 3))
    return hardware


def stages_of(point: Point, model: ModelConfig) -> list[StageShard]:
    tp, stages, last = point["tp"], stage_layers(model, point["pp"]), model.n_layers + 1
    recompute = None if "recompute_kind" in point else RECOMPUTE[point["recompute"]]
    return [
        StageShard(model, tp, len(layers) - (0 in layers) - (last in layers), 0 in layers, last in layers, True,
                   recompute, point.get("sequence_parallel", tp > 1))
        for layers in stages
    ]  # fmt: skip


def training_seconds(point: Point, hardware: Hardware, tuned: float) -> float:
    """Return the predicted seconds of a step: passes of all micro-batches, and the update."""
    engine, model, tp, pp = engine_of(point, tuned), model_of(point), point["tp"], point["pp"]
    speed, shards = Roofline(adjusted(hardware, point), engine.traits), stages_of(point, model)
    cp = point.get("context_parallel", 1)
    work = Work.of([point["seq"]] * point["micro_batch"])
    work = work._replace(tokens=work.tokens // cp, pairs=work.pairs // cp)
    n = point["global_batch"] // point["dp"] // point["micro_batch"]
    by_shard = {
        shard: _with_extras(point, speed, shard, work, *speed.train(shard, work, range(tp)))
        for shard in dict.fromkeys(shards)
    }
    times = [by_shard[shard] for shard in shards]
    forward, backward = zip(*times, strict=True)
    if point.get("zero") == 3:
        seconds = n * _sharded_pass(point, speed, shards[0], forward[0], backward[0])
    else:  # 1F1B: the slowest stage is busy, but for a pass through the other stages at the start and the end
        send = 2 * speed.send(work.tokens * model.hidden * 2 / tp, 0, tp)
        busy = [f + b for f, b in times]
        filling = sum(busy) - max(busy) + (pp - 1) * send
        seconds = n * max(busy) + filling / point.get("virtual_stages", 1)
    return seconds + _update_seconds(point, engine, speed, shards[0], forward[0], backward[0])


def _with_extras(
    point: Point, speed: Roofline, shard: StageShard, work: Work, forward: float, backward: float
) -> tuple[float, float]:
    """Add recomputation of another kind than ours, and the exchange of tokens between experts."""
    kind, blocks = point.get("recompute_kind"), replace(shard, first=False, last=False)
    if kind == "every-second-layer":
        backward += speed.forward(blocks, work, range(shard.tp)) / 2
    elif kind == "every-second-matmul":
        backward += speed.block_forward(blocks, work).products * shard.n_blocks / 2
    elif kind == "attention":
        backward += speed.block_forward(blocks, work).attention * shard.n_blocks
    ep = point.get("expert_parallel", 1)
    if ep > 1:
        sent = work.tokens * shard.model.hidden * 2 * shard.model.experts_per_token / shard.tp * (ep - 1) / ep
        exchange = 2 * shard.n_blocks * speed.send(sent, 0, ep * shard.tp - 1)
        forward, backward = forward + exchange, backward + exchange
    return forward, backward


def _sharded_pass(point: Point, speed: Roofline, shard: StageShard, forward: float, backward: float) -> float:
    """Return the seconds of a micro-batch with ZeRO-3: blocks are gathered while the previous one computes."""
    n, tp = shard.n_blocks, point["tp"]
    replicas = range(0, point.get("shard_group", point["dp"] * tp), tp)
    nbytes = 2 * max(shard_numels(replace(shard.model, n_layers=1, vocab=1, lora=None), ParallelStrategy(tp=shard.tp)))
    gather = speed.collective(CollectiveKind.ALL_GATHER, nbytes, replicas)
    reduce = speed.collective(CollectiveKind.REDUCE_SCATTER, nbytes, replicas)
    return max(forward, n * gather) + max(backward, n * (gather + reduce)) + gather + reduce


def _update_seconds(
    point: Point, engine: PublishedEngine, speed: Roofline, shard: StageShard, forward: float, backward: float
) -> float:
    replicas_n, tp = point["dp"] * point.get("context_parallel", 1), point["tp"]
    numels, replicas = shard_numels(shard.model, ParallelStrategy(tp=tp, pp=point["pp"])), range(0, replicas_n * tp, tp)
    numel = max(numels)
    seconds = speed.optimizer(shard, numel // (replicas_n if point.get("zero", 1) else 1))
    if point.get("zero") == 3:
        return seconds
    reduce = speed.collective(CollectiveKind.REDUCE_SCATTER, engine.gradient_bytes * numel, replicas)
    gather = speed.collective(CollectiveKind.ALL_GATHER, 2 * numel, replicas)
    if engine.overlaps_data_parallel:
        reduce, gather = max(0.0, reduce - backward), max(0.0, gather - forward)
    return seconds + reduce + gather


def generation_seconds(point: Point, hardware: Hardware, tuned: float) -> float:
    """Return the predicted seconds of a batch, with its prefill if the point includes it."""
    speed, ranks = Roofline(adjusted(hardware, point), engine_of(point, tuned).traits), range(point["tp"])
    model, new = model_of(point), point.get("new", 0)
    shard = StageShard(model, point["tp"], model.n_layers, True, True, True)
    seconds = new * speed.decode(shard, point["batch"], point["prompt"] + new / 2, ranks)
    if point["kind"] != "decode":
        body, head = replace(shard, last=False), replace(shard, n_blocks=0, first=False)
        seconds += speed.forward(body, Work.of([point["prompt"]] * point["batch"]), ranks)
        seconds += speed.decode(head, point["batch"], 0, ranks)
    return seconds


def ratio(point: Point, hardware: Hardware, tuned: float) -> float:
    """Return the predicted time divided by the published one."""
    predict = training_seconds if point["kind"] == "train" else generation_seconds
    return predict(point, hardware, tuned) / published_seconds(point)


def published_seconds(point: Point) -> float:
    if "seconds" in point:
        return float(point["seconds"])
    return point["batch"] * point["new"] / float(point["tokens_per_s"])


def compare(point: Point) -> float | str:
    """Return predicted / published of a point of any kind, or why it cannot be predicted."""
    if point["kind"] == "memory":
        return published_memory.missing(point) or published_memory.ratio(point)
    hardware, tuned = machine_of(point), TUNED_PRODUCTS[point["hardware"]]
    if point["kind"] == "rl":
        return published_rl.missing(point) or published_rl.ratio(point, hardware, tuned)
    return ratio(point, hardware, tuned)


def describe(point: Point) -> str:
    keys = ("n_gpus", "steps_off_policy", "generate", "seq", "dp", "tp", "pp", "zero", "micro_batch", "global_batch",
            "recompute", "compiled", "batch", "prompt", "new")  # fmt: skip
    conditions = " ".join(f"{key}={point[key]}" for key in keys if key in point)
    name = point.get("model_name") or f"{point['model']['layers']}x{point['model']['hidden']}"
    return f"{point['hardware']} {name} {conditions}"


def points(files: Sequence[Path]) -> Iterator[Point]:
    for file in files:
        yield from map(json.loads, file.read_text().splitlines())


def summary(ratios: Sequence[float]) -> str:
    errors = sorted(abs(one - 1) for one in ratios)
    rms = math.sqrt(statistics.mean(math.log(one) ** 2 for one in ratios))
    p90 = errors[math.ceil(0.9 * len(errors)) - 1]
    return f"median error {statistics.median(errors):.1%}, 90 % below {p90:.1%}, root mean square {rms:.1%}"


def total(kind: str, ratios: Sequence[float]) -> str:
    """Return one line about all points of a kind, with the share that meets the target."""
    line = f"{kind:8} {len(ratios):3} points in total: {summary(ratios)}"
    if (target := TARGETS.get(kind)) is None:
        return line
    return f"{line}; {sum(abs(one - 1) <= target for one in ratios)} within {target:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="print every point")
    options = parser.parse_args()
    by_source: dict[tuple[str, str], list[tuple[float, Point]]] = {}
    by_kind: dict[str, list[float]] = {}
    not_compared: Counter[tuple[str, str, str]] = Counter()
    for point in points([POINTS, *options.files]):
        found = compare(point)
        if isinstance(found, str):
            not_compared[point["kind"], point["source"], found] += 1
            continue
        by_source.setdefault((point["kind"], point["source"]), []).append((found, point))
        by_kind.setdefault(point["kind"], []).append(found)
        if options.all:
            print(f"{found:5.2f}  {describe(point)}")
    for (kind, source), several in by_source.items():
        ratios = [found for found, _ in several]
        print(f"{kind:8} {len(ratios):3} points: {summary(ratios)}, "
              f"predicted / published {min(ratios):.2f} to {max(ratios):.2f}: {source}")  # fmt: skip
        worst, point = max(several, key=lambda pair: abs(pair[0] - 1))
        print(f"{'':11}worst: {worst:.2f}  {describe(point)}")
    for (kind, source, reason), n in not_compared.items():
        print(f"{kind:8} {n:3} points, not compared, {reason}: {source}")
    for kind, ratios in by_kind.items():
        print(total(kind, ratios))


if __name__ == "__main__":
    main()
