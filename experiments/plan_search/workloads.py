"""ReaL's workloads: PPO with LLaMA-shaped models on 16 to 128 GPUs, with short and long contexts."""

from experiments.plan_search.engines import OURS, StudyEngine, memory_model
from realhf.api.config import ModelSpec
from realhf.api.execution_plan import MicroBatching
from realhf.api.machine import Workload
from realhf.api.model_config import ModelConfig
from realhf.experiments.ppo import PPOExperiment
from realhf.plan.cost.cost import CostModel
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.planner import Planner

SIZES = {"7B": (32, 4096, 32, 32, 11008), "13B": (40, 5120, 40, 40, 13824), "34B": (48, 8192, 64, 8, 22016),
         "70B": (80, 8192, 64, 8, 28672)}  # fmt: skip
WORKLOADS = {"short": (512, 1024, 1024), "long": (128, 1024, 7168)}
"""Prompts per step, tokens per prompt, tokens per response."""
DEVICES = (16, 32, 64, 128)
MAX_EVALUATIONS = 20_000
"""Evaluations of a search, which does not depend on the clock."""
WEAK_SCALING = dict(zip(SIZES, DEVICES, strict=True))


def llama(size: str, head: str = "lm") -> ModelConfig:
    n_layers, hidden, n_heads, n_kv_heads, intermediate = SIZES[size]
    return ModelConfig("llama", n_layers, hidden, n_heads, n_kv_heads, hidden // n_heads, intermediate, vocab=32000,
                       max_positions=8192, head=head)  # fmt: skip


def planner_for(actor: str, devices: int, workload: str, engine: StudyEngine = OURS) -> Planner:
    batch, prompt, response = WORKLOADS[workload]
    experiment = PPOExperiment()
    experiment.dataset.train_bs_n_seqs = batch
    experiment.ppo.ppo_n_minibatches = 8
    experiment.ppo.gen.max_new_tokens = experiment.ppo.gen.min_new_tokens = response
    experiment.ppo.gen.max_num_seqs = batch
    for role in ("actor", "critic", "ref", "rew"):
        setattr(experiment, role, ModelSpec(config="-", init_from_scratch=True, bf16=True, gradient_checkpointing=True))
    graph, roles, sampling = experiment.graph(), experiment.roles(), experiment.sampling_options()
    reward_model = llama("7B", head="scalar")
    models = {"actor": llama(actor), "ref": llama(actor), "critic": reward_model, "rew": reward_model}
    hardware = engine.hardware
    rows = Workload(((prompt,),), (response,))
    speed = Roofline(hardware, engine.traits)
    cost = CostModel(graph, models, roles, speed, rows, hardware.node_size, sampling)
    memory = memory_model(engine.traits)(graph, models, roles, rows, AnalyticMemory("cuda"), hardware.reserved, "cuda",
                                         sampling)  # fmt: skip
    limits = {mfc.name: MicroBatching(max_tokens_per_mb=32768) for mfc in graph.mfcs}
    calls = Candidates(cost, memory, hardware, batch, limits)
    return Planner(graph, calls, devices, max_evaluations=MAX_EVALUATIONS)
