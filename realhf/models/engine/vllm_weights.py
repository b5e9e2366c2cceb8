"""Weights on their way to vLLM: which slices of which shard make its tensors, and how it opens the shards' memory."""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import intersect
from realhf.arch.families import FAMILIES
from realhf.base.shared_buffer import SharedBuffer, fd_path
from realhf.comm.process_groups import Group
from realhf.models.engine.native import NativeEngine, empty_shard
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import StoredSlices, hf_shapes, stored_slices
from realhf.models.peft_folder import peft_slices

BUCKET_BYTES = 512 << 20
"""Weights per request, which limits the memory for tensors that are assembled from several shards."""

Bucket = tuple[dict[str, Any], ...]
Spans = tuple[tuple[int, int, int | None], ...]
"""Start, stop and step of a slice in every dimension."""
Memory = list[dict[str, Any]]
"""By shard of the replica: how vLLM's processes open its memory."""


class WeightMemory(Protocol):
    """The memory of a replica's shards, which vLLM's processes open."""

    def export(self) -> Memory:
        """Return the memory with the current weights. Collective over the replica's tensor-parallel group."""


class HostMemory:
    """Weights in shared host memory, which vLLM's processes map by its path."""

    def __init__(self, shared: SharedBuffer, group: Group) -> None:
        paths = gather_bytes(group, fd_path(*shared.handle).encode(), torch.device("cpu"))
        self._memory: Memory = [{"path": path.decode()} for path in paths]

    def export(self) -> Memory:
        return self._memory


class DeviceMemory:
    """Weights on GPUs, opened by CUDA IPC. vLLM's processes see the devices of the replica in order of its shards.

    A handle is opened once by one process, which releases it after the update; torch keeps the memory until then.
    """

    def __init__(self, weights: Tensor, group: Group) -> None:
        self._weights, self._group = weights, group

    def export(self) -> Memory:
        torch.cuda.synchronize(self._weights.device)  # another process does not wait for this stream
        storage = self._weights.untyped_storage()
        handles = [storage._share_cuda_()[1:] for _ in range(self._group.size)]
        gathered = gather_bytes(self._group, msgspec.msgpack.encode(handles), self._weights.device)
        return [{"device": i, "handles": msgspec.msgpack.decode(shard)} for i, shard in enumerate(gathered)]


def weight_memory(params: FlatParams, group: Group) -> WeightMemory:
    """Return the memory of a replica's shards, of which ``params`` is that of this rank. Collective."""
    return DeviceMemory(params.data, group) if params.shared is None else HostMemory(params.shared, group)


def gather_bytes(group: Group, data: bytes, device: torch.device) -> list[bytes]:
    """Return the bytes of every member, ordered by ``index``; their lengths may differ. Collective."""
    lengths = torch.empty(group.size, dtype=torch.int64, device=device)
    group.all_gather(lengths, torch.tensor([len(data)], device=device))
    longest = max(sizes := lengths.tolist())
    gathered = torch.empty(group.size * longest, dtype=torch.uint8, device=device)
    group.all_gather(gathered, torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(device))
    return [bytes(part[:size]) for part, size in zip(gathered.view(-1, longest).tolist(), sizes, strict=True)]


def make_buckets(engine: NativeEngine) -> tuple[Bucket, ...]:
    """Return the weights of the engine's replica in requests of about ``BUCKET_BYTES``.

    A layer is in one request, since vLLM fuses some of its tensors.
    """
    config, dtype = replace(engine.config, lora=None), engine.model.dtype
    tensors = _mapped_tensors(stored_slices(config), _shards(engine, config, dtype), dtype)
    if has_copied_head(config):  # sent twice, since vLLM does not reload a shared tensor
        names = FAMILIES[config.family].hf_tensors(replace(config, tied_embedding=False))
        embedding = next(both for both in tensors if both[1]["name"] == names["embed.weight"][0].name)
        tensors.append((embedding[0], {**embedding[1], "name": names["head.weight"][0].name}))
    buckets: list[list[dict[str, Any]]] = []
    bytes_left, last_layer = 0, -1
    for layer, tensor in sorted(tensors, key=itemgetter(0)):
        if layer != last_layer and bytes_left <= 0:
            buckets.append([])
            bytes_left = BUCKET_BYTES
        last_layer = layer
        bytes_left -= math.prod(tensor["shape"]) * dtype.itemsize
        buckets[-1].append(tensor)
    return tuple(map(tuple, buckets))


def has_copied_head(config: ModelConfig) -> bool:
    """Return True if vLLM stores a tied embedding a second time, as the head; its Gemma 2 has no head."""
    return config.tied_embedding and config.family != "gemma2"


def adapter_tensors(engine: NativeEngine) -> Bucket:
    """Return the adapters of the engine's replica, whole, with the names of PEFT's files."""
    dtype = engine.params.data.dtype
    tensors = _mapped_tensors(peft_slices(engine.config), _shards(engine, engine.config, dtype), dtype)
    return tuple(tensor for _, tensor in tensors)


def _shards(engine: NativeEngine, config: ModelConfig, dtype: torch.dtype) -> list[FlatParams]:
    """Return the shards of the engine's replica, without memory."""
    layout, ranks = engine.context.layout, sorted(engine.context.group("tp").ranks)
    return [empty_shard(config, layout, rank, dtype, "meta", layout.strategy.dp) for rank in ranks]


def merged_shard(engine: NativeEngine, name: str) -> FlatParams:
    """Return memory for an engine's weights with merged adapters, on CPUs shared memory."""
    config, context = replace(engine.config, lora=None), engine.context
    where = context.layout, context.rank, engine.model.dtype, context.device, context.layout.strategy.dp
    return empty_shard(config, *where, shared_name=name if context.device.type == "cpu" else "")


def _mapped_tensors(
    stored: StoredSlices, shards: Sequence[FlatParams], dtype: torch.dtype
) -> list[tuple[int, dict[str, Any]]]:
    """Return the layer and the request of every stored tensor, with its slices in the shards.

    The shards need no memory. A slice that several shards hold is taken from the first.
    """
    layers = {part.name: shards[0].spec(ours).layer for ours, several in stored.items() for part in several}
    slices: dict[str, dict[Spans, dict[str, Any]]] = {name: {} for name in layers}
    for number, shard in enumerate(shards):
        for name, part in ((ours, part) for ours in shard.names for part in stored[ours]):
            if (ours := intersect(part.at, shard.box(name))) is None:
                continue
            spans = ((span.start, span.stop, span.step) for span in part.stored(ours))
            value, box = shard.read(name, ours), tuple(spans)
            found = {"shard": number, "start": value.storage_offset(), "shape": tuple(value.shape), "box": box}
            found |= {"strides": value.stride(), "order": part.order if part.is_permuted else ()}
            slices[part.name].setdefault(box, found)
    dtype_name = str(dtype).removeprefix("torch.")
    return [
        (layers[name], {"name": name, "dtype": dtype_name, "shape": shape, "slices": list(slices[name].values())})
        for name, shape in hf_shapes(stored).items()
    ]
