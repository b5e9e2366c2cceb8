"""Times generation with prompt lookup against generation without it, on CPU.

    python benchmarks/bench_lookup.py [--models small,135m] [--rows 1,4,16] [--rounds 3]

Models have random weights, blocks that change little, and a head tied to the embedding, so they repeat their last token
nearly always at a low temperature, which bounds the gain, and never at a high one, where rows stop proposing. 128 new
tokens per row, one thread. Both run in turns, and their results are compared bit by bit. Ratios of medians.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from bench_peer import SIZES
from torch import nn

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import ParallelContext
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.native import NativeEngine, build_engine

N_NEW, N_PROPOSED = 128, 6


def engine_of(name: str) -> NativeEngine:
    model = SIZES[name][1]()
    model.model.layers.apply(make_small)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config, role = read_hf_config(Path(folder), scalar_head=False), RoleSpec(ModelSpec(folder))
        context = ParallelContext(Layout(DeviceMesh((0,)), ParallelStrategy()), 0)
        return build_engine(config, role, context, False, True, 1, 1, (), None)


def make_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=1e-3)


def prompts_of(n: int, vocab: int) -> SequenceBatch:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocab, (30 + i,), generator=generator) for i in range(n)]
    return SequenceBatch(tuple(RowId(i, PROMPT) for i in range(n)), {"prompts": Column.of(rows)})


def compare(engine: NativeEngine, n_rows: int, temperature: float, rounds: int) -> tuple[float, float]:
    """Return seconds without over seconds with proposals, and the share of tokens that repeat the one before."""
    seconds: dict[int, list[float]] = {0: [], N_PROPOSED: []}
    prompts, found = prompts_of(n_rows, engine.config.vocab), dict[int, SequenceBatch]()
    for _ in range(rounds + 1):
        for n_proposed, taken in seconds.items():
            options = GenerationConfig(
                max_new_tokens=N_NEW, temperature=temperature, prompt_lookup_num_tokens=n_proposed
            )
            began = time.perf_counter()
            found[n_proposed] = engine.generate(prompts, options, 1, seed=1)
            taken.append(time.perf_counter() - began)
    for name, column in found[0].columns.items():
        assert torch.equal(found[N_PROPOSED][name], column.data), name
    plain, proposed = (statistics.median(taken[1:]) for taken in seconds.values())  # the first round is warm-up
    tokens = found[0]["tokens"]
    return plain / proposed, (tokens[1:] == tokens[:-1])[found[0]["prompt_mask"][1:] == 0].double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,135m")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--temperatures", default="0.5,3.5,20")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models.split(","):
        engine = engine_of(name)
        for n_rows in map(int, args.rows.split(",")):
            for temperature in map(float, args.temperatures.split(",")):
                gain, repeated = compare(engine, n_rows, temperature, args.rounds)
                print(f"{name:6} {n_rows:3} rows, {repeated:4.0%} repeated: {gain:.2f} x", flush=True)


if __name__ == "__main__":
    main()
