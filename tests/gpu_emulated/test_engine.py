"""The engine on fake devices: inference, training, generation with graphs, offloading, equal to the CPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from realhf.api.config import GenerationConfig, LoraOptions
from realhf.api.param_box import box_numel
from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.process_groups import Group
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Loss, Outputs
from realhf.models.engine.decode.session import DecodeSession, broadcast_bytes
from realhf.models.engine.native import NativeEngine
from realhf.models.engine.vllm_weights import gather_bytes
from tests.gpu_emulated.conftest import FAMILIES
from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_runtime import fake_cuda
from tests.models.engine.tiny_engine import counted, engine_on, nll, prompts_of, rows_of

LENGTHS = (5, 9, 2, 7, 9, 9)
PROMPTS = (3, 1, 7)
CONFIG = GenerationConfig(max_new_tokens=10, max_num_seqs=4)
TOLERANCE = {False: 1e-5, True: 2e-2}


def distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.cpu().double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def on_device(folder: Path, bf16: bool = False, device: str = "cuda:0", **options: object) -> NativeEngine:
    return engine_on(folder, device=device, bf16=bf16, **options)


def logprobs(engine: NativeEngine, rows: object) -> Tensor:
    return engine.forward(rows, lambda outputs, _: outputs.logprobs(1.0))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
@pytest.mark.parametrize("bf16", [False, True])
def test_inference_and_training_equal_the_cpu(family: str, bf16: bool, folders: dict[str, Path]) -> None:
    rows, cpu = rows_of(LENGTHS, per_prompt=2), engine_on(folders[family])
    expected = logprobs(cpu, rows)
    norm = cpu.train(rows, nll, counted(rows))["grad_norm"][0]
    with fake_cuda():  # with recomputation in one of the types
        gpu, there = on_device(folders[family], bf16, gradient_checkpointing=bf16), rows.to("cuda:0")
        assert distance(logprobs(gpu, there), expected) < TOLERANCE[bf16]
        stats = gpu.train(there, nll, counted(rows))
        assert stats["grad_norm"][0] == pytest.approx(norm, rel=5 * TOLERANCE[bf16])
        assert gpu.params.grad is not None and cpu.params.grad is not None
        assert distance(gpu.params.grad, cpu.params.grad) < 5 * TOLERANCE[bf16]
        assert distance(gpu.params.data, cpu.params.data) < TOLERANCE[bf16]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("bf16", [False, True])
def test_adapters_equal_the_cpu(family: str, bf16: bool, folders: dict[str, Path]) -> None:
    rows, prompts, lora = rows_of(LENGTHS, per_prompt=2), prompts_of(PROMPTS), LoraOptions(rank=3, alpha=6.0)
    cpu = engine_on(folders[family], lora=lora)
    for name in cpu.params.names:
        if name.endswith(".lora_b"):
            cpu.params.view(name).normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    expected = logprobs(cpu, rows)
    with fake_cuda():
        gpu, there = on_device(folders[family], bf16, lora=lora, gradient_checkpointing=bf16), rows.to("cuda:0")
        gpu.params.data.copy_(cpu.params.data)
        assert distance(logprobs(gpu, there), expected) < TOLERANCE[bf16]
        made = gpu.generate(prompts.to("cuda:0"), CONFIG, 2, 11).to("cpu")
        gpu.train(there, nll, counted(rows))
    sampled = made["prompt_mask"] == 0
    assert distance(made["logprobs"][sampled], logprobs(cpu, made)[sampled]) < TOLERANCE[bf16]
    cpu.train(rows, nll, counted(rows))
    assert gpu.params.grad is not None and cpu.params.grad is not None
    assert distance(gpu.params.grad, cpu.params.grad) < 5 * TOLERANCE[bf16]


def heads(engine: NativeEngine, rows: SequenceBatch) -> Tensor:
    """Return entropies, log-probabilities of three candidates and those of the three most probable tokens."""

    def compute(outputs: Outputs, batch: SequenceBatch) -> Tensor:
        ids = batch["tokens"][:, None] + torch.arange(3, device=batch["tokens"].device)
        candidates, entropies = outputs.distribution(ids % 20, 0.7)
        return torch.cat((candidates, entropies[:, None], outputs.top_logprobs(3, 20, 0.7)[:, 3:]), 1)

    return engine.forward(rows, compute)


def distilled(outputs: Outputs, batch: SequenceBatch) -> Loss:
    candidates, entropies = outputs.distribution(batch["tokens"][:, None], 0.7)
    total = entropies.sum() - 2.0 * candidates.sum()
    return Loss(total, {"loss": (total.detach(), 1.0)})


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_entropies_and_candidates_equal_the_cpu(family: str, folders: dict[str, Path], cuda: FakeCuda) -> None:
    rows, cpu, gpu = rows_of(LENGTHS, per_prompt=2), engine_on(folders[family]), on_device(folders[family])
    there = rows.to("cuda:0")
    assert distance(heads(gpu, there), heads(cpu, rows)) < 1e-5
    cpu.train(rows, distilled, counted(rows))
    cuda.events.clear()
    gpu.train(there, distilled, counted(rows))
    assert gpu.params.grad is not None and cpu.params.grad is not None
    assert distance(gpu.params.grad, cpu.params.grad) < 5e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bf16", [False, True])
def test_generation_equals_the_cpu(family: str, bf16: bool, folders: dict[str, Path]) -> None:
    """In bfloat16, where rounding changes tokens, the log-probabilities of the same tokens are compared."""
    prompts, cpu = prompts_of(PROMPTS), engine_on(folders[family], trained=False)
    with fake_cuda():
        made = on_device(folders[family], bf16, trained=False).generate(prompts.to("cuda:0"), CONFIG, 2, 11).to("cpu")
    if not bf16:
        assert torch.equal(made["tokens"], cpu.generate(prompts, CONFIG, 2, 11)["tokens"])
    sampled = made["prompt_mask"] == 0
    assert distance(made["logprobs"][sampled], logprobs(cpu, made)[sampled]) < TOLERANCE[bf16]


@pytest.mark.parametrize("options", [{"top_k": 5, "top_p": 0.8, "min_new_tokens": 3}, {"greedy": True}])
def test_sampling_options_equal_the_cpu(options: dict, folders: dict[str, Path], cuda: FakeCuda) -> None:
    config = GenerationConfig(max_new_tokens=10, max_num_seqs=4, **options)
    prompts, folder = prompts_of(PROMPTS), folders["llama"]
    expected = engine_on(folder, trained=False).generate(prompts, config, 2, 11)
    made = on_device(folder, trained=False).generate(prompts.to("cuda:0"), config, 2, 11)
    assert torch.equal(made["tokens"].cpu(), expected["tokens"])
    torch.testing.assert_close(made["logprobs"].cpu(), expected["logprobs"], atol=1e-5, rtol=0)


def test_rows_that_end_at_different_steps_equal_the_cpu(folders: dict[str, Path], cuda: FakeCuda) -> None:
    """A row ends by a stop token or its limit between two times at which the host reads tokens."""
    config = GenerationConfig(max_new_tokens=12, max_num_seqs=4, stop_token_ids=list(range(2, 8)))
    prompts, folder = prompts_of(PROMPTS), folders["llama"]
    expected = engine_on(folder, trained=False).generate(prompts, config, 5, 11)
    made = on_device(folder, trained=False).generate(prompts.to("cuda:0"), config, 5, 11)
    assert len(set(expected.lengths("tokens"))) > 5 and 0 < int(expected["truncated"].sum()) < len(expected)
    assert made.lengths("tokens") == expected.lengths("tokens")
    for key in ("tokens", "truncated"):
        assert torch.equal(made[key].cpu(), expected[key])


@pytest.mark.parametrize("bf16", [False, True])
def test_offloaded_parameters_return(bf16: bool, folders: dict[str, Path], cuda: FakeCuda) -> None:
    engine, rows = on_device(folders["llama"], bf16, trained=False), rows_of(LENGTHS).to("cuda:0")
    expected = logprobs(engine, rows).cpu()
    engine.params.offload()
    with pytest.raises(AssertionError, match="released"):
        logprobs(engine, rows)
    cuda.events.clear()
    engine.params.load()
    assert cuda.n_waits == 0, cuda.report()
    assert torch.equal(logprobs(engine, rows).cpu(), expected)


@pytest.mark.parametrize("bf16", [False, True])
def test_parameters_are_reallocated_to_another_device(bf16: bool, folders: dict[str, Path], cuda: FakeCuda) -> None:
    source, target = (on_device(folders["qwen3"], bf16, f"cuda:{i}", trained=False) for i in (0, 1))
    rows = rows_of(LENGTHS)
    expected = logprobs(source, rows.to("cuda:0")).cpu()
    target.params.free()
    target.params.allocate()
    copies = [
        P2PCopy(name, 0, 0, TensorSlice(source.params.data.dtype, box_numel(source.params.box(name))))
        for name in source.params.names
    ]
    exchange(
        copies, 0, lambda name: source.params.read(name, source.params.box(name)), lambda *_: None,
        torch.device("cuda:1"), into=lambda name: target.params.read(name, target.params.box(name)),
    )  # fmt: skip
    assert target.params.data.device == torch.device("cuda:1")
    assert torch.equal(logprobs(target, rows.to("cuda:1")).cpu(), expected)


class DeviceGroup(Group):
    """Refuses tensors in host memory, as NCCL does; all members have the same values."""

    def broadcast(self, tensor: Tensor, index: int) -> Tensor:
        assert tensor.is_cuda
        return tensor

    def all_gather(self, whole: Tensor, shard: Tensor) -> None:
        assert whole.is_cuda and shard.is_cuda
        whole.view(self.size, -1).copy_(shard.expand(self.size, -1))


@pytest.mark.parametrize("data", [b"", b"some bytes"])
def test_bytes_are_shared_through_device_memory(data: bytes, cuda: FakeCuda) -> None:
    group, device = DeviceGroup((0, 1), 0), torch.device("cuda:0")
    assert broadcast_bytes(group, data, 0, device) == data
    assert not data or gather_bytes(group, data, device) == [data, data]


def test_sampled_turns_are_received_in_device_memory(cuda: FakeCuda) -> None:
    received = list[Tensor]()
    stage = SimpleNamespace(
        device=torch.device("cuda:0"), pipeline=SimpleNamespace(from_last=lambda x: received.append(x) or x)
    )
    DecodeSession._sample(stage, None, 1, torch.zeros(3, 5, dtype=torch.int64, device="cuda:0"))  # type: ignore[arg-type]
    assert [x.device for x in received] == [stage.device]
