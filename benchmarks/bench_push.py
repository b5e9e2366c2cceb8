"""How long handing a model of 100 M parameters over to vLLM takes, against a copy of its bytes.

    make vllm; python benchmarks/bench_push.py [--python .venv-vllm/bin/python] [--rounds N]

One worker, float32; both sides in turns. The copy is torch's, from one piece of memory to another.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from realhf.api.config import ModelSpec, VllmConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.comm.parallel import ParallelContext
from realhf.engine import ServedEngine, Serving, build_engine, served
from realhf.models.hf_config import read_hf_config

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16384, "hidden_size": 768,
    "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
    "head_dim": 64, "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip


def engine_in(folder: Path, python: str, pack: bool = True) -> ServedEngine:
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = read_hf_config(folder, scalar_head=False)
    layout = Layout(DeviceMesh((0,)), ParallelStrategy())
    role = RoleSpec(ModelSpec(config=str(folder), init_from_scratch=True))
    engine = build_engine(config, role, ParallelContext(layout, 0), trained=False, holds_weights=True, seed=1,
                          total_steps=1, stop_ids=(1,), tokenizer_folder=None, share_as="model")  # fmt: skip
    return served(engine, Serving(VllmConfig(python=python, pack=pack), folder / "vllm", folder / "vllm.log"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for pack in (False, True):
        measure(str(Path(options.python).absolute()), options.rounds, pack)


def measure(python: str, rounds: int, pack: bool) -> None:
    """Print what a push takes, with vLLM's matrices as they are or in the order of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_in(Path(folder), python, pack)
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
                engine.server.ask("load", pieces=bucket, version=number)
            pushes.append(time.perf_counter() - began)
        engine.server.close()
    copy, push = (statistics.median(some[1:]) for some in (copies, pushes))
    kind = "packed" if pack else "plain"
    print(f"{len(data) / 1e6:.0f} M parameters, {kind}: push {push:.3f} s ({min(pushes):.3f}-{max(pushes[1:]):.3f}), "
          f"copy {copy:.3f} s: {push / copy:.1f} copies")  # fmt: skip


if __name__ == "__main__":
    main()
