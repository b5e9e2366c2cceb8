"""Shared by tests of predictions: a small Llama, synthetic machines, and PPO planners for them."""

from dataclasses import replace
from typing import Any

from realhf.api.config import ModelSpec
from realhf.api.execution_plan import MicroBatching
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Hardware, Link, Workload
from realhf.api.model_config import ModelConfig
from realhf.experiments.ppo import PPOExperiment
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.planner import Planner

FREE = 1e30
"""Bytes or operations per second that take no time."""
LLAMA = ModelConfig("llama", n_layers=4, hidden=64, n_heads=8, n_kv_heads=4, head_dim=8, intermediate=160, vocab=120,
                    max_positions=4096)  # fmt: skip
WIDE = replace(LLAMA, n_layers=8, hidden=512, n_heads=16, n_kv_heads=8, head_dim=32, intermediate=1408, vocab=2048)
CRITIC = replace(LLAMA, head="scalar")
TOY = Hardware("toy", node_size=4, memory=1e9, flops=1e12, memory_bandwidth=1e11, node=Link(1e10, 1e-6),
               cluster=Link(1e9, 1e-5), host=Link(1e9, 1e-5), kernel=1e-7, call=1e-4, reserved=1e6)  # fmt: skip
COMPUTE_ONLY = replace(TOY, memory_bandwidth=FREE, node=Link(FREE), cluster=Link(FREE), host=Link(FREE), kernel=0.0)
"""A machine on which only arithmetic takes time."""


class JitteringSpeed(Roofline):
    """Workers whose times vary."""

    @property
    def jitter(self) -> float:
        return 0.1


def layout(text: str, start: int = 0) -> Layout:
    """Return a layout on contiguous workers from ``start``, with a strategy like ``d2t2p1``."""
    strategy = ParallelStrategy.parse(text)
    return Layout(DeviceMesh(tuple(range(start, start + strategy.world))), strategy)


def ppo_planner(
    n_workers: int = 4,
    hardware: Hardware = TOY,
    actor: ModelConfig = LLAMA,
    batch: int = 8,
    workload: Workload | None = None,
    device: str = "cuda",
    options: dict[str, Any] | None = None,
    **spec: Any,
) -> Planner:
    """Return a planner of PPO by the roofline; ``spec`` has options of all models, ``options`` those of PPO."""
    experiment = PPOExperiment()
    experiment.dataset.train_bs_n_seqs = batch
    experiment.ppo.ppo_n_minibatches = 2
    experiment.ppo.gen.max_new_tokens = 24
    for name, value in (options or {}).items():
        setattr(experiment.ppo, name, value)
    for role in ("actor", "critic", "ref", "rew"):
        setattr(experiment, role, ModelSpec(config="-", init_from_scratch=True, **spec))
    graph, roles, sampling = experiment.graph(), experiment.roles(), experiment.sampling_options()
    models = {role: replace(actor, head="scalar" if role in ("critic", "rew") else "lm") for role in graph.roles}
    rows = workload or Workload(((16,), (10,), (13,)), (24, 12, 18), experiment.samples_per_prompt())
    cost = CostModel(graph, models, roles, Roofline(hardware), rows, hardware.node_size, sampling)
    memory = MemoryModel(graph, models, roles, rows, AnalyticMemory(device), hardware.reserved, device, sampling)
    limits = {mfc.name: MicroBatching(max_tokens_per_mb=4096) for mfc in graph.mfcs}
    return Planner(graph, Candidates(cost, memory, hardware, batch, limits), n_workers, max_evaluations=3000)
