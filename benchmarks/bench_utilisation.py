"""Memory bandwidth utilisation (MBU) of decoding, and model FLOPs utilisation (MFU) of decoding and training:

python benchmarks/bench_utilisation.py [--device cuda] [--size 0.5b] [--rounds 5]

The limits of the device are measured in the same run: a large matrix product, and a copy. A decoding step reads every
weight, and the keys and values of every row; training takes three times the operations of a forward pass, without
recomputation. Responses have 256 tokens, training rows 1,024. One worker, one engine, no master.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.arch.flops import generate_bytes, generate_flops, train_flops
from realhf.comm.process_groups import ParallelContext
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Loss, Outputs
from realhf.models.engine.native import NativeEngine, build_engine

SIZES = {  # Qwen2: layers, hidden, heads, key/value heads, head size, intermediate, vocabulary
    "tiny": (4, 128, 4, 2, 32, 384, 512),
    "small": (8, 512, 8, 2, 64, 1536, 2048),
    "0.5b": (24, 896, 14, 2, 64, 4864, 151_936),
    "1.5b": (28, 1536, 12, 2, 128, 8960, 151_936),
}
N_NEW, PROMPT_LENGTH, ROW = 256, 256, 1024


def seconds_of(job: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Return the median over rounds, without the first."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(rounds + 1):
        wait()
        begin = time.perf_counter()
        job()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def limits(device: torch.device, dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """Return operations per second of a large product, and bytes per second that a copy reads and writes."""
    side, n_copied = (8192, 1 << 29) if device.type == "cuda" else (1536, 1 << 26)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(n_copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = seconds_of(lambda: a @ b, rounds, device)
    return 2 * side**3 / product, 2 * n_copied / seconds_of(lambda: target.copy_(source), rounds, device)


def engine_of(config: ModelConfig, device: torch.device, bf16: bool, trained: bool) -> NativeEngine:
    role = RoleSpec(ModelSpec(init_from_scratch=True, bf16=bf16))
    place = ParallelContext(Layout(DeviceMesh((0,)), ParallelStrategy()), 0, device)
    return build_engine(config, role, place, trained, True, 1, 1000, (), None)


def decode_job(
    config: ModelConfig, device: torch.device, bf16: bool, rows: int, n_new: int = N_NEW
) -> Callable[[], object]:
    """Return a function that generates ``n_new`` tokens for each of ``rows`` prompts."""
    engine = engine_of(config, device, bf16, trained=False)
    tokens = torch.randint(config.vocab, (rows * PROMPT_LENGTH,), device=device)
    column = Column(tokens, (PROMPT_LENGTH,) * rows)
    prompts = SequenceBatch(tuple(RowId(i, PROMPT) for i in range(rows)), {"prompts": column})
    sampling = GenerationConfig(max_new_tokens=n_new, max_num_seqs=rows)
    return lambda: engine.generate(prompts, sampling, 1, 3)


def decode_work(config: ModelConfig, rows: int, itemsize: int, n_new: int = N_NEW) -> tuple[int, int]:
    """Return the bytes read and the operations of a ``decode_job``."""
    lengths = (PROMPT_LENGTH,) * rows, (PROMPT_LENGTH + n_new,) * rows
    return generate_bytes(config, *lengths, rows, itemsize), generate_flops(config, *lengths)


def train_job(config: ModelConfig, device: torch.device, bf16: bool, rows: int, row: int = ROW) -> Callable[[], object]:
    """Return a function that makes a training step on ``rows`` rows of ``row`` tokens."""
    engine = engine_of(config, device, bf16, trained=True)
    tokens = torch.randint(config.vocab, (rows * row,), device=device)
    batch = SequenceBatch(tuple(RowId(i, 0) for i in range(rows)), {"tokens": Column(tokens, (row,) * rows)})

    def nll(outputs: Outputs, some: SequenceBatch) -> Loss:
        return Loss(-outputs.logprobs().sum(), {})

    return lambda: engine.train(batch, nll, float(rows * row))


def model_config(size: str) -> ModelConfig:
    layers, hidden, heads, kv, dim, width, vocab = SIZES[size]
    return ModelConfig("qwen2", layers, hidden, heads, kv, dim, width, vocab, 4096, qkv_bias=True, tied_embedding=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="responses decoded concurrently")
    parser.add_argument("--fp32", action="store_true", help="float32 weights (always on CPU)")
    o = parser.parse_args()
    device, bf16 = torch.device(o.device), not o.fp32 and o.device != "cpu"
    config = model_config(o.size)
    dtype = torch.bfloat16 if bf16 else torch.float32
    flops, bandwidth = limits(device, dtype, o.rounds)
    print(f"{o.size} on {o.device}, {dtype}: products {flops / 1e12:.2f} TFLOP/s, copy {bandwidth / 1e9:.1f} GB/s")
    for rows in o.rows:
        seconds = seconds_of(decode_job(config, device, bf16, rows), o.rounds, device)
        nbytes, done = decode_work(config, rows, dtype.itemsize)
        print(f"decode {rows:4} rows {rows * N_NEW / seconds:10.0f} tokens/s   MBU {nbytes / seconds / bandwidth:6.1%}"
              f"   MFU {done / seconds / flops:6.1%}")  # fmt: skip
    rows = 16
    seconds, done = (
        seconds_of(train_job(config, device, bf16, rows), o.rounds, device),
        train_flops(config, (ROW,) * rows),
    )
    print(f"train  {rows:4} rows {rows * ROW / seconds:10.0f} tokens/s   MFU {done / seconds / flops:6.1%}")


if __name__ == "__main__":
    main()
