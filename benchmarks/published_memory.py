"""Compares the planner's memory model with published peaks of a device's memory in training and in generation.

Activations and caches are those of the planner (``AnalyticMemory``, ``MemoryModel``); how many bytes an engine keeps
per parameter, and what its figure includes, is in published_engines.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.published_engines import MEMORY, PublishedMemory, engine_name
from benchmarks.published_models import model_of
from realhf.api.batch_meta import RowId
from realhf.api.config import GenerationConfig, ModelSpec
from realhf.api.config.choices import Recompute
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Workload
from realhf.api.model_config import ModelConfig
from realhf.arch.param_specs import chunk_layers, param_specs
from realhf.experiments.gen import GenerationExperiment
from realhf.plan.cost.cost import BatchRows
from realhf.plan.cost.memory import MemoryModel, pipelined_bytes, sharded_layer_bytes
from realhf.plan.cost.speed import StageShard, Work, stage_numels
from realhf.plan.cost.zero import layer_numels
from realhf.plan.machines.roofline import AnalyticMemory

Point = Mapping[str, Any]
KEPT_SHARE = 0.05
"""Share of the reserved memory in freed blocks that the allocator keeps: an assumption."""
RECOMPUTE = {"none": None, "selective": Recompute.selective, "full": Recompute.full}


def missing(point: Point) -> str:
    """Return why a point cannot be predicted, or an empty string."""
    return "" if engine_name(point) in MEMORY else f"the memory of {engine_name(point)} is not described"


def predicted_bytes(point: Point) -> float:
    """Return the predicted peak of a device's memory in bytes, as the source measures it."""
    engine = MEMORY[engine_name(point)]
    nbytes = generation_bytes(point, engine) if point.get("mode") == "generate" else training_bytes(point, engine)
    return nbytes / (1 - KEPT_SHARE) if engine.has_reserve else nbytes


def training_bytes(point: Point, engine: PublishedMemory) -> float:
    """Return the largest peak over pipeline stages: in a pass, or while gradients are reduced."""
    model, tp, zero = model_of(point), point["tp"], point.get("zero", 1)
    layers = cost_balanced_layers(model, point["pp"]) if engine.balances_head else chunk_layers(model, point["pp"])
    shards = [_shard(point, model, of_stage) for of_stage in layers]
    traits = engine.activations
    if engine.copies_batched_output and point["micro_batch"] > 1:
        traits = replace(traits, saved_queries=traits.saved_queries + 1)
    work = Work.of([point["seq"]] * point["micro_batch"])
    activations = pipelined_bytes(AnalyticMemory("cuda", traits), shards, work)
    if point.get("recompute_kind") == "every-second-matmul":
        saved = [shard.n_blocks * half_of_outputs_numel(model, tp) * 2 * work.tokens for shard in shards]
        activations = [peak + more for peak, more in zip(activations, saved, strict=True)]
    peaks = [
        max(_resident(point, engine, numel) + nbytes + engine.pass_gradients * numel, _reducing(point, engine, numel))
        for numel, nbytes in zip(stage_numels(param_specs(model), tp, layers), activations, strict=True)
    ]
    per_stage = layer_numels(model, ParallelStrategy(tp=tp, pp=point["pp"]))
    gathered = max(sharded_layer_bytes(of_stage, 2, zero, True) for of_stage in per_stage)
    return max(peaks) + gathered


def _resident(point: Point, engine: PublishedMemory, numel: int) -> float:
    """Return the bytes of a device that has ``numel`` parameters of its stage, between passes."""
    zero, dp = point.get("zero", 1), point["dp"]
    optimizer = engine.optimizer / (dp if zero else 1)
    stored = (engine.weights + engine.gradients) / (dp if zero == 3 else 1)
    buckets = engine.buckets if not zero and dp > 1 else 0
    return numel * (stored + optimizer + buckets)


def _reducing(point: Point, engine: PublishedMemory, numel: int) -> float:
    if point.get("zero", 1) != 1 or point["dp"] == 1:
        return 0.0
    return _resident(point, engine, numel) + numel * (engine.reduction + engine.reduced / point["dp"])


def _shard(point: Point, model: ModelConfig, layers: range) -> StageShard:
    last = model.n_layers + 1
    recompute = Recompute.full if "recompute_kind" in point else RECOMPUTE[point["recompute"]]
    return StageShard(model, point["tp"], len(layers) - (0 in layers) - (last in layers), 0 in layers, last in layers,
                      True, recompute, point.get("sequence_parallel", point["tp"] > 1))  # fmt: skip


@cache
def cost_balanced_layers(model: ModelConfig, pp: int) -> tuple[range, ...]:
    """Return the layers of each stage if a stage ends with the first layer that reaches its share of the parameters.

    The vocabulary head counts as its parameters, the embedding as nothing (nanotron's ``get_block_compute_costs``).
    """
    block = model.hidden * (4 * model.n_heads * model.head_dim + 3 * model.intermediate)
    costs = [0, *[block] * model.n_layers, model.vocab * model.hidden]
    stages, first, done = list[range](), 0, 0
    for layer, cost in enumerate(costs):
        done += cost
        if done * pp > sum(costs) * (len(stages) + 1):
            stages.append(range(first, layer + 1))
            first = layer + 1
    stages.append(range(first, len(costs)))
    return (*stages, *[range(0)] * (pp - len(stages)))


def half_of_outputs_numel(model: ModelConfig, tp: int) -> float:
    """Return the elements per token that torchtitan's selective recomputation saves beside a block's input.

    They are the outputs of attention and of every second product: of queries, values, the gate, the down projection.
    """
    heads = model.head_dim * (2 * model.n_heads + model.n_kv_heads)
    return (heads + model.intermediate) / tp + model.hidden


def generation_bytes(point: Point, engine: PublishedMemory) -> float:
    """Return the peak of generating ``new`` tokens for a batch of prompts, all of which are computed together."""
    experiment = GenerationExperiment(model=ModelSpec(config="-", init_from_scratch=True, bf16=True))
    batch, prompt = point["batch"], point["prompt"]
    sampling = GenerationConfig(max_new_tokens=point["new"], max_num_seqs=batch)
    workload, graph = Workload(((prompt,),), (point["new"],)), experiment.graph()
    memory = MemoryModel(graph, {"model": model_of(point)}, experiment.roles(), workload,
                         AnalyticMemory("cuda", engine.activations), engine.context, "cuda", sampling)  # fmt: skip
    strategy = ParallelStrategy(tp=point["tp"])
    layout = Layout(DeviceMesh(tuple(range(strategy.world))), strategy)
    placement = Placement(layout, MicroBatching(max_tokens_per_mb=batch * prompt))
    rows = BatchRows(tuple(RowId(i, 0) for i in range(batch)), (prompt,) * batch, (0,) * batch)
    return memory.devices(ExecutionPlan(strategy.world, {"gen": placement}), {"gen": [rows]})[0].total


def ratio(point: Point) -> float:
    """Return the predicted memory divided by the published one."""
    return predicted_bytes(point) / float(point["bytes"])
