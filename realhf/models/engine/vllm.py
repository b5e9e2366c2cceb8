"""Generation by vLLM: the native engine holds, trains and moves the weights; the process in in_vllm/ samples."""

import contextlib
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from realhf.api.config import GenerationConfig, VllmConfig
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, intersect
from realhf.arch.families import FAMILIES
from realhf.arch.param_specs import param_specs
from realhf.base.activity import ActivityStack
from realhf.base.errors import RunFailed
from realhf.base.seeds import stable_seed
from realhf.base.shared_buffer import SharedBuffer, fd_path
from realhf.data.batch import SequenceBatch
from realhf.models.engine.decode.generate import build_result, empty_result
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.native import NativeEngine, empty_shard
from realhf.models.engine.nonfinite import nonfinite_logits
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import config_json, hf_shapes, stored_slices

PROGRAM = Path(__file__).with_name("in_vllm") / "realhf_server.py"
LENGTH = struct.Struct("<I")
BUCKET_BYTES = 512 << 20
"""Weights per request, which limits the memory for tensors that are assembled from several shards."""
LOG_TAIL_CHARS = 800

Bucket = tuple[dict[str, Any], ...]


class VllmServer:
    """A vLLM process, with a deadline for every ``call``. Not thread-safe."""

    def __init__(self, name: str, options: VllmConfig, log: Path, cores: str, activity: ActivityStack) -> None:
        self.name, self.log, self.timeout_s, self.activity = name, log, options.timeout, activity
        self.version = -1
        self._socket, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": f"{max(1, round(options.kv_cache_gb))}",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "REALHF_PLAIN_MATRICES": "" if options.pack else "1",
        }
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [options.python or sys.executable, str(PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()],
                start_new_session=True, env=environment,
            )  # fmt: skip

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Return the reply to a request; raises RunFailed on an error, on a timeout, or if the process has ended."""
        deadline = time.monotonic() + self.timeout_s
        with self.activity.enter(f"{self.name}, for {method}"):
            try:
                body = msgspec.msgpack.encode({"method": method, **arguments})
                self._socket.settimeout(self.timeout_s)
                self._socket.sendall(LENGTH.pack(len(body)) + body)
                size = LENGTH.unpack(self._receive(LENGTH.size, method, deadline))[0]
                reply = msgspec.msgpack.decode(self._receive(size, method, deadline))
            except OSError as error:
                raise self._exit_error(method) from error
        if "error" in reply:
            raise RunFailed(f"{self.name} failed to {method}: {reply['error']} (more in {self.log})")
        return reply

    def _receive(self, size: int, method: str, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            if not select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise RunFailed(
                    f"{self.name} did not {method} within {self.timeout_s:g} s (vllm.timeout); see {self.log}"
                )
            chunk = self._socket.recv(min(size - len(received), 1 << 20))
            if not chunk:
                raise self._exit_error(method)
            received += chunk
        return bytes(received)

    def _exit_error(self, method: str) -> RunFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.returncode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        tail = self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
        return RunFailed(f"{self.name} ended {how} during {method} ({self.log}):\n{tail}")

    def close(self) -> None:
        """Wait a few seconds for the process to exit, then kill what is left of its process group."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True)
class VllmEngine(NativeEngine):
    """A native engine that generates with vLLM. The first rank of a tensor-parallel group calls it and broadcasts."""

    server: VllmServer | None = None
    buckets: tuple[Bucket, ...] = ()
    host: Tensor | None = None  # a copy in shared memory, if the weights themselves are on a device
    verify: bool = False

    def generate(self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int) -> SequenceBatch:
        stop_ids = tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))
        request = Request(prompts, config, n, seed, stop_ids, 0)
        if not request.n_rows:
            return empty_result(prompts["prompts"].device)
        group, device = self.context.group("tp"), self.context.device
        if self.host is not None:
            self.host.copy_(self.params.data)
        checksum = torch.tensor([self._checksum() if self.verify else 0], device=device)
        group.all_reduce(checksum)  # also a barrier: all shards of the weights are up to date
        first = group.ranks.index(min(group.ranks))
        counts, tokens, logprobs = torch.zeros(request.n_rows, dtype=torch.int64), None, None
        if self.server is not None:
            counts, tokens, logprobs = self._request(request, int(checksum))
        counts = group.broadcast(counts.to(device), first)
        if tokens is None or logprobs is None:
            tokens, logprobs = torch.empty(int(counts.sum()), dtype=torch.int64), torch.empty(int(counts.sum()))
        tokens, logprobs = (group.broadcast(some.to(device), first) for some in (tokens, logprobs))
        if len(invalid := (~logprobs.isfinite()).nonzero()):  # vLLM samples from logits that are NaN
            row = int(torch.searchsorted(counts.cumsum(0), invalid[0], right=True))
            response = tokens[int(counts[:row].sum()) : int(invalid[0])]
            raise nonfinite_logits(self.model, request, row, response.tolist())
        return build_result(request, counts, tokens, torch.stack((logprobs, logprobs)))

    def _checksum(self) -> int:
        """Return the sum of this shard's weights, read as integers; like in vLLM, a tied embedding counts twice."""
        tied = [self.params.view("embed.weight")] if self.config.tied_embedding else []
        return sum(int(some.reshape(-1).view(torch.int16).sum(dtype=torch.int64)) for some in (self.params.data, *tied))

    def _request(self, request: Request, checksum: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers of tokens by row, all tokens, and their log-probabilities."""
        assert self.server is not None
        if self.server.version != self.version:
            for bucket in self.buckets:
                version = self.version if bucket is self.buckets[-1] else -1
                self.server.call("load", tensors=bucket, version=version)
            self.server.version = self.version
        if self.verify and (theirs := sum(self.server.call("checksum")["checksums"])) != checksum:
            raise RunFailed(
                f"{self.server.name} has different weights from the trainer: checksums {theirs} and {checksum}"
            )
        rows = [{"prompt": i // request.n, "sampling": sampling_params(request, i)} for i in range(request.n_rows)]
        reply = self.server.call("generate", version=self.version, prompts=list(request.prompt_tokens), rows=rows)
        counts = torch.tensor([len(tokens) for tokens in reply["tokens"]])
        tokens = torch.tensor([token for tokens in reply["tokens"] for token in tokens])
        logprobs = torch.tensor([p for some in reply["logprobs"] for p in some], dtype=torch.float32)
        return counts, tokens, logprobs


def sampling_params(request: Request, row: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a row: those of the native engine, and a seed per row."""
    config, (prompt, sample) = request.config, divmod(row, request.n)
    greedy = config.greedy or config.temperature == 0
    return {
        "temperature": 0.0 if greedy else config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or -1,
        "min_tokens": config.min_new_tokens,
        "max_tokens": request.budgets[prompt],
        "stop_token_ids": list(request.stop_ids),
        "seed": stable_seed(request.seed, request.prompts.ids[prompt].prompt, sample) >> 1,
    }


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

    def start(self, engine: NativeEngine) -> VllmServer:
        """Start a process for an engine's replica; raises RunFailed if vLLM does not start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        dtype, context = engine.params.data.dtype, engine.context
        hf_config = config_json(replace(engine.config, tied_embedding=False), dtype)
        (self.folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        name, ranks = f"vLLM of worker {context.rank}", context.group("tp").ranks
        server = VllmServer(name, self.options, self.log, self._cores(ranks), context.activity)
        options = {
            "folder": str(self.folder),
            "dtype": str(dtype).removeprefix("torch."),
            "device": context.device.type,
            "tp": len(ranks),
            "max_length": self.options.max_length or engine.config.max_positions,
            "slots": self.options.max_num_seqs,
            # of the tempered distribution: the raw one, or the sampled one, which top-k and top-p must not restrict
            "logprobs": "raw_logprobs" if self.temperature in (0.0, 1.0) else "processed_logprobs",
        }
        try:
            server.call("start", options=options)
        except BaseException:
            server.close()
            raise
        return server

    def _cores(self, ranks: Iterable[int]) -> str:
        """Return the cores of each worker in vLLM's syntax; with too few cores, workers share them."""
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // self.n_workers)
        first = [rank % self.n_workers * each for rank in ranks]
        return "|".join(",".join(str(cores[(at + i) % len(cores)]) for i in range(each)) for at in first)


def make_buckets(engine: NativeEngine, paths: Sequence[str]) -> tuple[Bucket, ...]:
    """Return the weights in requests of about ``BUCKET_BYTES``; ``paths`` are of the memory of the replica's shards.

    A layer is in one request, since vLLM fuses some of its tensors.
    """
    config, context, dtype = engine.config, engine.context, engine.params.data.dtype
    ranks, dp = sorted(context.group("tp").ranks), context.layout.strategy.dp
    shards = [empty_shard(config, context.layout, rank, dtype, "meta", dp) for rank in ranks]
    tensors = _mapped_tensors(config, dict(zip(paths, shards, strict=True)), dtype)
    if config.tied_embedding:  # sent twice, since vLLM does not reload a shared tensor
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


def _mapped_tensors(
    config: ModelConfig, shards: Mapping[str, FlatParams], dtype: torch.dtype
) -> list[tuple[int, dict[str, Any]]]:
    """Return the layer and the request of every Hugging Face tensor, with its slices in the shards, by path.

    The shards need no memory. A slice that several shards hold is taken from the first.
    """
    stored, layer_of = stored_slices(config), {spec.name: spec.layer for spec in param_specs(config)}
    layers = {part.name: layer_of[ours] for ours, several in stored.items() for part in several}
    slices: dict[str, dict[Box, dict[str, Any]]] = {name: {} for name in layers}
    for path, shard in shards.items():
        for name, part in ((ours, part) for ours in shard.names for part in stored[ours]):
            if (ours := intersect(part.at, shard.box(name))) is None:
                continue
            value, box = shard.read(name, ours), tuple((span.start, span.stop) for span in part.stored(ours))
            assert value.is_contiguous(), f"{part.name} is not contiguous in {name}"
            found = {"path": path, "start": value.storage_offset(), "shape": tuple(value.shape), "box": box}
            slices[part.name].setdefault(box, {**found, "transpose": part.transpose})
    dtype_name = str(dtype).removeprefix("torch.")
    return [
        (layers[name], {"name": name, "dtype": dtype_name, "shape": shape, "slices": list(slices[name].values())})
        for name, shape in hf_shapes(stored).items()
    ]


def with_vllm(engine: NativeEngine, launcher: VllmLauncher) -> VllmEngine:
    """Return the engine with a vLLM process for its replica. Collective over its tensor-parallel group."""
    context, data, shared, host = engine.context, engine.params.data, engine.params.shared, None
    if shared is None:
        shared = SharedBuffer(data.nbytes, "weights")
        host = torch.frombuffer(shared.map, dtype=data.dtype, count=len(data))
    group = context.group("tp")
    handles = torch.zeros(2 * group.size, dtype=torch.int64, device=context.device)
    group.all_gather(handles, torch.tensor(shared.handle, device=context.device))
    server = launcher.start(engine) if group.index == 0 else None
    paths = [fd_path(pid, fd) for pid, fd in handles.view(-1, 2).tolist()]
    buckets = make_buckets(engine, paths) if server else ()
    own = {field.name: getattr(engine, field.name) for field in fields(engine)}
    return VllmEngine(**own, server=server, buckets=buckets, host=host, verify=launcher.verify)
