"""Memory and times of adapters on quantized bases against the base without quantization, on one CPU worker:

    python benchmarks/bench_quantized.py [--rounds 3] [--bf16]

The model has the sizes of SmolLM2-135M, adapters have rank 16. A training step has 8 rows of 128 tokens; generation
samples 32 tokens for each of 8 prompts with 8 responses. Times are medians of rounds in turns after one of warm-up, of
the time of one thread, which other programs on the machine lengthen less; ratios are those of each round. Memory is
the peak of a process of its own, without that of its imports and of files.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

import torch

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, LoraOptions, ModelSpec
from realhf.api.config.choices import Quantization
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import Lora, ModelConfig
from realhf.arch.param_specs import param_specs
from realhf.comm.process_groups import ParallelContext
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Loss
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.engine.packing import ForwardOutputs
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import init_random, save_hf
from realhf.models.quantized_params import QuantizedParams

SMOL = ModelConfig("llama", n_layers=30, hidden=576, n_heads=9, n_kv_heads=3, head_dim=64, intermediate=1536,
                   vocab=49152, max_positions=2048, tied_embedding=True)  # fmt: skip
RANK, GROUP_SIZE = 16, 32
ONE = Layout(DeviceMesh((0,)), ParallelStrategy())


def batch(n: int, length: int, column: str) -> SequenceBatch:
    rows = [torch.arange(length) * (7 + i) % SMOL.vocab for i in range(n)]
    return SequenceBatch(tuple(RowId(i, PROMPT) for i in range(n)), {column: Column.of(rows)})


def likelihood(outputs: ForwardOutputs, rows: SequenceBatch) -> Loss:
    total = -outputs.logprobs(1.0).sum()
    return Loss(total, {"nll": (total.detach(), 1.0)})


def train(engine: NativeEngine) -> None:
    rows = batch(8, 128, "tokens")
    engine.train(rows, likelihood, float(rows["tokens"].numel()))


def generate(engine: NativeEngine) -> None:
    sampling = GenerationConfig(max_new_tokens=32, min_new_tokens=32)
    engine.generate(batch(8, 32, "prompts"), sampling, 8, 1)


CALLS: dict[str, Callable[[NativeEngine], None]] = {"generate": generate, "train": train}
T = TypeVar("T")


def make_engine(folder: Path, kind: Quantization, bf16: bool) -> NativeEngine:
    options = LoraOptions(RANK, quantization=kind)
    lora = Lora(RANK, options.alpha, (), kind.bits, GROUP_SIZE if kind.bits else 0)
    role = RoleSpec(ModelSpec(str(folder), bf16=bf16, lora=options))
    return build_engine(replace(SMOL, lora=lora), role, ParallelContext(ONE, 0), True, True, 1, 10, (0,), None)


def anonymous_mb() -> float:
    """Return this process's memory without pages of files, such as weights that are being read."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1e3


def peak_of(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call, and the largest memory of this process during it."""
    samples, ended = [anonymous_mb()], Event()

    def sample() -> None:
        while not ended.wait(0.002):
            samples.append(anonymous_mb())

    thread = Thread(target=sample)
    thread.start()
    try:
        return call(), max(samples)
    finally:
        ended.set()
        thread.join()


def measure_memory(folder: Path, kind: Quantization, bf16: bool) -> None:
    """Print the bytes of the base, and peaks in MB."""
    if kind.bits:
        import torchao.quantization  # noqa: F401
    torch.ones(2, 2, requires_grad=True).sum().backward()
    before = anonymous_mb()
    engine, loading = peak_of(lambda: make_engine(folder, kind, bf16))
    base, peaks = engine.model.base, {"loading": loading}
    held = (base.nbytes if isinstance(base, QuantizedParams) else base.data.nbytes) / 1e6
    for name, call in CALLS.items():
        _, peaks[name] = peak_of(partial(call, engine))
    text = ", ".join(f"{name} {peak - before:.0f}" for name, peak in peaks.items())
    print(f"{kind.value:>5}: base {held:.0f} MB; peaks: {text} MB", flush=True)


def measure_times(folder: Path, rounds: int, bf16: bool) -> None:
    engines = {kind: make_engine(folder, kind, bf16) for kind in Quantization}
    for name, call in CALLS.items():
        seconds: dict[Quantization, list[float]] = {kind: [] for kind in Quantization}
        for _ in range(rounds + 1):
            for kind, engine in engines.items():
                begin = time.process_time()
                call(engine)
                seconds[kind].append(time.process_time() - begin)
        plain = seconds[Quantization.none][1:]
        for kind, several in seconds.items():
            ratios = [one / other for one, other in zip(several[1:], plain, strict=True)]
            print(f"{name:>8} {kind.value:>5}: {statistics.median(several[1:]):.2f} s, "
                  f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--memory-of", nargs=2, metavar=("FOLDER", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        folder, kind = options.memory_of
        measure_memory(Path(folder), Quantization(kind), options.bf16)
        return
    with tempfile.TemporaryDirectory() as name:
        specs = param_specs(SMOL)
        params = FlatParams(specs, {s.name: tuple((0, n) for n in s.shape) for s in specs}, torch.float32, "cpu")
        init_random(SMOL, params, 1)
        save_hf(Path(name) / "model", SMOL, params.view, None)
        del params
        for kind in Quantization:
            words = [sys.executable, __file__, "--memory-of", f"{name}/model", kind.value]
            subprocess.run([*words, *["--bf16"] * options.bf16], check=True)
        measure_times(Path(name) / "model", options.rounds, options.bf16)


if __name__ == "__main__":
    main()
