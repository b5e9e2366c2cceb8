"""Generation by vLLM: the native engine holds, trains and moves the weights, a process of vLLM's own draws answers.

The weights lie in memory that both map, so that handing them over is one copy into vLLM's. What a worker knows of vLLM
is here; what runs inside of its process is in_vllm/.
"""

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from realhf.api.config import GenerationConfig, VllmConfig
from realhf.arch.families import FAMILIES
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.base.activity import ActivityStack
from realhf.base.errors import RunFailed
from realhf.base.seeds import stable_seed
from realhf.base.shared_buffer import SharedBuffer, fd_path
from realhf.data.batch import SequenceBatch
from realhf.models.engine.decode.generate import no_rows, rows_of
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.native import NativeEngine
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import config_json
from realhf.models.hf_mapping import HfSlot, hf_mapping
from realhf.plan.compile.realloc import shard_boxes

PROGRAM = Path(__file__).with_name("in_vllm") / "realhf_server.py"
LENGTH = struct.Struct("<I")
BUCKET_BYTES = 512 << 20
"""Of weights that one request hands over, so that what is put together of several shards never takes much more."""
LAST_WORDS = 800

Bucket = tuple[dict[str, Any], ...]


class VllmServer:
    """A process of vLLM as its worker sees it: ``ask`` with a deadline, ``close``. One thread at a time uses it."""

    def __init__(self, name: str, options: VllmConfig, log: Path, cores: str, activity: ActivityStack) -> None:
        self.name, self.log, self.timeout_s, self.activity = name, log, options.timeout, activity
        self.version = -1
        self._wire, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": f"{max(1, round(options.kv_cache_gb))}",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "REALHF_PLAIN_MATRICES": "" if options.pack else "1",
        }
        with log.open("ab") as words, theirs:
            self._process = subprocess.Popen(
                [options.python or sys.executable, str(PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=words, stderr=words, pass_fds=[theirs.fileno()],
                start_new_session=True, env=environment,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Return the answer to a request; RunFailed names who did not give one, and what for."""
        deadline = time.monotonic() + self.timeout_s
        with self.activity.enter(f"{self.name}, for {do}"):
            try:
                body = msgspec.msgpack.encode({"do": do, **what})
                self._wire.settimeout(self.timeout_s)
                self._wire.sendall(LENGTH.pack(len(body)) + body)
                size = LENGTH.unpack(self._receive(LENGTH.size, do, deadline))[0]
                reply = msgspec.msgpack.decode(self._receive(size, do, deadline))
            except OSError as error:
                raise self._ended(do) from error
        if "error" in reply:
            raise RunFailed(f"{self.name} could not {do}: {reply['error']} (more in {self.log})")
        return reply

    def _receive(self, size: int, do: str, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            if not select.select([self._wire], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise RunFailed(f"{self.name} did not {do} within {self.timeout_s:g} s (vllm.timeout); see {self.log}")
            part = self._wire.recv(min(size - len(received), 1 << 20))
            if not part:
                raise self._ended(do)
            received += part
        return bytes(received)

    def _ended(self, do: str) -> RunFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.returncode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        words = self.log.read_text(errors="replace")[-LAST_WORDS:].strip()
        return RunFailed(f"{self.name} ended {how} when asked to {do} ({self.log}):\n{words}")

    def close(self) -> None:
        """Let the process end, and all that it started."""
        self._wire.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self.kill()

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True)
class ServedEngine(NativeEngine):
    """A native engine whose answers are drawn by vLLM. The first worker of a tensor group asks, the others hear."""

    server: VllmServer | None = None
    buckets: tuple[Bucket, ...] = ()
    host: Tensor | None = None  # a copy that vLLM maps, where the weights themselves are on a device
    verify: bool = False

    def generate(self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int) -> SequenceBatch:
        request = Request(prompts, config, n, seed, self._stops(config), 0)
        if not request.n_rows:
            return no_rows(prompts["prompts"].device)
        group, device = self.context.group("tp"), self.context.device
        if self.host is not None:
            self.host.copy_(self.params.data)
        bits = torch.tensor([self._bits() if self.verify else 0], device=device)
        group.all_reduce(bits)  # and every shard of the weights is here
        found = self._ask(request, int(bits)) if self.server is not None else None
        counts = torch.zeros(request.n_rows, dtype=torch.int64) if found is None else found[0]
        first = group.ranks.index(min(group.ranks))
        counts = group.broadcast(counts.to(device), first)
        tokens = torch.empty(int(counts.sum()), dtype=torch.int64) if found is None else found[1]
        logprobs = torch.empty(len(tokens)) if found is None else found[2]
        tokens, logprobs = (group.broadcast(some.to(device), first) for some in (tokens, logprobs))
        return rows_of(request, counts, tokens, torch.stack((logprobs, logprobs)))

    def _stops(self, config: GenerationConfig) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))

    def _bits(self) -> int:
        """Return the sum of this shard's weights, read as integers, as vLLM holds them: a tied embedding twice."""
        tied = [self.params.view("embed.weight")] if self.config.tied_embedding else []
        return sum(int(some.reshape(-1).view(torch.int16).sum(dtype=torch.int64)) for some in (self.params.data, *tied))

    def _ask(self, request: Request, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers of tokens by row, all tokens, and their log-probabilities."""
        assert self.server is not None
        self.push()
        if self.verify and (theirs := sum(self.server.ask("bits")["bits"])) != bits:
            raise RunFailed(f"{self.server.name} holds other weights than the trainer: checksums {theirs} and {bits}")
        rows = [{"prompt": row // request.n, "sampling": sampling_of(request, row)} for row in range(request.n_rows)]
        reply = self.server.ask("generate", version=self.version, prompts=list(request.ids), rows=rows)
        counts = torch.tensor([len(tokens) for tokens in reply["tokens"]])
        tokens = torch.tensor([token for tokens in reply["tokens"] for token in tokens])
        logprobs = torch.tensor([p for some in reply["logprobs"] for p in some], dtype=torch.float32)
        return counts, tokens, logprobs

    def push(self) -> None:
        """Hand the weights over, if vLLM has not those of this version."""
        assert self.server is not None
        if self.server.version == self.version:
            return
        for number, bucket in enumerate(self.buckets):
            is_last = number == len(self.buckets) - 1
            self.server.ask("load", pieces=bucket, version=self.version if is_last else -1)
        self.server.version = self.version


def sampling_of(request: Request, row: int) -> dict[str, Any]:
    """Return what vLLM is told of one row: the same rules as the native engine has, and a seed of its own."""
    config, (prompt, sample) = request.config, divmod(row, request.n)
    greedy = config.greedy or config.temperature == 0
    return {
        "temperature": 0.0 if greedy else config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or -1,
        "min_tokens": config.min_new_tokens,
        "max_tokens": request.budgets[prompt],
        "stop_token_ids": list(request.stops),
        "seed": stable_seed(request.seed, request.prompts.ids[prompt].prompt, sample) >> 1,
    }


@dataclass(frozen=True)
class Serving:
    """How a process of vLLM is started for a role.

    ``folder`` gets the model's ``config.json``; ``temperature`` is that of all that will be asked for; with ``verify``
    checksums are compared before anything is drawn. A host has ``n_workers`` workers, which share its cores out.
    """

    options: VllmConfig
    folder: Path
    log: Path
    temperature: float = 1.0
    verify: bool = False
    n_workers: int = 1

    def start(self, engine: NativeEngine) -> VllmServer:
        """Start it for an engine's replica; RunFailed when vLLM does not come up."""
        self.folder.mkdir(parents=True, exist_ok=True)
        dtype, context = engine.params.data.dtype, engine.context
        told = config_json(replace(engine.config, tied_embedding=False), dtype)
        (self.folder / "config.json").write_text(json.dumps(told, indent=2) + "\n")
        ranks = context.group("tp").ranks
        server = VllmServer(
            f"vLLM of worker {context.rank}", self.options, self.log, self._cores(ranks), context.activity
        )
        options = {
            "folder": str(self.folder),
            "dtype": str(dtype).removeprefix("torch."),
            "device": context.device.type,
            "tp": len(ranks),
            "max_length": self.options.max_length or engine.config.max_positions,
            "slots": self.options.max_num_seqs,
            # of the tempered distribution: the model's own, or what is sampled from, which nothing may cut then
            "logprobs": "raw_logprobs" if self.temperature in (0.0, 1.0) else "processed_logprobs",
        }
        try:
            server.ask("start", options=options)
        except BaseException:
            server.close()
            raise
        return server

    def _cores(self, ranks: Iterable[int]) -> str:
        """Return the cores of each worker, in vLLM's words; where there are fewer than workers, they share them."""
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // self.n_workers)
        first = [rank % self.n_workers * each for rank in ranks]
        return "|".join(",".join(str(cores[(at + i) % len(cores)]) for i in range(each)) for at in first)


def in_buckets(tensors: Iterable[HfSlot], paths: Sequence[str], dtype: torch.dtype) -> tuple[Bucket, ...]:
    """Return what requests say of the weights: names, shapes and where the parts lie, by ``BUCKET_BYTES`` of them.

    A layer is handed over at once: vLLM makes one matrix of several of its tensors.
    """
    buckets: list[list[dict[str, Any]]] = []
    room, layer = 0, -1
    for tensor in sorted(tensors, key=lambda tensor: tensor.layer):
        if tensor.layer != layer and room <= 0:
            buckets.append([])
            room = BUCKET_BYTES
        layer = tensor.layer
        room -= math.prod(tensor.shape) * dtype.itemsize
        places = [
            {"path": paths[at.shard], "start": at.start, "shape": at.shape, "box": at.box, "transpose": at.transpose}
            for at in tensor.places
        ]
        kind = str(dtype).removeprefix("torch.")
        buckets[-1].append({"name": tensor.name, "dtype": kind, "shape": tensor.shape, "places": places})
    return tuple(tuple(bucket) for bucket in buckets)


def _tensors(engine: NativeEngine) -> list[HfSlot]:
    """Return the tensors that vLLM is given. A tied embedding is two of them: vLLM does not reload a shared one."""
    found, config = hf_mapping(engine.config, _shards(engine)), engine.config
    if config.tied_embedding:
        names = FAMILIES[config.family].hf_tensors(replace(config, tied_embedding=False))
        embedding = next(tensor for tensor in found if tensor.name == names["embed.weight"][0].name)
        found.append(replace(embedding, name=names["head.weight"][0].name))
    return found


def _shards(engine: NativeEngine) -> list[FlatParams]:
    """Return the shards of this replica's tensor group, by rank, without memory."""
    specs, layout = param_specs(engine.config), engine.context.layout
    found = []
    for rank in sorted(engine.context.group("tp").ranks):
        boxes = shard_boxes(specs, lambda pp: stage_layers(engine.config, pp), layout, rank)
        mine = [spec for spec in specs if spec.name in boxes]
        found.append(FlatParams(mine, boxes, engine.params.data.dtype, "meta", layout.strategy.dp))
    return found


def served(engine: NativeEngine, how: Serving) -> ServedEngine:
    """Return the engine with a process of vLLM for its replica. Collective over its tensor group."""
    context, data, shared, host = engine.context, engine.params.data, engine.params.shared, None
    if shared is None:
        shared = SharedBuffer(data.nbytes, "weights")
        host = torch.frombuffer(shared.map, dtype=data.dtype, count=len(data))
    group = context.group("tp")
    places = torch.zeros(2 * group.size, dtype=torch.int64, device=context.device)
    group.all_gather(places, torch.tensor(shared.handle, device=context.device))
    server = how.start(engine) if group.index == 0 else None
    paths = [fd_path(pid, fd) for pid, fd in places.view(-1, 2).tolist()]
    buckets = in_buckets(_tensors(engine), paths, data.dtype) if server else ()
    own = {field.name: getattr(engine, field.name) for field in fields(engine)}
    return ServedEngine(**own, server=server, buckets=buckets, host=host, verify=how.verify)
