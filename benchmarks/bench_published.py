"""Compares the analytic estimator with published times of training and generation on GPUs.

    python benchmarks/bench_published.py [FILE ...] [--all]

Prints the errors by source; ``--all`` prints every point. Points are in published_performance.jsonl and in FILEs of the
same format, each with its source and its conditions. They are of other engines: fully sharded ones count as ZeRO-1
here, and overlap, attention kernels and fusion are those of ``Roofline``, not theirs. Context parallelism counts as
an even division of the tokens, expert parallelism as none. Points of memory and of whole RL steps are only counted.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from realhf.api.config.choices import Recompute
from realhf.api.machine import Hardware
from realhf.api.model_config import Lora, ModelConfig
from realhf.arch.param_specs import stage_layers
from realhf.plan.compile.pipeline import train_schedule
from realhf.plan.cost.hardware import read_hardware
from realhf.plan.cost.pipeline_time import uniform_makespan
from realhf.plan.cost.roofline import Roofline
from realhf.plan.cost.speed import CollectiveKind, StageShard, Work, shard_numels

OWN = Path(__file__).with_name("published_performance.jsonl")
MACHINES = {"a100-80g": "a100", "h100": "h100"}
TIMED = ("train", "generate", "decode", "prefill")
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
    model, speed = model_of(point["model"]), Roofline(hardware)
    if "lora_rank" in point:
        model = replace(model, lora=Lora(point["lora_rank"]))
    dp, tp, pp, cp = point["dp"], point["tp"], point["pp"], point.get("context_parallel", 1)
    stages, last = stage_layers(model, pp), model.n_layers + 1
    shards = [
        StageShard(model, tp, len(layers) - (0 in layers) - (last in layers), 0 in layers, last in layers, True,
                   RECOMPUTE[point["recompute"]], point.get("sequence_parallel", tp > 1))
        for layers in stages
    ]  # fmt: skip
    work = Work.of([point["seq"]] * point["micro_batch"])
    work = work._replace(tokens=work.tokens // cp, pairs=work.pairs // cp)
    n = point["global_batch"] // dp // point["micro_batch"]
    forward, backward = zip(*(speed.train(shard, work, range(tp)) for shard in shards), strict=True)
    sends = (speed.send(work.tokens * model.hidden * 2 / tp, 0, tp),) * pp
    seconds = n * (forward[0] + backward[0])
    if pp > 1:
        seconds = uniform_makespan(train_schedule, n, forward, backward, sends)
    numel, replicas = max(shard_numels(model, tp, pp)), range(0, cp * dp * tp, tp)
    seconds += speed.optimizer(shards[0], numel // (cp * dp))
    seconds += speed.collective(CollectiveKind.REDUCE_SCATTER, 4 * numel, replicas)
    return seconds + speed.collective(CollectiveKind.ALL_GATHER, 2 * numel, replicas)


def generation_seconds(point: Point, hardware: Hardware) -> float:
    """Return the predicted seconds of a batch, with its prefill if the point includes it."""
    model, speed, ranks = model_of(point["model"]), Roofline(hardware), range(point["tp"])
    shard = StageShard(model, point["tp"], model.n_layers, True, True, True)
    new = point.get("new", 0)
    seconds = new * speed.decode(shard, point["batch"], point["prompt"] + new / 2, ranks)
    if point["kind"] in ("generate", "prefill"):
        seconds += speed.forward(shard, Work.of([point["prompt"]] * point["batch"]), ranks)
    return seconds


def ratio(point: Point) -> float:
    """Return the predicted time divided by the published one."""
    hardware = replace(read_hardware(MACHINES[point["hardware"]]), compute_capability=9.0)  # decoding is captured
    if "memory_bandwidth" in point:  # of a GPU with other memory than the machine's
        hardware = replace(hardware, memory_bandwidth=point["memory_bandwidth"])
    if point["kind"] == "train":
        return training_seconds(point, hardware) / float(point["seconds"])
    if point["kind"] == "prefill":
        return generation_seconds(point, hardware) / float(point["seconds"])
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
    not_compared: Counter[tuple[str, str]] = Counter()
    for point in points([OWN, *options.files]):
        if point["kind"] not in TIMED:
            not_compared[point["kind"], point["source"]] += 1
            continue
        found = ratio(point)
        by_source.setdefault((point["kind"], point["source"]), []).append(found)
        if options.all:
            print(f"{found:5.2f}  {describe(point)}")
    for (kind, source), ratios in by_source.items():
        errors = sorted(abs(one - 1) for one in ratios)
        p90 = errors[int(0.9 * (len(errors) - 1))]
        print(f"{kind:8} {len(ratios):3} points: median error {statistics.median(errors):.0%}, 90 % below {p90:.0%}, "
              f"predicted / published {min(ratios):.2f} to {max(ratios):.2f}: {source}")  # fmt: skip
    for (kind, source), n in not_compared.items():
        print(f"{kind:8} {n:3} points, not compared: {source}")


if __name__ == "__main__":
    main()
