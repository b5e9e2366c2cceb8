"""Utilisation at 1.5B beside Hugging Face and plain torch: python -m benchmarks.gpu.utilisation [--size 1.5b]

Decoding: tokens per second and the fraction of the device's copy bandwidth (MBU), ours and of ``generate`` of
transformers. Training: tokens per second and MFU, ours and of a plain step: the model of transformers under
``torch.compile``, float32 weights with bfloat16 autocast, torch's fused AdamW. All in one process and with the same
model sizes, rows and limits. ``--traces FOLDER`` writes profiler traces of a short generation and of a training step,
and prints the most expensive operations.
"""

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.bench_utilisation import (
    PROMPT_LENGTH,
    SIZES,
    decode_job,
    decode_work,
    limits,
    model_config,
    seconds_of,
    train_job,
)
from realhf.api.model_config import ModelConfig
from realhf.arch.flops import train_flops

Job = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """The model, rows in decoding and training, new tokens, length of training rows, and rows per plain backward."""

    model: str
    decode_rows: tuple[int, ...]
    train_rows: int
    n_new: int
    row: int
    rows_at_once: int
    rounds: int


def hugging_face_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a random model of the same sizes."""
    like = Qwen2Config(
        vocab_size=config.vocab, hidden_size=config.hidden, intermediate_size=config.intermediate,
        num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads,
        max_position_embeddings=config.max_positions, tie_word_embeddings=config.tied_embedding,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(like, attn_implementation="sdpa").to(dtype)


def generate_job(config: ModelConfig, device: torch.device, dtype: torch.dtype, rows: int, n_new: int) -> Job:
    """Return a function that generates with transformers, as ``decode_job``."""
    model = hugging_face_model(config, dtype, device).eval()
    tokens = torch.randint(config.vocab, (rows, PROMPT_LENGTH), device=device)
    options = {"do_sample": True, "max_new_tokens": n_new, "min_new_tokens": n_new, "top_k": 0, "pad_token_id": 0}

    def job() -> object:
        with torch.no_grad():
            return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)

    return job


def plain_step_job(config: ModelConfig, device: torch.device, sizes: Sizes) -> Job:
    """Return a function that makes the plain training step, as ``train_job``, on a few rows per backward pass."""
    model = hugging_face_model(config, torch.float32, device).train()
    compiled = torch.compile(model) if device.type == "cuda" else model
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(config.vocab, (sizes.train_rows, sizes.row), device=device)

    def job() -> object:
        for some in tokens.split(sizes.rows_at_once):
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(input_ids=some, labels=some).loss
            (loss * len(some) / sizes.train_rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        return loss

    return job


def timed(make: Callable[[], Job], sizes: Sizes, device: torch.device) -> float:
    """Return the median seconds of a job whose memory is freed afterwards."""
    seconds = seconds_of(make(), sizes.rounds, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds


def trace(name: str, job: Job, device: torch.device, folder: Path) -> None:
    """Write a Chrome trace of one run, after a first one; print the most expensive operations."""
    job()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        job()
    folder.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(folder / f"{name}.json"))
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(f"trace of {name}: {folder / name}.json")
    print(profiled.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=48))


def measure(sizes: Sizes, device: torch.device, traces: Path | None) -> None:
    config, bf16 = model_config(sizes.model), device.type == "cuda"
    dtype = torch.bfloat16 if bf16 else torch.float32
    flops, bandwidth = limits(device, dtype, sizes.rounds)
    print(f"{sizes.model} on {device}, {dtype}: products {flops / 1e12:.2f} TFLOP/s, copy {bandwidth / 1e9:.1f} GB/s")
    for rows in sizes.decode_rows:
        nbytes, _ = decode_work(config, rows, dtype.itemsize, sizes.n_new)
        jobs: dict[str, Callable[..., Job]] = {
            "realhf": lambda rows=rows: decode_job(config, device, bf16, rows, sizes.n_new),
            "transformers": lambda rows=rows: generate_job(config, device, dtype, rows, sizes.n_new),
        }
        for name, make in jobs.items():
            seconds = timed(make, sizes, device)
            print(f"decode {rows:4} rows, {name:14} {rows * sizes.n_new / seconds:10.0f} tokens/s   "
                  f"MBU {nbytes / seconds / bandwidth:6.1%}", flush=True)  # fmt: skip
    n_tokens, done = sizes.train_rows * sizes.row, train_flops(config, (sizes.row,) * sizes.train_rows)
    steps: dict[str, Callable[[], Job]] = {
        "realhf": lambda: train_job(config, device, bf16, sizes.train_rows, sizes.row),
        "plain torch": lambda: plain_step_job(config, device, sizes),
    }
    for name, make_step in steps.items():
        seconds = timed(make_step, sizes, device)
        print(f"train  {sizes.train_rows:4} rows, {name:14} {n_tokens / seconds:10.0f} tokens/s   "
              f"MFU {done / seconds / flops:6.1%}", flush=True)  # fmt: skip
    if traces is not None:
        trace("decode", decode_job(config, device, bf16, sizes.decode_rows[0], 8), device, traces)
        trace("train", train_job(config, device, bf16, sizes.train_rows, sizes.row), device, traces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on the CPU")
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    full = Sizes(options.size, (64, 256), train_rows=16, n_new=256, row=1024, rows_at_once=4, rounds=3)
    tiny = Sizes("tiny", (2,), train_rows=2, n_new=4, row=32, rows_at_once=1, rounds=1)
    measure(tiny if options.tiny else full, device, options.traces)


if __name__ == "__main__":
    main()
