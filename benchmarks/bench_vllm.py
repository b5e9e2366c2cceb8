"""vLLM against the native engine: tokens sampled per second, and the time of a weight push.

    make vllm; python benchmarks/bench_vllm.py [decode] [push] [adapters] [--python .venv-vllm/bin/python] [--rounds N]
        [--models tiny,small,135m]

``decode`` is that of bench_peer.py: 16 prompts with 8 responses of 32 tokens on average, both with log-probabilities,
float32, two threads; vLLM in eager mode. ``push`` sends 100 M parameters; the baseline is a torch copy. ``adapters``
sends and uses adapters of rank 16 of 134.5 M parameters, beside the base and merged.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from bench_peer import in_turns, model_pair, our_tokens, report

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, LoraOptions, ModelSpec, VllmConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.comm.process_groups import ParallelContext
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine import VllmEngine, VllmLauncher, build_engine, with_vllm
from realhf.plan.run_spec import model_config

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16384, "hidden_size": 768,
    "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
    "head_dim": 64, "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip


WITH_ADAPTERS = {
    **MODEL, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip


def engine_in(
    folder: Path, options: VllmConfig, model: dict[str, object] = MODEL, rank: int = 0, bf16: bool = False
) -> VllmEngine:
    (folder / "config.json").write_text(json.dumps(model))
    layout = Layout(DeviceMesh((0,)), ParallelStrategy())
    role = RoleSpec(ModelSpec(config=str(folder), init_from_scratch=True, bf16=bf16, lora=LoraOptions(rank=rank)))
    engine = build_engine(model_config(role), role, ParallelContext(layout, 0), trained=False, holds_weights=True,
                          seed=1, total_steps=1, stop_ids=(1,), tokenizer_folder=None, shared_name="model")  # fmt: skip
    return with_vllm(engine, VllmLauncher(options, folder / "vllm", folder / "vllm.log"))


def adapters(python: str, rounds: int, bf16: bool) -> None:
    """Print bytes and seconds of a hand-over, and tokens per second, of adapters beside the base and merged."""
    with tempfile.TemporaryDirectory() as root:
        engines = dict[str, VllmEngine]()
        for name in ("hot", "merged"):
            (folder := Path(root) / name).mkdir()
            options = VllmConfig(python=python, merge_lora=name == "merged")
            engines[name] = engine_in(folder, options, WITH_ADAPTERS, 16, bf16)
        seconds = {name: list[float]() for name in engines}
        rates = {name: list[float]() for name in engines}
        for number in range(rounds + 1):
            for name, engine in engines.items():
                now = replace(engine, version=number)
                assert now.server is not None
                began = time.perf_counter()
                now._send_weights(now.server, now._synchronised())
                seconds[name].append(time.perf_counter() - began)
                began = time.perf_counter()
                n_tokens = sampled_tokens(now, number)
                rates[name].append(n_tokens / (time.perf_counter() - began))
        for name, engine in engines.items():
            assert engine.server is not None
            engine.server.close()
            tensors = engine.adapter or tuple(tensor for bucket in engine.buckets for tensor in bucket)
            nbytes = sum(math.prod(one["shape"]) * getattr(torch, one["dtype"]).itemsize for one in tensors)
            first, *rest = seconds[name]
            print(f"{'bfloat16' if bf16 else 'float32'}, {name}: {nbytes / 1e6:.1f} MB in "
                  f"{statistics.median(rest):.3f} s ({min(rest):.3f}-{max(rest):.3f}), first {first:.2f} s; "
                  f"{statistics.median(rates[name][1:]):.3g} tokens/s", flush=True)  # fmt: skip


def sampled_tokens(engine: VllmEngine, seed: int) -> int:
    """Sample 4 responses to each of 8 prompts of 64 tokens; return the number of tokens."""
    prompts = torch.randint(2, 49152, (8, 64), generator=torch.Generator().manual_seed(seed))
    ids = tuple(RowId(i, PROMPT) for i in range(8))
    batch = SequenceBatch(ids, {"prompts": Column.of(list(prompts))})
    found = engine.generate(batch, GenerationConfig(max_new_tokens=32, min_new_tokens=32), 4, seed)
    return int((found["prompt_mask"] == 0).sum())


def decode(python: str, rounds: int, models: str) -> None:
    """Print the tokens sampled per second; both engines run in turns."""
    for size in models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            pair = model_pair(size, Path(folder) / "model", bf16=False, shared_name="model")
            engine = with_vllm(
                pair.ours, VllmLauncher(VllmConfig(python=python), Path(folder) / "v", Path(folder) / "v.log")
            )
            assert engine.server is not None
            engines = {"realhf": pair, "vLLM": replace(pair, ours=engine)}
            rates = in_turns({name: partial(our_tokens, p) for name, p in engines.items()}, rounds)
            engine.server.close()
        report(f"decode {size}", rates, "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", choices=["decode", "push", "adapters", []], default=["decode", "push"])
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default="tiny,small", help="for decode")
    options = parser.parse_args()
    torch.set_num_threads(2)
    python = str(Path(options.python).absolute())
    if "decode" in options.subjects:
        decode(python, options.rounds, options.models)
    for pack in (False, True) if "push" in options.subjects else ():
        push(python, options.rounds, pack)
    for bf16 in (False, True) if "adapters" in options.subjects else ():
        adapters(python, options.rounds, bf16)


def push(python: str, rounds: int, pack: bool) -> None:
    """Print the time of a push to plain weights or to weights packed for vLLM's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_in(Path(folder), VllmConfig(python=python, pack=pack))
        assert engine.server is not None
        data = engine.params.data
        other, copies, pushes = torch.empty_like(data), [], []
        for number in range(rounds + 1):
            began = time.perf_counter()
            other.copy_(data)
            copies.append(time.perf_counter() - began)
            began = time.perf_counter()
            engine.server.version = -1
            for bucket in engine.buckets:
                engine.server.call("load", tensors=bucket, version=number)
            pushes.append(time.perf_counter() - began)
        engine.server.close()
    copy_s, push_s = (statistics.median(times[1:]) for times in (copies, pushes))
    kind = "packed" if pack else "plain"
    print(f"{len(data) / 1e6:.0f} M parameters, {kind}: push {push_s:.3f} s ({min(pushes):.3f}-{max(pushes[1:]):.3f}), "
          f"copy {copy_s:.3f} s: {push_s / copy_s:.1f} copies")  # fmt: skip


if __name__ == "__main__":
    main()
