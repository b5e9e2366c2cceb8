"""The vLLM process: a child of the worker, possibly with another interpreter, so it does not import realhf.

Requests and replies are length-prefixed msgpack maps over a socket that the child inherits. Weights are not sent: every
process of the vLLM engine opens the workers' memory, on a GPU by CUDA IPC, and copies them from there.
"""

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

LENGTH = struct.Struct("<I")
PR_SET_PDEATHSIG = 1
BATCHED_TOKENS = 8192
NO_PACKING, ONE_ADAPTER = "REALHF_PLAIN_MATRICES", "REALHF_ONE_ADAPTER"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
}
_maps: dict[str, torch.Tensor] = {}


class WeightReceiver:
    """Methods that vLLM adds to its worker class (``worker_extension_cls``), for every process of the engine."""

    model_runner: Any
    rank: int
    trainer_version = -1
    trainer_memory: tuple[torch.Tensor, ...] = ()

    def load_from_trainer(self, tensors: list[dict[str, Any]], memory: list[dict[str, Any]], version: int) -> None:
        """Copy tensors from the trainer's memory into the model.

        The first request of an update has the ``memory``, the last one the ``version``, which is -1 in others.
        """
        model = self.model_runner.model
        experts = [layer for layer in model.modules() if hasattr(layer, "w13_weight")]
        if memory:
            self.open_trainer_memory(memory)
            for layer in experts:
                if not layer.w13_weight.is_cuda:
                    layer.quant_method.moe_kernel = None  # vLLM 0.32 packs experts on CPUs for a new kernel only
        with without_adapters(model):
            if not experts and all(weight.numel() for weight in model.parameters()):
                model.load_weights(assembled(tensors, self.trainer_memory))
            else:  # kernels have packed the matrices: build them again
                self.model_runner.reload_weights(weights_iterator=assembled(tensors, self.trainer_memory))
        self.trainer_version = version
        if version >= 0:
            self.close_trainer_memory()

    def load_adapter_from_trainer(
        self, tensors: list[dict[str, Any]], memory: list[dict[str, Any]], version: int, adapter: dict[str, Any]
    ) -> None:
        """Replace the adapter of the model by a copy of the trainer's; ``adapter`` has ``number``, ``rank``, ``alpha``.

        Every adapter has a new number: vLLM keeps metadata of a batch as long as the numbers are the same, and loses
        them when it sleeps.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        self.trainer_version = -1
        self.open_trainer_memory(memory)
        manager = self.model_runner.lora_manager._adapter_manager
        like = next(iter(manager.modules.values())).lora_a_stacked[0]
        # copies: vLLM scales the matrices B in place
        copies = {
            name: tensor.to(like.device, like.dtype, copy=True)
            for name, tensor in assembled(tensors, self.trainer_memory)
        }
        self.close_trainer_memory()
        helper = PEFTHelper(r=adapter["rank"], lora_alpha=adapter["alpha"], target_modules=[])
        model = LoRAModel.from_lora_tensors(
            adapter["number"], copies, helper, device=str(like.device), dtype=like.dtype
        )
        for old in manager.list_adapters():
            manager.remove_adapter(old)
        manager.add_adapter(model)
        if unknown := model.loras.keys() - manager.modules.keys():
            raise RuntimeError(f"vLLM has no adapters for {len(unknown)} modules: {sorted(unknown)[0]}, ...; "
                               "set vllm.merge_lora=True")  # fmt: skip
        manager.activate_adapter(adapter["number"])
        self.trainer_version = version

    def open_trainer_memory(self, memory: list[dict[str, Any]]) -> None:
        if self.trainer_memory:
            self.close_trainer_memory()
        self.trainer_memory = tuple(opened(shard, self.rank) for shard in memory)

    def close_trainer_memory(self) -> None:
        """Release the trainer's memory, once the copies from it have ended."""
        on_gpu = any(shard.is_cuda for shard in self.trainer_memory)
        if on_gpu:
            torch.cuda.synchronize()
        self.trainer_memory = ()
        if on_gpu:
            torch.cuda.ipc_collect()

    def get_trainer_version(self) -> int:
        return self.trainer_version

    def weights_checksum(self) -> int:
        """Return the sum of all weights and adapters read as integers, which does not depend on their memory layout.

        A matrix packed by a kernel is recovered by multiplying with the unit matrix.
        """
        total = 0
        for layer in self.model_runner.model.modules():
            for matrices in (*getattr(layer, "lora_a_stacked", ()), *getattr(layer, "lora_b_stacked", ())):
                total += integer_sum(matrices)
            for weight in layer.parameters(recurse=False):
                if hasattr(layer, "shard_indices"):  # a vocabulary, padded with unused rows
                    total += integer_sum(weight[: layer.shard_indices.num_org_elements])
                elif not weight.numel() and hasattr(layer, "cpu_linear"):
                    unit = torch.eye(layer.input_size_per_partition, dtype=weight.dtype)
                    total += integer_sum(layer.cpu_linear(unit, weight, None))
                else:
                    total += integer_sum(weight)
        return total


def integer_sum(weight: torch.Tensor) -> int:
    return int(weight.detach().contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64))


def assembled(tensors: list[dict[str, Any]], memory: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield named tensors assembled from their slices: a view if one slice is the whole tensor."""
    for tensor in tensors:
        dtype, shape, slices = getattr(torch, tensor["dtype"]), tuple(tensor["shape"]), tensor["slices"]
        values = [slice_of(memory[one["shard"]], one, dtype) for one in slices]
        if len(slices) == 1 and not slices[0]["order"] and tuple(slices[0]["shape"]) == shape:
            yield tensor["name"], values[0]
            continue
        whole = torch.empty(shape, dtype=dtype, device=values[0].device)
        for one, value in zip(slices, values, strict=True):
            target = whole[tuple(slice(*span) for span in one["box"])]
            target.copy_((value.permute(one["order"]) if one["order"] else value).reshape(target.shape))
        yield tensor["name"], whole


def slice_of(memory: torch.Tensor, where: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a view of a slice in the memory of a shard."""
    return memory.view(dtype)[where["start"] :].as_strided(tuple(where["shape"]), tuple(where["strides"]))


def opened(shard: dict[str, Any], rank: int) -> torch.Tensor:
    """Return the memory of a shard as bytes. Files stay mapped; a handle of a device is for one process, once."""
    if "path" not in shard:
        return device_memory(shard["device"], shard["handles"][rank])
    path = shard["path"]
    if path not in _maps:
        with Path(path).open("r+b") as file:
            _maps[path] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    return _maps[path]


def device_memory(device: int, handle: list[Any]) -> torch.Tensor:
    """Return the memory behind a CUDA IPC handle of torch: arguments of ``_new_shared_cuda`` after the device."""
    torch.cuda._lazy_init()
    storage = torch.UntypedStorage._new_shared_cuda(device, *handle)
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)


def use_plain_matrix(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Remove vLLM's wrappers of modules with adapters for the duration: they change the names of the weights."""
    wrappers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_a_stacked")}
    for name, wrapper in wrappers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, wrapper)


def add_adapter_product(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Add the product of the only adapter. vLLM's own code for CPUs copies the matrices for every token."""
    start = 0
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + width].addmm_(x @ a[0, 0].t(), b[0, 0].t(), alpha=scale)
        start += width


if os.environ.get(ONE_ADAPTER):
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    PunicaWrapperCPU.add_lora_linear = add_adapter_product

if os.environ.get(NO_PACKING):  # every process of the engine imports this module before it loads a model
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = use_plain_matrix


def engine_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``."""
    is_cpu = options["device"] == "cpu"
    return {
        "model": options["folder"],
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # weights come from the trainer
        "dtype": options["dtype"],
        "tensor_parallel_size": options["tp"],
        "distributed_executor_backend": "uni" if options["tp"] == 1 else "mp",
        "max_model_len": options["max_length"],
        "max_num_seqs": options["slots"],
        "enforce_eager": is_cpu,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": not is_cpu,  # vLLM 0.32 does not reset a row's CPU generator after a partial prefill
        "max_num_batched_tokens": max(options["max_length"], BATCHED_TOKENS) if is_cpu else BATCHED_TOKENS,
        "logprobs_mode": options["logprobs"],
        "worker_extension_cls": f"{Path(__file__).stem}.{WeightReceiver.__name__}",
        "seed": 0,
        **(adapter_arguments(options["adapter"]) if options["adapter"] else {}),
        **options["gpu"],
    }


def adapter_arguments(adapter: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for one adapter at a time."""
    limits = {"max_loras": 1, "max_lora_rank": adapter["max_rank"]}
    return {"enable_lora": True, "lora_target_modules": adapter["modules"], **limits}


def check_adapters_are_supported() -> None:
    from vllm.engine.arg_utils import EngineArgs

    if "lora_target_modules" not in {field.name for field in fields(EngineArgs)}:
        raise RuntimeError("adapters beside the base need vLLM 0.20 or newer; set vllm.merge_lora=True")


class Server:
    """One engine and the methods that a worker calls."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.adapter: dict[str, Any] | None = options["adapter"]
        self.lora_request: Any = None
        if self.adapter:
            check_adapters_are_supported()
        self.llm = LLM(**engine_arguments(options))
        self.sleeps = bool(options["gpu"].get("enable_sleep_mode"))
        self.sleep()

    def describe(self) -> dict[str, Any]:
        return {"sleeps": self.sleeps, "torch": str(torch.__version__)}

    def sleep(self) -> None:
        """Free weights and cache, if vLLM sleeps between calls; the trainer sends the weights of every call."""
        if self.sleeps:
            self.llm.sleep(level=2)

    def load(self, tensors: list[dict[str, Any]], memory: list[dict[str, Any]], version: int) -> dict[str, Any]:
        """Load the trainer's weights and drop the prefix cache of older ones."""
        if self.sleeps and memory:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("load_from_trainer", args=(tensors, memory, version))
        if version >= 0:
            self.prepare_cache()
        return {}

    def load_adapter(self, tensors: list[dict[str, Any]], memory: list[dict[str, Any]], version: int) -> dict[str, Any]:
        """Replace the adapter by the trainer's, which completes a version of the weights."""
        from vllm.lora.request import LoRARequest

        assert self.adapter is not None
        number = 1 if self.lora_request is None else self.lora_request.lora_int_id + 1
        adapter = {**self.adapter, "number": number}
        self.llm.collective_rpc("load_adapter_from_trainer", args=(tensors, memory, version, adapter))
        self.lora_request = LoRARequest(f"adapter {number}", number, "in memory")
        self.prepare_cache()
        return {}

    def prepare_cache(self) -> None:
        """Allocate the cache of an engine that sleeps between calls, and drop prefixes of older weights."""
        if self.sleeps:  # not before, so that tensors being assembled can use the memory of the cache
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def checksum(self) -> dict[str, Any]:
        return {"checksums": self.llm.collective_rpc("weights_checksum")}

    def generate(self, version: int, prompts: list[list[int]], rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample a response for every row; raises RuntimeError if a process has weights of another version."""
        self.check_version(version)
        sampling = [sampling_params(row["sampling"]) for row in rows]
        inputs = [{"prompt_token_ids": prompts[row["prompt"]]} for row in rows]
        results = self.llm.generate(inputs, sampling, use_tqdm=False, lora_request=self.lora_request)
        responses = [result.outputs[0] for result in results]
        self.sleep()
        return {"tokens": [list(one.token_ids) for one in responses], "logprobs": list(map(logprobs_of, responses))}

    def check_version(self, version: int) -> None:
        versions = self.llm.collective_rpc("get_trainer_version")
        if any(one != version for one in versions):
            raise RuntimeError(f"weights of version {version} are requested, the engine has versions {versions}")

    def sample_turns(self, version: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Add turns, each with an ``id``, ``tokens`` and ``sampling``; run until one or more are finished."""
        from vllm.sampling_params import RequestOutputKind

        engine, finished, final = self.llm.llm_engine, list[Any](), RequestOutputKind.FINAL_ONLY
        if not engine.has_unfinished_requests():
            self.check_version(version)
        for row in rows:
            params = sampling_params(row["sampling"], output_kind=final)
            prompt = {"prompt_token_ids": row["tokens"]}
            engine.add_request(row["id"], prompt, params, lora_request=self.lora_request)
        while engine.has_unfinished_requests() and not finished:
            finished += [result for result in engine.step() if result.finished]
        turns = [(result.request_id, result.outputs[0]) for result in finished]
        return {"turns": [{"id": i, "tokens": list(one.token_ids), "logprobs": logprobs_of(one)} for i, one in turns]}

    def end_turns(self) -> dict[str, Any]:
        self.sleep()
        return {}


def sampling_params(options: dict[str, Any], **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(logprobs=0, detokenize=False, ignore_eos=True, **options, **more)


def logprobs_of(response: Any) -> list[float]:
    return [step[token].logprob for step, token in zip(response.logprobs, response.token_ids, strict=True)]


def serve(connection: socket.socket) -> None:
    """Reply to requests until the parent closes the connection."""
    server: Server | None = None
    requests = connection.makefile("rb")
    while (request := receive(requests)) is not None:
        method = request.pop("method")
        try:
            if server is None:
                server = Server(**request)
                reply = server.describe()
            else:
                reply = getattr(server, method)(**request)
        except Exception as error:  # the parent reports it
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        send(connection, reply)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(body)) + body)


def receive(requests: BinaryIO) -> dict[str, Any] | None:
    """Return the next message; None if the parent has closed the connection."""
    head = requests.read(LENGTH.size)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    body = requests.read(size)
    return msgspec.msgpack.decode(body) if size and len(body) == size else None


if __name__ == "__main__":
    # the kernel kills this process when the worker exits; a hung process would not notice it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(ENVIRONMENT)
    folder = str(Path(__file__).parent)  # vLLM's own processes import ``WeightReceiver`` by name
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    serve(socket.socket(fileno=int(sys.argv[1])))
