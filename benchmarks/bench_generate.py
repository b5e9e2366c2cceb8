"""Times generation in layouts of two workers against one worker, on CPU:

python benchmarks/bench_generate.py [--hidden 512] [--layers 8] [--vocab 2048] [--rounds 7]

Each figure is a median; the layouts are interleaved. On a shared machine only ratios are meaningful. 16 prompts of 25
to 55 tokens with 8 responses each, which end by a stop token (1 in 32) or after 64 tokens. One thread per worker.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.comm.process_groups import (
    ParallelContext,
    destroy_process_group,
    init_process_group,
    make_groups,
    open_rendezvous,
)
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.native import NativeEngine, build_engine

STRATEGIES = {name: ParallelStrategy.parse(name) for name in ("d1", "d2", "p2", "t2")}
LAYOUTS = {name: Layout(DeviceMesh(tuple(range(s.world))), s) for name, s in STRATEGIES.items()}
N_PROMPTS, N_RESPONSES, N_NEW, MEAN = 16, 8, 64, 32


def seconds_of(engine: NativeEngine | None, seed: int) -> tuple[float, float]:
    """Return the time of the slowest worker, and the number of tokens that this worker's replica sampled."""
    dist.barrier()
    begin, n_sampled = time.perf_counter(), 0.0
    if engine is not None:
        vocab, share = engine.config.vocab, range(engine.context.coord.dp, N_PROMPTS, engine.context.layout.strategy.dp)
        rows = [torch.arange(25 + 2 * number) * 7 % vocab for number in share]
        prompts = SequenceBatch(tuple(RowId(number, PROMPT) for number in share), {"prompts": Column.of(rows)})
        sampling = GenerationConfig(max_new_tokens=N_NEW, stop_token_ids=list(range(vocab // MEAN)))
        n_sampled = float((engine.generate(prompts, sampling, N_RESPONSES, seed)["prompt_mask"] == 0).sum())
    last = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return last.item(), n_sampled


def run_rank(rank: int, port: int, config: ModelConfig, rounds: int) -> None:
    """Run one worker; rank 0 prints. The first round is warm-up."""
    torch.set_num_threads(1)
    _store = init_process_group("127.0.0.1", port, rank, 2, "cpu", 120.0, None, bytes(32))
    groups, role = make_groups([(0, 1)], rank), RoleSpec(ModelSpec(init_from_scratch=True))
    engines = {
        name: build_engine(config, role, ParallelContext(where, rank, groups=groups), False, True, 1, 1, (0,), None)
        for name, where in LAYOUTS.items()
        if rank in where.mesh.ranks
    }
    results = [{name: seconds_of(engines.get(name), seed) for name in LAYOUTS} for seed in range(rounds + 1)]
    medians = {name: statistics.median(one[name][0] for one in results[1:]) for name in LAYOUTS}
    n_sampled = statistics.median(one["d1"][1] for one in results[1:])
    for name, seconds in medians.items() if rank == 0 else ():
        print(f"{name} {seconds:7.3f} s {n_sampled / seconds:8.0f} tokens/s {medians['d1'] / seconds:6.2f} x d1")
    dist.barrier()
    destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hidden": 512, "layers": 8, "vocab": 2048, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    heads = o.hidden // 64
    config = ModelConfig("llama", o.layers, o.hidden, heads, max(heads // 4, 1), 64, 3 * o.hidden, o.vocab, 256)
    store = open_rendezvous("127.0.0.1", 0, 120.0)
    torch.multiprocessing.spawn(run_rank, (store.port, config, o.rounds), nprocs=2)


if __name__ == "__main__":
    main()
