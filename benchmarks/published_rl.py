"""Compares the planner's prediction of whole RL steps with published ones.

A point becomes a GRPO experiment, a workload of its lengths and an execution plan of its layouts, which the planner
predicts. Of response lengths only the mean and the maximum are published: their distribution is the planner's default.
Engines divide responses among ranks, not prompts, so each is the only one of a prompt here, which is computed again.
Expert parallelism is priced by ``ExpertParallel``; context parallelism counts as data parallelism.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published_engines import RL_ENGINES, RLEngine
from benchmarks.published_models import model_of
from realhf.api.config import ModelSpec
from realhf.api.config.choices import Backend, Recompute
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Hardware, Workload
from realhf.experiments.grpo import GRPOExperiment
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.cost.speed import StageShard, Work, shard_numels
from realhf.plan.lengths import default_lengths, representative_lengths
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.planner import Planner

Point = Mapping[str, Any]
GPU_BYTES = {"h100": 81559 << 20}  # as nvidia-smi lists an H100 with 80 GB; engines take a share of it
INFERENCE = ("ref_inf", "actor_inf")


def missing(point: Point) -> str:
    """Return why a point cannot be predicted, or an empty string."""
    if point["engine"] not in RL_ENGINES:
        return "ZeRO stage, offloading and mean lengths of rows are not published"
    if "unreliable" in point:
        return str(point["unreliable"])
    if point["steps_off_policy"] and "n_gpus_generate" not in point:
        return "the number of GPUs that generate is not published"
    if "train_micro_batch" not in point:
        return "micro-batches and recomputation of training are not published"
    return ""


def ratio(point: Point, hardware: Hardware, tuned: float) -> float:
    """Return the predicted seconds of a step divided by the published ones."""
    planner, plan = planner_of(point, hardware, tuned)
    return planner.predict(plan).seconds / float(point["seconds"])


@dataclass(frozen=True)
class ExpertParallel(Roofline):
    """A roofline of passes whose experts are divided among ``ep`` ranks, which exchange their tokens."""

    ep: int = 1

    def forward(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> float:
        return super().forward(self._local(shard), work, ranks) + self._exchanges(shard, work)

    def train(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        forward, backward = super().train(self._local(shard), work, ranks)
        exchanges, again = self._exchanges(shard, work), shard.recompute is Recompute.full
        return forward + exchanges, backward + (1 + again) * exchanges

    def _local(self, shard: StageShard) -> StageShard:
        """Return a shard with this rank's experts, each of which gets the rows of all ``ep`` ranks."""
        model = shard.model
        return replace(shard, model=replace(model, n_experts=model.n_experts // self.ep)) if self.ep > 1 else shard

    def _exchanges(self, shard: StageShard, work: Work) -> float:
        """Return the seconds of sending the hidden states of tokens to their experts and back, in each block."""
        if self.ep == 1:
            return 0.0
        model, elsewhere = shard.model, (self.ep - 1) / self.ep
        sent = elsewhere * work.tokens * model.hidden * shard.itemsize * model.experts_per_token / shard.tp
        return 2 * shard.n_blocks * self.send(sent, 0, self.ep * shard.tp - 1)


def planner_of(point: Point, hardware: Hardware, tuned: float) -> tuple[Planner, ExecutionPlan]:
    """Return a planner of a point's experiment, and its plan. ``tuned`` is the speed of an engine's tuned products."""
    engine, model, batch = RL_ENGINES[point["engine"]], model_of(point), point["samples"]
    prompt = point["mean_total"] - point["mean_new"]
    longest = point["max_sequence"] - prompt
    experiment = GRPOExperiment(
        actor=ModelSpec(config="-", init_from_scratch=True, bf16=True, overlap_grad_reduce=True, tp_overlap=True,
                        gradient_checkpointing=point.get("recompute") == "full",
                        sequence_parallel=point.get("sequence_parallel", True)),
    )  # fmt: skip
    experiment.dataset.train_bs_n_seqs, ppo = batch, experiment.ppo
    ppo.group_size, ppo.recompute_logprobs, ppo.ppo_n_minibatches = 1, True, batch // point["train_batch"]
    ppo.gen.max_new_tokens, ppo.gen.max_num_seqs = longest, n_cached_rows(point, engine)
    lengths = representative_lengths(default_lengths(point["mean_new"], longest), batch, longest)
    workload = Workload(((prompt,),), lengths)
    graph, roles, sampling = experiment.graph(), experiment.roles(), experiment.sampling_options()
    models = dict.fromkeys(graph.roles, model)
    hardware = replace(hardware, host=engine.refit)
    speed = ExpertParallel(hardware, replace(engine.traits, products=tuned), point["train"].get("ep", 1))
    ahead = point["steps_off_policy"] if engine.is_continuous else 0
    cost = CostModel(graph, models, roles, speed, workload, hardware.node_size, sampling, rollouts_at_once=1 + ahead)
    memory = MemoryModel(graph, models, roles, workload, AnalyticMemory("cuda"), hardware.reserved, "cuda", sampling)
    calls = Candidates(cost, memory, hardware, batch, {mfc.name: MicroBatching() for mfc in graph.mfcs})
    planner = Planner(graph, calls, point["n_gpus"], point["steps_off_policy"])
    return planner, plan_of(point, engine)


def n_cached_rows(point: Point, engine: RLEngine) -> int:
    """Return how many rows of the mean length fit into the key/value cache of a generating replica."""
    tp, model = point["generate"]["tp"], model_of(point)
    share = engine.separate_cache if point["steps_off_policy"] else engine.shared_cache
    weights = 2 * shard_numels(model, ParallelStrategy(tp=tp))[0]
    per_token = 2 * StageShard(model, tp, model.n_layers, True, True, True).kv_numel
    return max(1, int((share * GPU_BYTES[point["hardware"]] - weights) / per_token / point["mean_total"]))


def plan_of(point: Point, engine: RLEngine) -> ExecutionPlan:
    """Return the plan of a point: training and inference on the first GPUs, generation on all or on the others."""
    n_gpus, n_generate = point["n_gpus"], point.get("n_gpus_generate", 0)
    train, generate = point["train"], point["generate"]
    n_train = n_gpus - n_generate if point["steps_off_policy"] else n_gpus
    first = n_gpus - n_generate if point["steps_off_policy"] else 0
    trained = _layout(0, n_train, train["tp"], train["pp"])
    tokens = point["max_sequence"]
    inference = MicroBatching(max_tokens_per_mb=tokens * point.get("logprob_batch", engine.logprob_batch))
    placements = {name: Placement(trained, inference) for name in (*INFERENCE, "rew_inf")}
    generating = _layout(first, n_gpus, generate["tp"], generate["pp"])
    placements["actor_gen"] = Placement(generating, backend=Backend.vllm)
    micro_batches = MicroBatching(max_tokens_per_mb=tokens * point["train_micro_batch"])
    placements["actor_train"] = Placement(trained, micro_batches)
    return ExecutionPlan(n_gpus, placements)


def _layout(first: int, last: int, tp: int, pp: int) -> Layout:
    """Return a layout on the GPUs from ``first`` up to ``last``, all of which are data parallel otherwise."""
    ranks = tuple(range(first, last))
    return Layout(DeviceMesh(ranks), ParallelStrategy(len(ranks) // (tp * pp), tp, pp))
