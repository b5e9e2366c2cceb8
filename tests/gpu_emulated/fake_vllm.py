"""A vLLM engine on fake devices: it keeps the weights it is given, sleeps, and repeats the prompt's last token.

CUDA IPC is replaced by a table of handles, in which every handle can be opened once by one process, as in torch.
"""

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

    def parameters(self) -> list[Tensor]:
        assert self.is_awake, "the weights are used while the engine sleeps"
        return list(self.weights.values())

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            self.weights[name] = weight.clone()  # a copy on its device


class FakeLLM:
    """``vllm.LLM`` with ``tensor_parallel_size`` workers; ``log`` has its calls."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.log, self.asleep = arguments, list[str](), set[str]()
        self.workers = [realhf_server.WeightReceiver() for _ in range(arguments["tensor_parallel_size"])]
        for rank, worker in enumerate(self.workers):
            worker.rank, worker.model_runner = rank, SimpleNamespace(model=FakeModel())

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

    def wake_up(self, tags: list[str] | None = None) -> bool:
        assert tags and set(tags) <= self.asleep
        self.log.append(f"wake_up {' '.join(tags)}")
        self.asleep -= set(tags)
        return not self.asleep

    def generate(self, prompts: list[dict[str, list[int]]], sampling: list[Any], use_tqdm: bool = True) -> list[Any]:
        assert not self.asleep, "generation while the engine sleeps"
        self.log.append("generate")
        return [_repeated(prompt["prompt_token_ids"][-1], some.max_tokens)
                for prompt, some in zip(prompts, sampling, strict=True)]  # fmt: skip

    @property
    def weights(self) -> list[dict[str, Tensor]]:
        return [worker.model_runner.model.weights for worker in self.workers]


def _repeated(token: int, length: int) -> Any:
    entry = {token: SimpleNamespace(logprob=-0.5)}
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token] * length, logprobs=[entry] * length)])


class InProcessServer:
    """Stands for ``VllmServer``: requests and replies pass through msgpack, but no process."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.version, self.sleeps, self.torch = name, -1, False, ""
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

    @property
    def llm(self) -> FakeLLM:
        assert self.server is not None
        return self.server.llm

    def close(self) -> None:
        self.server = None


def install(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> Handles:
    """Replace vLLM, its process and CUDA IPC until the end of the test; return the handles."""
    handles = Handles(cuda)
    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=lambda **options: SimpleNamespace(**options))
    patch.setitem(__import__("sys").modules, "vllm", module)  # type: ignore[arg-type]
    patch.setattr("realhf.models.engine.vllm.VllmServer", InProcessServer)
    patch.setattr(DeviceStorage, "_share_cuda_", lambda storage: handles.share(storage), raising=False)
    patch.setattr(torch.cuda, "synchronize", handles.wait)
    patch.setattr(realhf_server, "device_memory", handles.open)
    patch.setattr(torch.cuda, "ipc_collect", handles.collect)
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=80 << 30))
    return handles
