"""Peak memory of a worker against its expected memory, and its growth over many steps.

    python benchmarks/memory.py [--steps 200] [--dir DIR]

Runs SFT of a 25 M parameter model and PPO of a tiny one through the command line. The allowance is weights +
gradients + optimizer + the activations of the largest micro-batch (measured through autograd's saved tensors) +
300 MB for the interpreter and its libraries.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from realhf.api.config import DatasetConfig, ModelSpec
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec, Task
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import ParallelContext
from realhf.data.source import RowSource
from realhf.data.tokenizer import load_tokenizer
from realhf.models.engine import NativeEngine
from realhf.models.engine.native import build_engine
from realhf.plan.compile.micro_batch import micro_batches

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES_MB = 300
BATCH, BUDGET = 256, 2048  # rows of a step, tokens of one micro-batch


def quickstart(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "realhf", "quickstart", *words], check=True, cwd=ROOT)


def metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def activation_bytes(engine: NativeEngine, lengths: list[int]) -> int:
    """Return the bytes that autograd saves for a micro-batch, without weights; each storage counts once."""
    seen: dict[int, int] = {}
    weights = engine.params.data.untyped_storage().data_ptr()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = engine.model.hidden(tokens, lengths)
        engine.model.logprobs(hidden, tokens, lengths).sum()
    return sum(seen.values())


def allowance(folder: Path) -> dict[str, float]:
    """Return the expected megabytes of an SFT worker, with the activations of its largest micro-batch."""
    layout = Layout(DeviceMesh((0,)), ParallelStrategy())
    role = RoleSpec(ModelSpec(init_from_scratch=True, config=str(folder / "model")))
    model = read_hf_config(folder / "model", scalar_head=False)
    engine = build_engine(model, role, ParallelContext(layout, 0), True, True, 1, 1, (1,), None)
    source = RowSource(DatasetConfig(path=str(folder / "sft.jsonl")), Task.sft, load_tokenizer(folder / "tokenizer"), 1)
    batch = source.batch(0, BATCH)
    lengths = batch.lengths("tokens")
    parts = micro_batches(batch.ids, lengths, MicroBatching(1, BUDGET))
    activations = max(activation_bytes(engine, [lengths[i] for i in part]) for part in parts) / 1e6
    megabytes = engine.params.data.numel() * 4 / 1e6
    static = {"weights": megabytes, "gradients": megabytes, "optimizer": 2 * megabytes}
    return {**static, "activations": activations, "libraries": LIBRARIES_MB}


def sft_peak(folder: Path, steps: int) -> None:
    """Print the peak memory of an SFT worker and its allowance."""
    model = folder / "model"
    size = ["--hidden", "512", "--layers", "8"]
    subprocess.run([sys.executable, ROOT / "examples/arithmetic.py", folder, *size], check=True)
    quickstart("sft", f"fileroot={folder}", "trial_name=sft", "overwrite=True", "model.init_from_scratch=True",
               f"model.config={model}", f"model.tokenizer={folder}/tokenizer", f"dataset.path={folder}/sft.jsonl",
               f"dataset.train_bs_n_seqs={BATCH}", f"sft_train.mb_spec.max_tokens_per_mb={BUDGET}",
               f"exp_ctrl.total_train_steps={steps}", "exp_ctrl.total_train_epochs=100")  # fmt: skip
    parts = allowance(folder)
    peak = max(m["memory/worker_peak_gb"] for m in metrics(folder / "sft/sft/metrics.jsonl")) * 1e3
    print("SFT allowance (MB): " + ", ".join(f"{k} {v:.0f}" for k, v in parts.items()))
    print(f"SFT peak {peak:.0f} MB of {sum(parts.values()):.0f} MB allowed: {peak / sum(parts.values()):.2f}")


def ppo_growth(folder: Path, steps: int) -> None:
    """Print the growth of a worker's resident memory over many PPO steps."""
    subprocess.run(
        [sys.executable, ROOT / "examples/arithmetic.py", folder, "--hidden", "64", "--layers", "2"], check=True
    )
    scratch = [f"{role}.{option}" for role in ("actor", "critic")
               for option in ("init_from_scratch=True", f"config={folder}/model")]  # fmt: skip
    quickstart("ppo-math", f"fileroot={folder}", "trial_name=ppo", "overwrite=True", *scratch,
               f"actor.tokenizer={folder}/tokenizer", f"dataset.path={folder}/train.jsonl",
               "dataset.train_bs_n_seqs=32", "ppo.gen.max_new_tokens=24", f"exp_ctrl.total_train_steps={steps}",
               "exp_ctrl.total_train_epochs=100", "n_gpus_per_node=2")  # fmt: skip
    resident = [m["memory/worker_gb"] * 1e3 for m in metrics(folder / "ppo-math/ppo/metrics.jsonl")]
    early, late = max(resident[: steps // 4]), max(resident[-steps // 4 :])
    print(f"PPO resident over {steps} steps: first quarter {early:.1f} MB, last quarter {late:.1f} MB, "
          f"growth {100 * (late / early - 1):.2f}%")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", type=Path, default=Path("runs/bench-memory"))
    options = parser.parse_args()
    folder = options.dir.resolve()
    sft_peak(folder / "sft-task", 4)
    ppo_growth(folder / "ppo-task", options.steps)


if __name__ == "__main__":
    main()
