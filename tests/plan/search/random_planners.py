"""Random planners: any experiment, dense and routed models, unequal rows, several nodes or shared cores."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from realhf.api.config import ModelSpec
from realhf.api.config.preference import DPOConfig, PreferenceLoss, RewardModelType, RWConfig
from realhf.api.execution_plan import ExecutionPlan, MicroBatching
from realhf.api.experiment import Experiment, MultiStageExperiment
from realhf.api.machine import EnvironmentLoad, Hardware, Link, Workload
from realhf.api.model_config import ModelConfig
from realhf.experiments import EXPERIMENTS, experiment_class
from realhf.plan.compile.check import layouts
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.planner import Planner
from tests.plan.search.planners import LLAMA, TOY, JitteringSpeed

NAMES = tuple(name for name in EXPERIMENTS if not issubclass(experiment_class(name), MultiStageExperiment))
ROUTED = replace(LLAMA, family="mixtral", intermediate=0, n_experts=8, experts_per_token=2, expert_intermediate=96)
NUMBERS = (1, 1, 2, 3)


def random_planner(seed: int, name: str = "", hardware: Hardware | None = None, n_workers: int = 0) -> Planner:
    """Return a planner of a random experiment; ``hardware`` and ``n_workers`` are random if they are not given."""
    random = Random(f"{seed} {name}")
    experiment = random_experiment(random, name or random.choice(NAMES))
    graph, roles, sampling = experiment.divided_graph(), experiment.roles(), experiment.planned_sampling()
    models = {role: replace(random_model(random), head="scalar" if spec.scalar_head else "lm")
              for role, spec in roles.items()}  # fmt: skip
    models |= {role: models[spec.starts_as] for role, spec in roles.items() if spec.starts_as}
    models |= {sync.target: models[sync.source] for sync in graph.syncs}
    workload = random_workload(random, sampling is not None, experiment.samples_per_prompt())
    hardware = hardware or random_hardware(random)
    node = hardware.node_size
    n_workers = n_workers or random.choice((1, 2, 3)) * node
    device = "cpu" if hardware.cores else "cuda"
    shares = device == "cpu" and random.random() < 0.5
    environment = EnvironmentLoad(random.randint(1, 4), random.choice((1e-4, 1e-2)), 2, random.choice((1, 8)), 16)
    load = environment if sampling and random.random() < 0.2 else None
    speed = (JitteringSpeed if Random(f"jitter {seed}").random() < 0.3 else Roofline)(hardware)
    cost = CostModel(graph, models, roles, speed, workload, node, sampling, shares, load)
    memory = MemoryModel(graph, models, roles, workload, AnalyticMemory(device), hardware.reserved, device, sampling,
                         shares, node)  # fmt: skip
    tokens = random.choice((64, 512, 4096))
    limits = {mfc.name: MicroBatching(random.choice((1, 1, 2)), tokens) for mfc in graph.mfcs}
    calls = Candidates(cost, memory, hardware, experiment.dataset.train_bs_n_seqs, limits)
    return Planner(graph, calls, n_workers, experiment.max_staleness, max_evaluations=5000)


def random_experiment(random: Random, name: str) -> Experiment:
    experiment = experiment_class(name)()
    experiment.dataset.train_bs_n_seqs = random.randint(1, 9)
    experiment.max_staleness = random.choice((0, 0, 1, 2))
    for role in experiment.roles():
        spec = ModelSpec(config="-", init_from_scratch=True, bf16=random.random() < 0.5, offload=random.random() < 0.3,
                         gradient_checkpointing=random.random() < 0.5)  # fmt: skip
        spec.optimizer.offload = random.random() < 0.2
        setattr(experiment, role, spec)
    if isinstance(options := getattr(experiment, "dpo", None), DPOConfig):
        options.loss = random.choice([*PreferenceLoss])
    if isinstance(options := getattr(experiment, "rw", None), RWConfig):
        options.type = random.choice([*RewardModelType])
    if (sampling := experiment.sampling_options()) is not None:
        sampling.max_new_tokens, sampling.max_num_seqs = 24, random.choice((2, 8, 64))
    if (ppo := getattr(experiment, "ppo", None)) is not None:
        ppo.ppo_n_minibatches, ppo.group_size = random.choice(NUMBERS), random.choice(NUMBERS)
        ppo.recompute_logprobs, ppo.dynamic_sampling = random.random() < 0.3, random.random() < 0.2
        ppo.ref_ema_eta, ppo.actor_ema_eta = (random.choice((None, None, 0.5)) for _ in range(2))
        if not experiment.has_reference:
            ppo.ref_ema_eta = None
        if ppo.ref_ema_eta is not None:
            experiment.ref.offload = False
    divide(experiment, random)
    return experiment


def divide(experiment: Experiment, random: Random) -> None:
    """Let some experiments have several calls per step, except for training."""
    if random.random() < 0.3:
        placements = experiment.placements()
        for mfc in experiment.graph().mfcs:
            if not mfc.is_train:
                placements[mfc.name].prompts_per_call = random.choice((None, random.randint(1, mfc.batch_size)))


def random_model(random: Random) -> ModelConfig:
    base = random.choice((LLAMA, LLAMA, ROUTED))
    wide = random.choice((1, 4))
    return replace(base, n_layers=random.choice((2, 4, 6)), hidden=64 * wide, head_dim=8 * wide,
                   intermediate=base.intermediate * wide, expert_intermediate=base.expert_intermediate * wide,
                   n_kv_heads=random.choice((2, 4, 8)))  # fmt: skip


def random_workload(random: Random, is_generated: bool, samples: int) -> Workload:
    """Return lengths whose period is usually not that of a step."""

    def lengths(longest: int) -> tuple[int, ...]:
        return tuple(random.randint(1, longest) for _ in range(random.choice((1, 3, 5, 16))))

    if is_generated:
        return Workload(tuple((n,) for n in lengths(40)), lengths(24), samples)
    return Workload(tuple(tuple(random.randint(1, 90) for _ in range(random.choice(NUMBERS))) for _ in lengths(9)))


def random_hardware(random: Random) -> Hardware:
    slow = 10.0 ** random.uniform(-2, 1)
    node = random.choice((1, 2, 4))
    machine = replace(TOY, node_size=node, flops=TOY.flops * slow, node=Link(1e10 * slow, random.choice((0.0, 1e-6))),
                      cluster=Link(1e9 * slow, 1e-5), call=random.choice((0.0, 1e-4)),
                      launch=random.choice((0.0, 1e-6)))  # fmt: skip
    return replace(machine, cores=random.randint(1, node)) if random.random() < 0.3 else machine


def random_plan(planner: Planner, random: Random, shares: Sequence[float] = (1.0, 0.5)) -> ExecutionPlan:
    """Return any layouts that a search considers, with micro-batches that fit."""
    placements = {}
    for mfc in planner.graph.mfcs:
        config = planner.calls.cost.models.get(mfc.role or "")
        some = layouts(planner.n_workers, planner.cluster.node_size, config)
        placements[mfc.name] = planner.calls.of(mfc, random.choice(some), random.choice(shares)).placement
    return ExecutionPlan(planner.n_workers, placements)
