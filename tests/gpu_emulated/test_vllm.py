"""Generation by vLLM on fake devices: its devices and memory, weights by IPC handles, sleep between calls."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from realhf.api.config import GenerationConfig, LoraOptions, ModelSpec, VllmConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.base.errors import RunFailed
from realhf.comm.process_groups import Group, ParallelContext
from realhf.models.engine import vllm_weights
from realhf.models.engine.in_vllm import realhf_server
from realhf.models.engine.in_vllm.realhf_server import WeightReceiver
from realhf.models.engine.native import build_engine
from realhf.models.engine.vllm import RUNTIME_BYTES, VllmEngine, VllmLauncher, with_vllm
from realhf.models.peft_folder import save_peft
from tests.gpu_emulated import fake_vllm
from tests.gpu_emulated.conftest import FAMILIES
from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_runtime import MEMORY
from tests.models.engine.tiny_engine import engine_on, prompts_of

CONFIG = GenerationConfig(max_new_tokens=3)


@pytest.fixture
def handles(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> fake_vllm.Handles:
    return fake_vllm.install(cuda, monkeypatch)


def vllm_on(folder: Path, root: Path, rank: int = 0, mesh: tuple[int, ...] = (0,), **options: object) -> VllmEngine:
    engine = engine_on(folder, rank, mesh, trained=False, device=f"cuda:{rank}")
    return with_vllm(engine, VllmLauncher(VllmConfig(**options), root / "served", root / "vllm.log"))  # type: ignore[arg-type]


def served(engine: VllmEngine) -> fake_vllm.FakeLLM:
    assert isinstance(engine.server, fake_vllm.InProcessServer)
    return engine.server.llm


def same(actual: dict[str, Tensor], folder: Path) -> bool:
    """Return True if vLLM has the tensors of a folder; a tied head is sent, and is not in the folder."""
    expected = load_file(folder / "model.safetensors")
    return expected.keys() <= actual.keys() and all(torch.equal(actual[k].cpu(), v) for k, v in expected.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_receives_every_tensor(
    family: str, folders: dict[str, Path], handles: fake_vllm.Handles, tmp_path: Path
) -> None:
    engine = vllm_on(folders[family], tmp_path, enable_sleep_mode=False)
    engine.generate(prompts_of((3, 5)).to("cuda:0"), CONFIG, 2, 7)
    assert same(served(engine).weights[0], folders[family])
    assert len(handles.exported) == 1 and handles.n_open == 0
    engine.generate(prompts_of((3, 5)).to("cuda:0"), CONFIG, 2, 8)
    assert len(handles.exported) == 1, "the weights have the same version"


def test_weights_and_cache_are_freed_between_calls(
    folders: dict[str, Path],
    handles: fake_vllm.Handles,
    tmp_path: Path,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_weights, "BUCKET_BYTES", 1000)
    engine = vllm_on(folders["llama"], tmp_path)
    llm, n = served(engine), len(engine.buckets)
    assert n > 2 and llm.asleep and llm.log == ["sleep 2"]
    for _ in range(2):  # the version is the same, but vLLM has lost the weights
        llm.log.clear()
        cuda.events.clear()
        responses = engine.generate(prompts_of((3, 5)).to("cuda:0"), CONFIG, 1, 7)
        assert llm.log == ["wake_up weights", *["load_from_trainer"] * n, "wake_up kv_cache", "reset_prefix_cache",
                           "get_trainer_version", "generate", "sleep 2"]  # fmt: skip
        assert cuda.count("empty_cache") == 1 and llm.asleep and handles.n_open == 0
        assert responses["tokens"].device == torch.device("cuda:0") and responses.lengths("tokens") == (6, 8)


def with_lora(folder: Path, root: Path, **options: object) -> VllmEngine:
    engine = engine_on(folder, trained=False, device="cuda:0", lora=LoraOptions(rank=4, alpha=6.0))
    engine.params.data.normal_()
    return with_vllm(engine, VllmLauncher(VllmConfig(**options), root / "served", root / "vllm.log"))  # type: ignore[arg-type]


def has_adapter(engine: VllmEngine, folder: Path) -> bool:
    """Return True if vLLM has the adapter that the engine saves."""
    save_peft(folder, engine.config, engine.params.view, "base", None)
    (manager,) = served(engine).adapters
    expected, found = load_file(folder / "adapter_model.safetensors"), manager.registered[manager.active]
    assert (found.helper.r, found.helper.lora_alpha) == (4, 6.0) and expected.keys() == found.tensors.keys()
    return all(torch.equal(found.tensors[name].cpu(), tensor) for name, tensor in expected.items())


def test_the_base_is_sent_once_and_adapters_at_every_version(
    folders: dict[str, Path], handles: fake_vllm.Handles, tmp_path: Path
) -> None:
    engine = with_lora(folders["llama"], tmp_path, enable_sleep_mode=False)
    llm = served(engine)
    assert llm.arguments["max_lora_rank"] == 8 and llm.arguments["enable_lora"]
    for version in range(3):
        engine.params.data.add_(0.1)
        replace(engine, version=version).generate(prompts_of((3, 5)).to("cuda:0"), CONFIG, 2, 7)
        assert has_adapter(engine, tmp_path / "saved") and handles.n_open == 0
    assert llm.log.count("load_from_trainer") == 1 and llm.log.count("load_adapter_from_trainer") == 3
    assert llm.log.count("reset_prefix_cache") == 3 and same(llm.weights[0], folders["llama"])
    assert engine.served is engine.model.base, "there is no merged copy"


def test_a_process_that_sleeps_gets_base_and_adapter_again(
    folders: dict[str, Path], handles: fake_vllm.Handles, tmp_path: Path
) -> None:
    engine = with_lora(folders["llama"], tmp_path)
    for _ in range(2):  # the version is the same
        served(engine).log.clear()
        engine.generate(prompts_of((3, 5)).to("cuda:0"), CONFIG, 1, 7)
        assert served(engine).log == [
            "wake_up weights", "load_from_trainer", "load_adapter_from_trainer", "wake_up kv_cache",
            "reset_prefix_cache", "get_trainer_version", "generate", "sleep 2",
        ]  # fmt: skip
        assert handles.n_open == 0
    assert served(engine).adapters[0].used_numbers == {1, 2}


def test_weights_that_moved_are_exported_again(
    folders: dict[str, Path], handles: fake_vllm.Handles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vllm_on(folders["llama"], tmp_path)
    seen = list[bool]()
    close = WeightReceiver.close_trainer_memory

    def check(self: WeightReceiver) -> None:
        seen.append(same(self.model_runner.model.weights, folders["llama"]))
        close(self)

    monkeypatch.setattr(WeightReceiver, "close_trainer_memory", check)
    for _ in range(2):
        engine.generate(prompts_of((3,)).to("cuda:0"), CONFIG, 1, 7)
        engine.params.offload()
        engine.params.load()
    assert seen == [True, True] and len(handles.exported) == 2


def test_tensor_parallel_shards_are_opened_on_their_devices(
    folders: dict[str, Path], handles: fake_vllm.Handles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process of vLLM has a handle of its own for every shard, and assembles tensors from both devices."""
    layout, folder = Layout(DeviceMesh((0, 1)), ParallelStrategy(tp=2)), folders["qwen3"]
    shards = [
        build_engine(
            read_hf_config(folder, False), RoleSpec(ModelSpec(str(folder))),
            ParallelContext(layout, rank, torch.device("cuda", rank), {(0, 1): Group((0, 1), rank)}), trained=False,
            holds_weights=True, seed=3, total_steps=10, stop_ids=(1,), tokenizer_folder=None,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    launcher = VllmLauncher(VllmConfig(), tmp_path / "served", tmp_path / "vllm.log", n_workers=2)
    server = launcher.start(shards[0], ["5", "3"], shards[0].params.data.nbytes)
    assert isinstance(server, fake_vllm.InProcessServer) and server.llm.arguments["tensor_parallel_size"] == 2
    sent = list[bytes]()

    def gather(group: Group, data: bytes, device: torch.device) -> list[bytes]:
        sent.append(data)
        return sent

    monkeypatch.setattr(vllm_weights, "gather_bytes", gather)
    memory = [vllm_weights.DeviceMemory(shard.params.data, shard.context.group("tp")).export() for shard in shards][-1]
    buckets = vllm_weights.make_buckets(shards[0])
    for bucket in buckets:
        server.call("load", tensors=bucket, memory=memory, version=0 if bucket is buckets[-1] else -1)
        memory = []
    assert all(same(weights, folder) for weights in server.llm.weights)
    assert sorted(handles.opened.values()) == [0, 0, 1, 1] and handles.n_open == 0


def test_memory_and_devices_of_a_process(
    folders: dict[str, Path], handles: fake_vllm.Handles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/run/nccl/rank_")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    engine = vllm_on(folders["llama"], tmp_path, enforce_eager=True)
    arguments = served(engine).arguments
    assert arguments["enforce_eager"] and arguments["enable_sleep_mode"] and arguments["enable_chunked_prefill"]
    assert arguments["kv_cache_memory_bytes"] == MEMORY // 4
    used = arguments["gpu_memory_utilization"] * MEMORY
    assert used == pytest.approx(MEMORY // 4 + engine.params.data.nbytes + RUNTIME_BYTES)
    environment = VllmLauncher(VllmConfig(), tmp_path, tmp_path).environment((0, 1), ["6", "2"])
    assert environment["CUDA_VISIBLE_DEVICES"] == "6,2"
    assert not {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "PYTORCH_CUDA_ALLOC_CONF", "VLLM_CPU_KVCACHE_SPACE"} & {*environment}
    explicit = vllm_on(folders["llama"], tmp_path, kv_cache_gb=3.0)
    assert served(explicit).arguments["kv_cache_memory_bytes"] == 3 << 30


def test_failing_requests_name_the_version(
    folders: dict[str, Path], handles: fake_vllm.Handles, tmp_path: Path
) -> None:
    engine = vllm_on(folders["llama"], tmp_path)
    with pytest.raises(RunFailed, match="weights of version 3 are requested, the engine has versions"):
        assert engine.server is not None
        engine.server.call("generate", version=3, prompts=[[1]], rows=[])


def test_handles_of_another_torch_are_explained(
    folders: dict[str, Path], handles: fake_vllm.Handles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.13 has a newer version byte in its handles than 2.9, which refuses it."""
    engine = vllm_on(folders["llama"], tmp_path)
    assert engine.server is not None and engine.server.torch == torch.__version__
    engine.server.torch = "2.9.1"
    monkeypatch.setattr(realhf_server, "device_memory", unreadable)
    with pytest.raises(RunFailed, match=r"vLLM has torch 2\.9\.1, this worker torch .*; use a vLLM for this torch"):
        engine.generate(prompts_of((3,)).to("cuda:0"), CONFIG, 1, 7)


def unreadable(device: int, handle: list[object]) -> Tensor:
    raise RuntimeError("received sharable handle version 3")
