"""The native engine on a GPU against the CPU, and an end-to-end PPO run on one GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from realhf.api.config import GenerationConfig
from realhf.api.config.choices import Backend
from realhf.comm.process_groups import destroy_process_group, init_process_group, open_rendezvous
from realhf.models.engine.decode import group
from tests.models.engine.conftest import hf_models, llama  # noqa: F401
from tests.models.engine.tiny_engine import FAMILIES, counted, engine_on, nll, prompts_of, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LENGTHS = (3, 1, 7, 7, 12, 2, 5)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bf16", [False, True])
def test_inference_and_training_equal_the_cpu(family: str, bf16: bool, hf_models: dict) -> None:  # noqa: F811
    folder, rows = hf_models[family][0], rows_of((5, 9, 2, 7))
    cpu, gpu = engine_on(folder), engine_on(folder, device="cuda", bf16=bf16)
    there = rows.to("cuda")
    limit = 2e-2 if bf16 else 1e-4
    on_cpu, on_gpu = (e.forward(b, lambda outputs, _: outputs.logprobs(1.0)) for e, b in ((cpu, rows), (gpu, there)))
    assert distance(on_gpu, on_cpu) < limit
    norms = [e.train(b, nll, counted(rows))["grad_norm"][0] for e, b in ((cpu, rows), (gpu, there))]
    assert norms[1] == pytest.approx(norms[0], rel=5 * limit)
    assert distance(gpu.params.grad, cpu.params.grad) < 5 * limit
    assert distance(gpu.params.data, cpu.params.data) < limit


def test_generation_equals_the_cpu_token_by_token(llama: Path) -> None:  # noqa: F811
    config = GenerationConfig(max_new_tokens=20, max_num_seqs=9)
    made = engine_on(llama, trained=False).generate(prompts_of(LENGTHS), config, 3, 11)
    there = engine_on(llama, trained=False, device="cuda").generate(prompts_of(LENGTHS).to("cuda"), config, 3, 11)
    assert torch.equal(there["tokens"].cpu(), made["tokens"])
    torch.testing.assert_close(there["logprobs"].cpu(), made["logprobs"], atol=1e-3, rtol=0)


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.8, "min_new_tokens": 3}, {"greedy": True}])
def test_cuda_graphs_sample_the_same_tokens(
    options: dict, llama: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    config = GenerationConfig(max_new_tokens=40, max_num_seqs=19, **options)
    engine, prompts = engine_on(llama, trained=False, device="cuda"), prompts_of(LENGTHS).to("cuda")
    made = engine.generate(prompts, config, 3, 11)
    monkeypatch.setattr(group, "decodes_on_device", lambda model: False)
    plain = engine.generate(prompts, config, 3, 11)
    assert torch.equal(made["tokens"], plain["tokens"])
    torch.testing.assert_close(made["logprobs"], plain["logprobs"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("bf16", [False, True])
def test_megatron_equals_the_native_optimizer(bf16: bool, llama: Path) -> None:  # noqa: F811
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    store = open_rendezvous("127.0.0.1", 0, 60.0)
    init_process_group("127.0.0.1", store.port, 0, 1, "cuda", 60.0, store, bytes(32))
    try:
        assert dist.get_backend() == "nccl"
        rows = rows_of((5, 9, 2, 7)).to("cuda")
        ours, theirs = (
            engine_on(llama, device="cuda", bf16=bf16, backend=b) for b in (Backend.native, Backend.megatron)
        )
        for _ in range(3):
            norms = [engine.train(rows, nll, counted(rows))["grad_norm"][0] for engine in (ours, theirs)]
            assert norms[1] == pytest.approx(norms[0], rel=1e-2 if bf16 else 1e-5)
        n = ours.params.end
        assert distance(theirs.params.data[:n], ours.params.data[:n]) < (1e-2 if bf16 else 1e-5)
    finally:
        destroy_process_group()


def test_ppo_on_one_gpu(task: Any, actor_folder: Path, tmp_path: Path) -> None:
    options = [
        f"fileroot={tmp_path}", "experiment_name=gpu", "trial_name=one", "device=cuda", "n_gpus_per_node=1",
        f"actor.path={actor_folder}", f"critic.path={actor_folder}", "critic.init_critic_from_actor=True",
        f"ref.path={actor_folder}", f"dataset.path={task.train}", "dataset.train_bs_n_seqs=8",
        "ppo.gen.max_new_tokens=16", "exp_ctrl.total_train_steps=3",
    ]  # fmt: skip
    command = [sys.executable, "-m", "realhf", "quickstart", "ppo-math", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (tmp_path / "gpu" / "one" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
