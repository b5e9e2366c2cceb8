"""A vLLM engine on fake devices: it keeps the weights it is given, sleeps, and repeats the prompt's last token.

CUDA IPC is replaced by a table of handles, in which every handle can be opened once by one process, as in torch.
"""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from realhf.base.errors import RunFailed
from realhf.models.engine.in_vllm import realhf_server
from tests.gpu_emulated.device_tensor import DeviceStorage, DeviceTensor
from tests.gpu_emulated.fake_cuda import FakeCuda


class Handles:
    """Shared memory by handle. ``opened`` has the device of each; ``n_open`` counts those that are not released."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.exported, self.opened = cuda, dict[bytes, DeviceStorage](), dict[bytes, int]()
        self.n_open = 0
        self.is_ready = False  # the host has waited for the weights

    def share(self, storage: DeviceStorage) -> tuple[Any, ...]:
        assert self.is_ready, "weights are exported without waiting for the operations that compute them"
        handle = f"handle {len(self.exported)}".encode()
        self.exported[handle] = storage
        return (0, handle, storage.nbytes(), 0, b"counter", 0, b"event", True)

    def open(self, device: int, handle: list[Any]) -> Tensor:
        assert handle[0] not in self.opened, f"{handle[0]!r} is opened twice: torch counts one release per handle"
        self.opened[handle[0]] = device
        self.n_open += 1
        memory = torch.empty(0, dtype=torch.uint8).set_(self.exported[handle[0]].host)
        return DeviceTensor(memory, torch.device("cuda", device), self.cuda)

    def wait(self, device: torch.device | None = None) -> None:
        self.cuda.note("wait", "synchronize")
        self.is_ready = True

    def collect(self) -> None:
        self.n_open, self.is_ready = 0, False


class FakeModel:
    """A model that stores every tensor under its Hugging Face name; its memory is released while it sleeps."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.is_awake = True

    def named_modules(self) -> list[tuple[str, Any]]:
        return []

    def modules(self) -> list[Any]:
        return []

    def parameters(self) -> list[Tensor]:
        assert self.is_awake, "the weights are used while the engine sleeps"
        return list(self.weights.values())

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            self.weights[name] = weight.clone()  # a copy on its device


class FakeAdapters:
    """vLLM's manager of adapters, which keeps its matrices in the memory of the weights."""

    def __init__(self, device: torch.device) -> None:
        matrix = SimpleNamespace(device=device, dtype=torch.float32)
        self.modules: dict[str, Any] = {"module": SimpleNamespace(lora_a_stacked=[matrix])}
        self.registered, self.active, self.used_numbers = dict[int, Any](), 0, set[int]()

    def list_adapters(self) -> dict[int, Any]:
        return dict(self.registered)

    def remove_adapter(self, number: int) -> None:
        del self.registered[number]

    def add_adapter(self, adapter: Any) -> None:
        assert not self.registered, "there is room for one adapter"
        self.registered[adapter.number] = adapter

    def activate_adapter(self, number: int) -> None:
        assert number not in self.used_numbers, "vLLM keeps the metadata of this number's last batch"
        self.used_numbers.add(number)
        self.active = number


class FakeLLM:
    """``vllm.LLM`` with ``tensor_parallel_size`` workers; ``log`` has its calls."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.log, self.asleep = arguments, list[str](), set[str]()
        self.workers = [realhf_server.WeightReceiver() for _ in range(arguments["tensor_parallel_size"])]
        for rank, worker in enumerate(self.workers):
            manager = SimpleNamespace(_adapter_manager=FakeAdapters(torch.device("cuda", rank)))
            worker.rank, worker.model_runner = rank, SimpleNamespace(model=FakeModel(), lora_manager=manager)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert "weights" not in self.asleep or method == "get_trainer_version", f"{method} while the weights sleep"
        self.log.append(method)
        return [getattr(worker, method)(*args) for worker in self.workers]

    def reset_prefix_cache(self) -> bool:
        self.log.append("reset_prefix_cache")
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.log.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        for worker in self.workers:
            worker.model_runner.model.weights.clear()
            worker.model_runner.lora_manager._adapter_manager.active = 0  # its matrices are lost

    def wake_up(self, tags: list[str] | None = None) -> bool:
        assert tags and set(tags) <= self.asleep
        self.log.append(f"wake_up {' '.join(tags)}")
        self.asleep -= set(tags)
        return not self.asleep

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling: list[Any], use_tqdm: bool = True, lora_request: Any = None
    ) -> list[Any]:
        assert not self.asleep, "generation while the engine sleeps"
        active = {worker.model_runner.lora_manager._adapter_manager.active for worker in self.workers}
        assert active == {lora_request.lora_int_id if lora_request else 0}
        self.log.append("generate")
        return [_repeated(prompt["prompt_token_ids"][-1], some.max_tokens)
                for prompt, some in zip(prompts, sampling, strict=True)]  # fmt: skip

    @property
    def adapters(self) -> list[FakeAdapters]:
        return [worker.model_runner.lora_manager._adapter_manager for worker in self.workers]

    @property
    def weights(self) -> list[dict[str, Tensor]]:
        return [worker.model_runner.model.weights for worker in self.workers]


def _repeated(token: int, length: int) -> Any:
    entry = {token: SimpleNamespace(logprob=-0.5)}
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token] * length, logprobs=[entry] * length)])


class InProcessServer:
    """Stands for ``VllmServer``: requests and replies pass through msgpack, but no process."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.version, self.has_base, self.sleeps, self.torch = name, -1, False, False, ""
        self.server: realhf_server.Server | None = None

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        arguments = msgspec.msgpack.decode(msgspec.msgpack.encode(arguments))
        if self.server is None:
            assert method == "start"
            self.server = realhf_server.Server(**arguments)
            return msgspec.msgpack.decode(msgspec.msgpack.encode(self.server.describe()))
        try:
            reply = getattr(self.server, method)(**arguments)
        except RuntimeError as error:
            raise RunFailed(f"{self.name} failed to {method}: {error}") from error
        return msgspec.msgpack.decode(msgspec.msgpack.encode(reply))

    def end_call(self) -> None:
        if self.sleeps:
            self.version, self.has_base = -1, False

    @property
    def llm(self) -> FakeLLM:
        assert self.server is not None
        return self.server.llm

    def close(self) -> None:
        self.server = None


@dataclass
class FakeEngineArgs:
    lora_target_modules: list[str]


class FakeLoraModel:
    """vLLM's adapter: tensors on a device, with B scaled."""

    @staticmethod
    def from_lora_tensors(number: int, tensors: dict[str, Tensor], helper: Any, device: str, dtype: torch.dtype) -> Any:
        assert all(str(one.device) == device and one.dtype == dtype for one in tensors.values())
        return SimpleNamespace(number=number, tensors=tensors, helper=helper, loras={"module": None})


ADAPTER_MODULES = {
    "vllm.engine.arg_utils": SimpleNamespace(EngineArgs=FakeEngineArgs),
    "vllm.lora.lora_model": SimpleNamespace(LoRAModel=FakeLoraModel),
    "vllm.lora.peft_helper": SimpleNamespace(PEFTHelper=lambda **options: SimpleNamespace(**options)),
    "vllm.lora.request": SimpleNamespace(
        LoRARequest=lambda name, number, path: SimpleNamespace(lora_name=name, lora_int_id=number)
    ),
}


def install(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> Handles:
    """Replace vLLM, its process and CUDA IPC until the end of the test; return the handles."""
    handles = Handles(cuda)
    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=lambda **options: SimpleNamespace(**options))
    for name, fake in {"vllm": module, **ADAPTER_MODULES}.items():
        patch.setitem(sys.modules, name, fake)  # type: ignore[arg-type]
    patch.setattr("realhf.models.engine.vllm.VllmServer", InProcessServer)
    patch.setattr(DeviceStorage, "_share_cuda_", lambda storage: handles.share(storage), raising=False)
    patch.setattr(torch.cuda, "synchronize", handles.wait)
    patch.setattr(realhf_server, "device_memory", handles.open)
    patch.setattr(torch.cuda, "ipc_collect", handles.collect)
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=80 << 30))
    return handles
