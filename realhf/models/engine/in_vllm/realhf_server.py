"""The process that runs vLLM: a worker's child, in an interpreter of its own if need be, that knows nothing of realhf.

Requests and answers are msgpack maps behind their length, over a socket that the child inherits. Weights are not sent:
every process of the engine maps the memory in which workers keep them, and copies from there into its own.
"""

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

LENGTH = struct.Struct("<I")
PR_SET_PDEATHSIG = 1
BATCHED_TOKENS = 8192
PLAIN = "REALHF_PLAIN_MATRICES"
WITHOUT_OUTSIDE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: one to start, to watch and to end
    "TORCHDYNAMO_DISABLE": "1",
}
_maps: dict[str, torch.Tensor] = {}


class Weights:
    """What every process of the engine can do beside vLLM's own: vLLM mixes this class into its worker."""

    model_runner: Any
    version = -1

    def take(self, pieces: list[dict[str, Any]], version: int) -> None:
        """Copy tensors from the trainer's memory into the model."""
        model = self.model_runner.model
        if all(weight.numel() for weight in model.parameters()):
            model.load_weights(tensors(pieces))
        else:  # matrices lie in an order of their kernels' own: they are made anew
            self.model_runner.reload_weights(weights_iterator=tensors(pieces))
        self.version = version

    def held(self) -> int:
        return self.version

    def bits(self) -> int:
        """Return the sum of all weights read as integers: it does not depend on how they are laid out.

        Where a kernel keeps a matrix in an order of its own, it is what comes out for the unit matrix.
        """
        total = 0
        for layer in self.model_runner.model.modules():
            for weight in layer.parameters(recurse=False):
                if hasattr(layer, "shard_indices"):  # of a vocabulary, which is filled up with rows of no token
                    total += bits_of(weight[: layer.shard_indices.num_org_elements])
                elif not weight.numel() and hasattr(layer, "cpu_linear"):
                    unit = torch.eye(layer.input_size_per_partition, dtype=weight.dtype)
                    total += bits_of(layer.cpu_linear(unit, weight, None))
                else:
                    total += bits_of(weight)
        return total


def bits_of(weight: torch.Tensor) -> int:
    return int(weight.detach().contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64))


def tensors(pieces: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield named tensors, each put together from where its parts lie: views where one part is all of it."""
    for piece in pieces:
        dtype, shape, places = getattr(torch, piece["dtype"]), tuple(piece["shape"]), piece["places"]
        if len(places) == 1 and not places[0]["transpose"] and tuple(places[0]["shape"]) == shape:
            yield piece["name"], mapped(places[0], dtype)
            continue
        whole = torch.empty(shape, dtype=dtype)
        for place in places:
            part = whole[tuple(slice(*span) for span in place["box"])]
            value = mapped(place, dtype)
            part.copy_((value.t() if place["transpose"] else value).reshape(part.shape))
        yield piece["name"], whole


def mapped(place: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a view of what lies at a place of a worker's memory."""
    path, shape = place["path"], tuple(place["shape"])
    if path not in _maps:
        with Path(path).open("r+b") as file:
            _maps[path] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    start = place["start"] * dtype.itemsize
    return _maps[path][start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def keep_matrices_plain() -> None:
    """Let vLLM's products on a CPU read matrices as they are loaded. Before a model is loaded, in every process."""
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


if os.environ.get(PLAIN):
    keep_matrices_plain()


class Server:
    """One engine and what it is asked to do."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=options["folder"],
            skip_tokenizer_init=True,
            load_format="dummy",  # weights come from the trainer
            dtype=options["dtype"],
            tensor_parallel_size=options["tp"],
            distributed_executor_backend="uni" if options["tp"] == 1 else "mp",
            max_model_len=options["max_length"],
            max_num_seqs=options["slots"],
            enforce_eager=True,
            enable_prefix_caching=True,
            # a row's generator on a CPU cannot be put back by what a part of a prompt drew (vLLM 0.32)
            enable_chunked_prefill=options["device"] != "cpu",
            max_num_batched_tokens=max(options["max_length"], BATCHED_TOKENS),
            logprobs_mode=options["logprobs"],
            worker_extension_cls=f"{Path(__file__).stem}.{Weights.__name__}",
            seed=0,
        )
        self.version = -1

    def load(self, pieces: list[dict[str, Any]], version: int) -> dict[str, Any]:
        """Take the trainer's weights; what was cached with others is forgotten."""
        began = time.perf_counter()
        self.llm.collective_rpc("take", args=(pieces, version))
        self.llm.reset_prefix_cache()
        self.version = version
        return {"seconds": time.perf_counter() - began}

    def bits(self) -> dict[str, Any]:
        return {"bits": self.llm.collective_rpc("bits")}

    def generate(self, version: int, prompts: list[list[int]], rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample an answer for every row, if all processes of the engine hold the weights of that version."""
        from vllm import SamplingParams

        held = self.llm.collective_rpc("held")
        if any(one != version for one in held):
            raise RuntimeError(f"weights of version {version} are wanted, the engine holds {held}")
        sampling = [SamplingParams(logprobs=0, detokenize=False, ignore_eos=True, **row["sampling"]) for row in rows]
        texts = [{"prompt_token_ids": prompts[row["prompt"]]} for row in rows]
        answers = [found.outputs[0] for found in self.llm.generate(texts, sampling, use_tqdm=False)]
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "logprobs": [
                [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
                for answer in answers
            ],
        }


def serve(wire: socket.socket) -> None:
    """Answer until the parent hangs up."""
    server: Server | None = None
    while (request := receive(wire)) is not None:
        what = request.pop("do")
        try:
            if server is None:
                server = Server(**request)
                reply: dict[str, Any] = {}
            else:
                reply = getattr(server, what)(**request)
        except Exception as error:  # the parent shows it, and decides
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        send(wire, reply)


def send(wire: socket.socket, message: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(message)
    wire.sendall(LENGTH.pack(len(body)) + body)


def receive(wire: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None when the parent has hung up."""
    head = exactly(wire, LENGTH.size)
    body = exactly(wire, LENGTH.unpack(head)[0]) if head else None
    return msgspec.msgpack.decode(body) if body is not None else None


def exactly(wire: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        part = wire.recv(min(size - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return bytes(received)


def die_with_parent() -> None:
    """Be killed when the worker ends, however it ends: one that stands still hears of nothing else."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    os.environ.update(WITHOUT_OUTSIDE)
    folder = str(Path(__file__).parent)  # vLLM's own processes look for ``Weights`` by name
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    serve(socket.socket(fileno=int(sys.argv[1])))
