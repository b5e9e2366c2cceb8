"""Times the planner on one core: plan simulations per second, searches, whole plans, and reallocation plans.

python benchmarks/bench_plan.py [--seed 0]

Problems are the six calls of PPO with synthetic costs: work divided by devices, an overhead per kind of parallelism,
and a minimum that more devices do not reduce; models grow with the cluster. Whole plans are of LLaMA models on H100
with the cost model.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

from realhf.api.config import ModelSpec
from realhf.api.execution_plan import MicroBatching
from realhf.api.graph import Graph
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Cost, Workload
from realhf.api.model_config import ModelConfig
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.experiments.ppo import PPOExperiment
from realhf.plan.compile.realloc import plan_realloc
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.lengths import FixedLengths, LengthDistribution, LogNormalLengths, representative_lengths
from realhf.plan.machines.hardware import read_hardware
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.cpp_evaluator import CppEvaluator, evaluator
from realhf.plan.search.evaluate import PythonEvaluator
from realhf.plan.search.mcmc import Chain, SplitMix64
from realhf.plan.search.planner import Planner
from realhf.plan.search.problem import LayoutOption, Problem, ReallocCost
from realhf.plan.search.search import search

LLAMA_7B = ModelConfig("llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096)
LLAMA_34B = replace(LLAMA_7B, n_layers=48, hidden=8192, n_heads=64, n_kv_heads=8, intermediate=22016)
ACTORS = {8: LLAMA_7B, 128: LLAMA_34B, 1024: replace(LLAMA_34B, n_layers=80, intermediate=28672)}
"""Actor and reference by devices: 7B, 34B and 70B; critic and reward model have 7B."""
LENGTHS = (FixedLengths(1024), LogNormalLengths(600, 0.7))
SIZES = {8: 7e9, 128: 34e9, 1024: 70e9}
"""Parameters of actor and reference by devices; critic and reward model have 7e9."""
WORK = {"actor_gen": 8.0, "rew_inf": 1.0, "ref_inf": 1.0, "critic_inf": 1.0, "actor_train": 3.0, "critic_train": 3.0}
"""Device-hours of each call per 1e12 parameters."""
MIN_FRACTION = 1.0
"""Minimum time of a call, relative to its time on one node."""
CAPACITY, LINK, NODE = 80e9, 50e9, 8


def layouts(n_devices: int) -> Iterator[Layout]:
    """Yield all power-of-two strategies on aligned meshes of a power of two devices."""
    powers = [1 << i for i in range(n_devices.bit_length())]
    for size in powers:
        starts = range(0, n_devices, size)
        for first, tp, pp in product(starts if len(starts) <= 16 else [*starts[:8], *starts[-8:]], powers, powers):
            if tp <= NODE and pp <= 16 and size % (tp * pp) == 0:
                mesh = DeviceMesh(tuple(range(first, first + size)))
                yield Layout(mesh, ParallelStrategy(size // tp // pp, tp, pp))


def problem_on(n_devices: int, per_mesh: int) -> Problem:
    """Return PPO on a cluster; each call has the ``per_mesh`` fastest layouts per mesh that fit into memory."""
    config = PPOExperiment()
    config.dataset.train_bs_n_seqs = 512
    graph = config.graph()
    candidates = {m.name: list(fastest_layouts(graph, m.name, n_devices, per_mesh)) for m in graph.mfcs}

    def move(mfc: str, option: int, home: int) -> ReallocCost:
        home_mfc = graph.trainer(graph[mfc].role or "") or graph[mfc]
        src, dst = candidates[home_mfc.name][home][1], candidates[mfc][option][1]
        nbytes = weights(graph, mfc, n_devices) / (dst.strategy.tp * dst.strategy.pp)
        return ReallocCost() if src == dst else ReallocCost(Cost(nbytes / LINK, 0.0), nbytes)

    options = {name: [option for option, _ in some] for name, some in candidates.items()}
    return Problem(graph, options, n_devices, 512, CAPACITY, move, call_seconds=1e-3)


def weights(graph: Graph, mfc: str, n_devices: int) -> float:
    return 2 * (SIZES[n_devices] if graph[mfc].role in ("actor", "ref") else 7e9)


def fastest_layouts(graph: Graph, mfc: str, n_devices: int, per_mesh: int) -> Iterator[tuple[LayoutOption, Layout]]:
    """Yield the ``per_mesh`` fastest layouts of a call on each mesh."""
    by_mesh: dict[range, list[tuple[LayoutOption, Layout]]] = {}
    nbytes, trained = weights(graph, mfc, n_devices), graph.trainer(graph[mfc].role or "") is not None
    alone = WORK[mfc] * 3600 * nbytes / 2e12
    for layout in layouts(n_devices):
        (dp, tp, pp), n = (layout.strategy.dp, layout.strategy.tp, layout.strategy.pp), len(layout.mesh.ranks)
        overhead = (1 + 0.06 * (tp - 1)) * (1 + 0.12 * (pp - 1)) * (1 + 0.02 * dp.bit_length())
        seconds = overhead * (alone / n + MIN_FRACTION * alone / NODE / (tp * pp))
        ranks, share = range(layout.mesh.ranks[0], layout.mesh.ranks[-1] + 1), nbytes / (tp * pp)
        resident = share * (3 + 6 / dp if trained else 1)
        option = LayoutOption(ranks, ranks[-dp * tp :], (Cost(seconds, seconds * n),), Cost(0.01, 0.0), 6e9, resident)
        if resident + 6e9 <= CAPACITY:
            by_mesh.setdefault(ranks, []).append((option, layout))
    for some in by_mesh.values():
        yield from sorted(some, key=lambda pair: pair[0].compute[0].seconds)[:per_mesh]


def plans_per_second(evaluator: PythonEvaluator | CppEvaluator, problem: Problem, n: int, seed: int) -> float:
    """Return the proposals per second of a Markov chain."""
    rng = SplitMix64(seed)
    chain = Chain.start(rng, rng.random_choice(problem), 1e30)
    evaluator.run_chain(chain, n // 10, 1.0)
    begin = time.perf_counter()
    evaluator.run_chain(chain, n, 1.0)
    return n / (time.perf_counter() - begin)


def planner_on(n_devices: int, lengths: LengthDistribution) -> Planner:
    """Return a planner of PPO on H100: 512 prompts of 1,024 tokens and responses of up to 1,024 per step, bfloat16."""
    experiment = PPOExperiment()
    experiment.dataset.train_bs_n_seqs, experiment.ppo.gen.max_new_tokens = 512, 1024
    for role in ("actor", "critic", "ref", "rew"):
        setattr(experiment, role, ModelSpec(config="-", init_from_scratch=True, bf16=True, gradient_checkpointing=True))
    graph, roles, sampling = experiment.graph(), experiment.roles(), experiment.sampling_options()
    scorer, actor = replace(LLAMA_7B, head="scalar"), ACTORS[n_devices]
    models = {"actor": actor, "ref": actor, "critic": scorer, "rew": scorer}
    rows, hardware = Workload(((1024,),), representative_lengths(lengths, 512, 1024)), read_hardware("h100")
    cost = CostModel(graph, models, roles, Roofline(hardware), rows, hardware.node_size, sampling)
    memory = MemoryModel(graph, models, roles, rows, AnalyticMemory("cuda"), hardware.reserved, "cuda", sampling)
    limits = {mfc.name: MicroBatching() for mfc in graph.mfcs}
    return Planner(graph, Candidates(cost, memory, hardware, 512, limits), n_devices)


def slowest_realloc(n_devices: int, n_pairs: int, seed: int) -> tuple[float, str]:
    """Return the longest time to plan a reallocation of a 7B model between random layouts, and the layouts."""
    random, specs, slowest = Random(seed), param_specs(LLAMA_7B), (0.0, "")
    sizes = [s for s in (n_devices, n_devices // 2) if s]
    choices = [x for x in layouts(n_devices) if len(x.mesh.ranks) in sizes]
    for _ in range(n_pairs):
        src, dst = random.sample(choices, 2)
        begin = time.perf_counter()
        plan_realloc(specs, partial(stage_layers, LLAMA_7B), src, dst, NODE)
        slowest = max(slowest, (time.perf_counter() - begin, f"{src} -> {dst}"))
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    for n_devices, lengths in product(ACTORS, LENGTHS):
        planner = planner_on(n_devices, lengths)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        plan = planner.search(seed=seed).plan
        middle, middle_cpu = time.perf_counter(), time.process_time()
        step = planner.predict(plan).seconds
        spent = middle - begin, middle_cpu - begin_cpu, time.perf_counter() - middle
        print(f"{n_devices:5} H100, {lengths!s:<18}: planned in {spent[0]:5.2f} s ({spent[1]:.2f} s of CPU), predicted "
              f"in {spent[2]:.2f} s; step {step:.4g} s")  # fmt: skip
    for n_devices in SIZES:
        problem = problem_on(n_devices, per_mesh=4)
        fast, slow = evaluator(problem), PythonEvaluator(problem)
        if isinstance(fast, PythonEvaluator):
            print("the C++ planner is not built: run python setup.py build_ext --inplace")
        rates = plans_per_second(fast, problem, 50_000, seed), plans_per_second(slow, problem, 500, seed)
        print(f"{n_devices:5} devices: {rates[0]:9,.0f} plans/s in C++, {rates[1]:6,.0f} in Python")
        begin = time.perf_counter()
        result = search(problem, seed=seed)
        seconds, first = time.perf_counter() - begin, result.history[0][1]
        n_options = sum(map(len, problem.table))
        print(
            f"      search: {seconds:5.2f} s, {n_options} options, {result.n_evaluated:,} plans, {result.stop.value}; "
            f"step {result.seconds:.4g} s, greedy {first:.4g} s"
        )
    for n_devices in (64, 1024):
        seconds, pair = slowest_realloc(n_devices, 36, seed)
        print(f"{n_devices:5} devices: reallocation of a 7B model planned in at most {seconds:.3f} s ({pair})")


if __name__ == "__main__":
    main()
