"""Generation by vLLM: the native engine holds, trains and moves the weights; the process in in_vllm/ samples."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realhf.api.config import GenerationConfig, VllmConfig
from realhf.api.model_config import ModelConfig
from realhf.arch.hot_adapters import merge_reason, padded_rank, served_modules
from realhf.arch.lora import is_adapter
from realhf.base.errors import RunFailed
from realhf.base.seeds import stable_seed
from realhf.data.batch import SequenceBatch
from realhf.data.turns import TurnDriver
from realhf.models.engine.decode.generate import build_result, empty_result, first_responses
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.decode.session import broadcast_bytes
from realhf.models.engine.native import NativeEngine
from realhf.models.engine.nonfinite import nonfinite_logits
from realhf.models.engine.vllm_process import VllmServer
from realhf.models.engine.vllm_turns import play_turns, sampling_options
from realhf.models.engine.vllm_weights import (
    Bucket,
    Memory,
    WeightMemory,
    adapter_tensors,
    gather_bytes,
    has_copied_head,
    make_buckets,
    merged_shard,
    weight_memory,
)
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import config_json
from realhf.models.peft_folder import merged_parameter

VISIBLE = "CUDA_VISIBLE_DEVICES"
NOT_INHERITED = ("TORCH_NCCL_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Prefixes of variables that are the worker's alone: its flight record, and segments that vLLM cannot put to sleep."""
RUNTIME_BYTES = 2 << 30
"""A vLLM process on a GPU without weights and cache: libraries, activations, graphs."""


@dataclass(frozen=True)
class WeightUpdate:
    """What vLLM needs before a call: memory with the weights or adapters, if it lacks their version."""

    checksum: int
    weights: Memory
    adapter: Memory


@dataclass(frozen=True)
class VllmEngine(NativeEngine):
    """A native engine that generates with vLLM. The first rank of a tensor-parallel group calls it and broadcasts.

    vLLM copies the weights in ``served``: those of the engine, or with LoRA the frozen base, or a copy with merged
    adapters. ``adapter_memory`` has adapters that are not merged, whose tensors are ``adapter``.
    """

    served: FlatParams | None = None
    server: VllmServer | None = None
    buckets: tuple[Bucket, ...] = ()
    memory: WeightMemory | None = None
    adapter: Bucket = ()
    adapter_memory: WeightMemory | None = None
    verify: bool = False

    def generate(
        self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int, record_experts: bool = False
    ) -> SequenceBatch:
        if record_experts:
            raise ValueError("vLLM does not return the experts of tokens")
        stop_ids = tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))
        request = Request(prompts, config, n, seed, stop_ids, 0)
        if not request.n_rows:
            return empty_result(prompts["prompts"].device)
        group, device = self.context.group("tp"), self.context.device
        update = self._synchronised()
        first = group.ranks.index(min(group.ranks))
        counts, tokens, logprobs = torch.zeros(request.n_rows, dtype=torch.int64), None, None
        if self.server is not None:
            counts, tokens, logprobs = self._request(request, update)
        counts = group.broadcast(counts.to(device), first)
        if tokens is None or logprobs is None:
            tokens, logprobs = torch.empty(int(counts.sum()), dtype=torch.int64), torch.empty(int(counts.sum()))
        tokens, logprobs = (group.broadcast(some.to(device), first) for some in (tokens, logprobs))
        if len(invalid := (~logprobs.isfinite()).nonzero()):  # vLLM samples from logits that are NaN
            row = int(torch.searchsorted(counts.cumsum(0), invalid[0], right=True))
            response = tokens[int(counts[:row].sum()) : int(invalid[0])]
            raise nonfinite_logits(self.model, request, row, response.tolist())
        return first_responses(build_result(request, counts, tokens, torch.stack((logprobs, logprobs))), request)

    def sample_turns(
        self,
        make_driver: Callable[[], TurnDriver],
        config: GenerationConfig,
        seed: int,
        max_len: int,
        max_episodes: int,
    ) -> bytes:
        group, device = self.context.group("tp"), self.context.device
        update = self._synchronised()
        result = b""
        if self.server is not None:
            self._send_weights(self.server, update)
            stop_ids = tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))
            result = play_turns(self.server, self.version, make_driver(), config, seed, stop_ids)
        return broadcast_bytes(group, result, group.ranks.index(min(group.ranks)), device)

    def _synchronised(self) -> WeightUpdate:
        """Return what vLLM needs of the replica's weights. Collective."""
        is_stale = self.server is not None and self.server.version != self.version
        lacks_base = is_stale and not self.server.has_base if self.server is not None else False
        if self.config.lora is not None and self.adapter_memory is None:
            self._merge()
        state = [self._checksum() if self.verify else 0, int(is_stale), int(lacks_base)]
        # also a barrier: all shards of the weights are up to date
        total = self.context.group("tp").all_reduce(torch.tensor(state, device=self.context.device))
        checksum, needs_adapter, needs_weights = total.tolist()
        weights = self.memory.export() if needs_weights and self.memory is not None else []
        adapter = self.adapter_memory.export() if needs_adapter and self.adapter_memory is not None else []
        return WeightUpdate(checksum, weights, adapter)

    @torch.no_grad()
    def _merge(self) -> None:
        """Write the weights with merged adapters."""
        served = self._served

        def read(name: str) -> Tensor:
            return (self.params if name in self.params.names else self.model.base).view(name)

        for name in served.names:
            served.view(name).copy_(merged_parameter(self.config, read, name))

    @property
    def _served(self) -> FlatParams:
        assert self.served is not None
        return self.served

    def _check_weights(self, checksum: int) -> None:
        assert self.server is not None
        if self.verify and (theirs := sum(self.server.call("checksum")["checksums"])) != checksum:
            raise RunFailed(
                f"{self.server.name} has different weights from the trainer: checksums {theirs} and {checksum}"
            )

    def _checksum(self) -> int:
        """Return the sum of this shard's weights, read as integers; like in vLLM, a copied head counts, too."""
        tied = [self._served.view("embed.weight")] if has_copied_head(self.config) else []
        adapters = list[Tensor]()
        if self.adapter_memory is not None and self.config.lora is not None:
            for name in filter(is_adapter, self.params.names):  # as vLLM has them: in the base's type, with B scaled
                adapter = self.params.view(name).to(self.model.dtype)
                adapters.append(adapter if name.endswith(".lora_a") else adapter * self.config.lora.scaling)
        weights = (self._served.data, *tied, *adapters)
        return sum(int(some.reshape(-1).view(torch.int16).sum(dtype=torch.int64)) for some in weights)

    def _send_weights(self, server: VllmServer, update: WeightUpdate) -> None:
        """Send what vLLM needs, then compare checksums if they are to be verified."""
        if update.weights or update.adapter:
            self._send(server, update)
        self._check_weights(update.checksum)

    def _send(self, server: VllmServer, update: WeightUpdate) -> None:
        if self._served.data.is_cuda:
            torch.cuda.empty_cache()  # vLLM allocates from what torch does not hold
        try:
            memory = update.weights
            for bucket in self.buckets if memory else ():
                is_last = bucket is self.buckets[-1] and not update.adapter
                server.call("load", tensors=bucket, memory=memory, version=self.version if is_last else -1)
                memory = []  # it is open until the last request
            if update.adapter:
                server.has_base = True
                server.call("load_adapter", tensors=self.adapter, memory=update.adapter, version=self.version)
        except RunFailed as error:
            if not self._served.data.is_cuda or server.torch == torch.__version__:
                raise
            raise RunFailed(
                f"{error}; vLLM has torch {server.torch}, this worker torch {torch.__version__}, and an older torch "
                "may not open the memory handles of a newer one; use a vLLM for this torch"
            ) from error
        server.version = self.version

    def _request(self, request: Request, update: WeightUpdate) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers of tokens by row, all tokens, and their log-probabilities."""
        assert self.server is not None
        self._send_weights(self.server, update)
        rows = [{"prompt": i // request.n, "sampling": sampling_params(request, i)} for i in range(request.n_rows)]
        reply = self.server.call("generate", version=self.version, prompts=list(request.prompt_tokens), rows=rows)
        self.server.end_call()
        counts = torch.tensor([len(tokens) for tokens in reply["tokens"]])
        tokens = torch.tensor([token for tokens in reply["tokens"] for token in tokens])
        logprobs = torch.tensor([p for some in reply["logprobs"] for p in some], dtype=torch.float32)
        return counts, tokens, logprobs


def sampling_params(request: Request, row: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a row: those of the native engine, and a seed per row."""
    prompt, sample = divmod(row, request.n)
    seed = stable_seed(request.seed, request.prompts.ids[prompt].prompt, sample) >> 1
    return sampling_options(request.config, request.budgets[prompt], request.stop_ids, seed)


def vllm_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``config.json`` whose rotary embeddings in vLLM are ours, for rows of any length.

    vLLM chooses LongRoPE's factors by its maximum length and computes their scale from the positions alone.
    """
    fixed = config.with_fixed_rotary()
    fields, scaling = config_json(fixed, dtype), dict(fixed.rotary_scaling)
    if scaling.get("rope_type") == "longrope":
        scales = dict.fromkeys(("short_mscale", "long_mscale"), scaling["attention_factor"])
        for key in ("rope_scaling", "rope_parameters"):
            fields[key] = {**fields[key], **scales}
    return fields


@dataclass(frozen=True)
class VllmLauncher:
    """Starts the vLLM processes of a role.

    The model's ``config.json`` is written to ``folder``. All requests have the same ``temperature``. With ``verify``,
    weight checksums are compared before every generation. The ``n_workers`` workers of a host share its cores.
    """

    options: VllmConfig
    folder: Path
    log: Path
    temperature: float = 1.0
    verify: bool = False
    n_workers: int = 1

    def start(self, engine: NativeEngine, devices: Sequence[str], weight_bytes: int) -> VllmServer:
        """Start a process for an engine's replica, on its GPUs if any; raises RunFailed if vLLM does not start.

        ``weight_bytes`` is the size of a shard of the weights that it gets, without adapters.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        dtype, context = engine.model.dtype, engine.context
        tied = engine.config.tied_embedding and not has_copied_head(engine.config)
        hf_config = vllm_config(replace(engine.config, tied_embedding=tied, lora=None), dtype)
        (self.folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        name, ranks = f"vLLM of worker {context.rank}", context.group("tp").ranks
        adapter = self.adapter_options(engine)
        environment = self.environment(ranks, devices)
        if adapter and not devices:
            environment["REALHF_ONE_ADAPTER"] = "1"
        server = VllmServer(name, self.options, self.log, environment, context.activity)
        options = {
            "folder": str(self.folder),
            "dtype": str(dtype).removeprefix("torch."),
            "device": context.device.type,
            "tp": len(ranks),
            "max_length": self.options.max_length or engine.config.max_row_len,
            "slots": self.options.max_num_seqs,
            # of the tempered distribution: the raw one, or the sampled one, which top-k and top-p must not restrict
            "logprobs": "raw_logprobs" if self.temperature in (0.0, 1.0) else "processed_logprobs",
            "adapter": adapter,
            "gpu": self.gpu_options(engine, weight_bytes) if devices else {},
        }
        try:
            started = server.call("start", options=options)
            server.sleeps, server.torch = started["sleeps"], started["torch"]
        except BaseException:
            server.close()
            raise
        return server

    def environment(self, ranks: Sequence[int], devices: Sequence[str]) -> dict[str, str]:
        """Return the environment of the process: the replica's devices in the order of its shards, or its cores."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(NOT_INHERITED)}
        if devices:
            return {**inherited, VISIBLE: ",".join(devices)}
        return {
            **inherited,
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": f"{max(1, round(self.options.kv_cache_bytes(0.0) / 2**30))}",
            "VLLM_CPU_OMP_THREADS_BIND": self._cores(ranks),
            "REALHF_PLAIN_MATRICES": "" if self.options.pack else "1",
        }

    def merge_reason(self, engine: NativeEngine) -> str | None:
        """Return why vLLM gets whole weights; None if it gets the base once, and adapters."""
        return merge_reason(engine.config, self.options.merge_lora)

    def adapter_options(self, engine: NativeEngine) -> dict[str, Any] | None:
        """Return the sizes and the modules of the adapters that vLLM gets, None if it gets whole weights."""
        lora = engine.config.lora
        if lora is None or self.merge_reason(engine) is not None:
            return None
        modules = served_modules(engine.config)
        return {"rank": lora.rank, "alpha": lora.alpha, "max_rank": padded_rank(lora.rank), "modules": modules}

    def gpu_options(self, engine: NativeEngine, weight_bytes: int) -> dict[str, Any]:
        """Return vLLM's options for GPUs. It starts only if the share of the memory that it may use is free."""
        total = torch.cuda.get_device_properties(engine.context.device).total_memory
        cache = int(self.options.kv_cache_bytes(total))
        needed = weight_bytes + cache + RUNTIME_BYTES
        if (adapter := self.adapter_options(engine)) is not None:  # with its padding, and once more while it is loaded
            numel = engine.params.data.numel() * (adapter["max_rank"] + adapter["rank"]) // adapter["rank"]
            needed += numel * engine.model.dtype.itemsize
        return {
            "enforce_eager": self.options.enforce_eager,
            "enable_sleep_mode": self.options.enable_sleep_mode,
            "kv_cache_memory_bytes": cache,
            "gpu_memory_utilization": min(0.95, needed / total),
        }

    def _cores(self, ranks: Iterable[int]) -> str:
        """Return the cores of each worker in vLLM's syntax; with too few cores, workers share them."""
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // self.n_workers)
        first = [rank % self.n_workers * each for rank in ranks]
        return "|".join(",".join(str(cores[(at + i) % len(cores)]) for i in range(each)) for at in first)


def with_vllm(engine: NativeEngine, launcher: VllmLauncher) -> VllmEngine:
    """Return the engine with a vLLM process for its replica. Collective over its tensor-parallel group."""
    group, devices = engine.context.group("tp"), list[str]()
    is_hot = launcher.merge_reason(engine) is None
    params, is_cpu = engine.params, engine.context.device.type == "cpu"
    if is_hot:
        params = engine.model.base
        if is_cpu:
            params.share(f"{launcher.folder.name}_base")
    elif engine.config.lora is not None:
        params = merged_shard(engine, launcher.folder.name)
    if not is_cpu:
        own = os.environ.get(VISIBLE, str(engine.context.device.index or 0)).encode()
        devices = [device.decode() for device in gather_bytes(group, own, engine.context.device)]
    server = launcher.start(engine, devices, params.data.nbytes) if group.index == 0 else None
    fields_ = {field.name: getattr(engine, field.name) for field in fields(engine)}
    return VllmEngine(
        **fields_, served=params, server=server, buckets=make_buckets(engine) if server else (),
        memory=weight_memory(params, group), adapter=adapter_tensors(engine) if server and is_hot else (),
        adapter_memory=weight_memory(engine.params, group) if is_hot else None, verify=launcher.verify,
    )  # fmt: skip
