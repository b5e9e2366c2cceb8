"""The model worker: handles the master's messages one at a time, in order, on one device."""

import os
import socket
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from realhf.algorithms import build_interface
from realhf.api import messages
from realhf.api.batch_meta import RowId
from realhf.api.config.choices import CpuAffinity
from realhf.api.config.preference import KTO_KL_KEYS
from realhf.api.curriculum import PromptResult
from realhf.api.graph import InterfaceSpec, Kind
from realhf.base.activity import ActivityStack
from realhf.base.errors import UserError
from realhf.base.process import local_cores
from realhf.base.seeds import stable_seed
from realhf.base.timers import Spans
from realhf.comm.p2p import DirectedGroups, make_directed_groups
from realhf.comm.process_groups import (
    ParallelContext,
    destroy_process_group,
    init_process_group,
    make_groups,
    open_rendezvous,
)
from realhf.comm.shared_memory import SharedMemoryPeers, open_shared_memory_peers
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Interface, InterfaceContext
from realhf.data.source import RowSource, row_fields
from realhf.data.tokenizer import load_tokenizer
from realhf.models.engine import (
    FrozenBases,
    NativeEngine,
    VllmEngine,
    VllmLauncher,
    VllmServer,
    build_engine,
    with_vllm,
)
from realhf.models.engine.snapshot import restore, snapshot
from realhf.plan.compile.program import home_layout, layout_ranks, process_groups, rank_engines, served_engines
from realhf.plan.run_spec import RunSpec
from realhf.system.checkpoint.manifest import read_manifest
from realhf.system.checkpoint.writer import ROWS, CheckpointWriter, RoleCheckpoint, file_name
from realhf.system.executor import Executor
from realhf.system.metrics.trace import trace_lines
from realhf.system.metrics.worker_metrics import WORKER_METRICS
from realhf.system.row_texts import text_fields

IDLE = "waiting for the master"
NCCL_DEADLINE = 0.9
"""Of a collective, relative to ``call_timeout``: its worker names it before the master gives up on the call."""


class ModelWorker:
    """Replies to the master's messages through ``send``."""

    def __init__(
        self,
        run: RunSpec,
        rank: int,
        send: Callable[[messages.ToMaster], None],
        log: Logger,
        address: str = "127.0.0.1",
        key: bytes = b"",
    ) -> None:
        """``address`` is this worker's IP address for its peers; ``key`` is the key of the launch."""
        self.run, self.rank, self.send, self.log = run, rank, send, log
        self.address, self.key = address, key
        self.activity = ActivityStack()
        self.spans = Spans(self.activity)
        self.device = torch.device("cuda:0" if run.device == "cuda" else "cpu")  # the only one that is visible
        opens_store = rank == 0 and run.plan.n_workers > 1
        self.store = open_rendezvous(address, 0, run.config.startup_timeout) if opens_store else None
        self.links: SharedMemoryPeers | None = None
        self.servers: list[VllmServer] = []
        self.calls: dict[int, messages.PrepareCall] = {}  # prepared ones, by request
        self.failures: list[str] = []  # responses without a reward in the current call
        self.results: list[PromptResult] = []  # of the current call
        self.during = "start-up"
        self.writer = CheckpointWriter()

    def hello(self) -> None:
        """Report to the master."""
        port = self.store.port if self.store else 0
        self.send(messages.Hello(self.rank, os.getpid(), socket.gethostname(), port, self.address, self.run.digest))

    def activity_text(self) -> str:
        """Return the current activity. Thread-safe."""
        return ", ".join(filter(None, (self.during, str(self.activity))))

    def handle(self, message: messages.ToWorker) -> None:
        """Handle one message and reply; an error is reported to the master and raised."""
        try:
            self._handle(message)
            self.during = IDLE
        except (Exception, KeyboardInterrupt) as error:
            user_error = isinstance(error, UserError | ValueError)
            text = str(error) if user_error else f"{type(error).__name__}: {error}"
            self.log.exception("failed during %s", self.during)
            self.send(messages.Failed(self.rank, self.during, text, traceback.format_exc(), user_error))
            raise

    def _handle(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Start(host, port, checkpoint):
                info = self._start(host, port)
                if checkpoint:
                    self.during = f"reading {checkpoint}"
                    self._restore(Path(checkpoint))
                self.log.info("ready: %s", info)
                self.send(messages.Ready(self.rank, info))
            case messages.Fetch():
                self.during = f"reading prompts {message.start} to {message.stop - 1}"
                self._fetch(message)
            case messages.PrepareCall():
                self.during = f"transferring rows for {message.mfc} of step {message.step + 1}"
                self.executor.receive_inputs(message)
                if self.rank in layout_ranks(self.run.program[message.mfc]):
                    self.calls[message.request] = message
                else:
                    self._done(message.request, message.step)
            case messages.ExecuteCall(request):
                call = self.calls.pop(request)
                self.during = f"{call.mfc} of step {call.step + 1}"
                result = self.executor.execute(call)
                values = {"failure": self.failures[0].encode(errors="replace").decode()} if self.failures else {}
                results = tuple(self.results) if call.mfc == self.run.result_mfc else ()
                self.failures.clear()
                self.results.clear()
                self._done(request, call.step, outputs=result.outputs, stats=result.stats, state=result.state,
                           values=values, carried=result.carried, results=results)  # fmt: skip
            case messages.ReadRows(request, ids, keys):
                self.during = "reading rows"
                self.send(messages.Done(request, self.rank, values={"rows": self._read_rows(ids, keys)}))
            case messages.Save(request, step, role, path):
                self.during = f"saving {role} to {path}"
                with self.spans.span(f"save/{role}"):
                    self.executor.engines[role, home_layout(self.run.graph, self.run.plan, role)].save(Path(path))
                self._done(request, step)
            case messages.Checkpoint(request, step, folder):
                self.during = f"taking a snapshot for {folder}"
                with self.spans.span("checkpoint"):
                    self.writer.start(Path(folder), self._snapshot())
                self._done(request, step)
            case messages.AwaitCheckpoint(request, step):
                self.during = "writing a checkpoint"
                with self.spans.span("checkpoint/settle"):
                    files = self.writer.wait()
                self._done(request, step, values={"files": files})
            case messages.FreeRows(start, stop):
                self.executor.store.drop(start, stop)

    def _start(self, host: str, port: int) -> dict[str, Any]:
        """Build engines, interfaces and the data source; return what to report."""
        run, began = self.run, time.monotonic()
        n_workers, timeout_s = run.plan.n_workers, run.config.call_timeout
        if self.device.type == "cuda":
            timeout_s *= NCCL_DEADLINE
            require_cuda()
            torch.cuda.set_device(self.device)
            if run.config.cpu_affinity is CpuAffinity.numa:
                self._use_local_cores()
        if n_workers > 1:
            self.during = "initializing the process group"
            self.group_store = init_process_group(
                host, port, self.rank, n_workers, run.device, timeout_s, self.store, self.key
            )
            if self.device.type == "cpu":
                self.links = open_shared_memory_peers(self.rank, n_workers, timeout_s, activity=self.activity)
        groups = make_groups(process_groups(run.program), self.rank, self.activity, timeout_s)
        directed = make_directed_groups(timeout_s) if n_workers > 1 else DirectedGroups()
        self.during = "loading the tokenizer"
        self.tokenizer = load_tokenizer(run.tokenizer_dir)
        engines, served_here, bases = {}, served_engines(run.graph, run.plan), FrozenBases()
        placed = rank_engines(run.program, self.rank)
        for role, layout in sorted(placed, key=lambda one: run.roles[one[0]].scalar_head):  # see FrozenBases
            self.during = f"building {role}"
            is_home = layout == home_layout(run.graph, run.plan, role)
            engines[role, layout] = build_engine(
                run.models[role],
                run.engine_role(role),
                ParallelContext(layout, self.rank, self.device, groups, self.activity, directed),
                trained=is_home and run.graph.trainer(role) is not None,
                holds_weights=is_home,
                seed=stable_seed(run.config.seed, run.roles[role].starts_as or role),
                total_steps=run.schedule.n_steps,
                stop_ids=(self.tokenizer.eos_token_id,),
                tokenizer_folder=run.tokenizer_dir,
                shared_name=role if (role, layout) in served_here and self.device.type == "cpu" else "",
                bases=bases,
                base_name=run.config.portable(run.roles[role].spec.path or "").partition("@")[0],
            )
            if (role, layout) in served_here:
                engines[role, layout] = self._with_server(role, engines[role, layout])
        self.during = "building interfaces"
        interfaces, links = self._interfaces(), self.links
        self.executor = Executor(run, self.rank, self.device, engines, interfaces, self.spans, links, self.activity)
        self.during = "reading the data"
        self.source = None
        if self.rank in run.fetch_ranks:
            mismatched = bool(KTO_KL_KEYS.keys() & set(run.graph.dataset_keys))
            self.source = RowSource(run.config.dataset, run.task, self.tokenizer, run.config.seed, mismatched)
            if (len(self.source), self.source.n_held_out) != (run.n_rows, run.n_held_out):
                raise UserError(f"{run.config.data_text} has {len(self.source)} rows and {self.source.n_held_out} "
                                f"held-out rows, at launch it had {run.n_rows} and {run.n_held_out}")  # fmt: skip
        sizes = {role: engine.params.data.numel() for (role, _), engine in engines.items()}
        return {"parameters": sizes, "seconds": time.monotonic() - began, "device": str(self.device)}

    def _use_local_cores(self) -> None:
        """Restrict this thread, and those that it starts, to the cores next to the device."""
        gpu: Any = torch.cuda.get_device_properties(self.device)  # torch's stub lacks the PCI numbers
        cores = local_cores(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id) & os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(0, cores)
        self.log.info("cpu_affinity=numa: cores %s", sorted(cores) or "of the GPU are unknown")

    def _with_server(self, role: str, engine: NativeEngine) -> VllmEngine:
        run, name = self.run, f"vllm_{role}_{self.rank}"
        self.during = f"starting vLLM for {role}"
        how = VllmLauncher(run.config.vllm, run.paths.root / "vllm" / name, run.paths.log(name), run.temperature,
                      run.config.verify_reallocation, run.config.n_gpus_per_node)  # fmt: skip
        if engine.config.lora is not None and (reason := how.merge_reason(engine)) is not None:
            self.log.info("vLLM gets merged weights of %s: %s", role, reason)
        found = with_vllm(engine, how)
        self.servers += [found.server] if found.server else []
        return found

    def _interfaces(self) -> dict[str, Interface]:
        """Build the interface of every call; calls of the same judge share one, and its processes."""
        run, interfaces = self.run, dict[str, Interface]()
        judges: list[tuple[InterfaceSpec, int, Interface]] = []
        for mfc in (*run.graph.mfcs, *run.graph.evaluation):
            layout = run.plan[mfc.name].layout
            if self.rank not in layout.mesh.ranks:
                continue
            key = mfc.interface, layout.coord(self.rank).dp
            shared = (judge for *judge_key, judge in judges if mfc.role is None and tuple(judge_key) == key)
            if (interface := next(shared, None)) is None:
                context = InterfaceContext(run.config.seed, self.tokenizer, run.paths.root, key[1],
                                           self.failures.append, self.results.extend if run.result_mfc else None,
                                           self.spans.add_concurrent)  # fmt: skip
                interface = build_interface(mfc.interface, context)
                judges += [(*key, interface)] if mfc.role is None else []
            interfaces[mfc.name] = interface
        return interfaces

    def _home_engine(self, role: str) -> NativeEngine | None:
        return self.executor.engines.get((role, home_layout(self.run.graph, self.run.plan, role)))

    def _snapshot(self) -> dict[str, dict[str, torch.Tensor]]:
        engines = {role: self._home_engine(role) for role in self.run.updated_roles}
        files = {file_name(role, self.rank): snapshot(e) for role, e in engines.items() if e is not None}
        run, rollouts = self.run, [mfc for mfc in self.run.graph.mfcs if mfc.kind is Kind.GENERATE]
        keys = {key for mfc in rollouts if self.rank in (0, *run.plan[mfc.name].layout.dp_heads())  # 0: see _restore
                for key in (*(mfc.outputs if run.config.max_staleness else ()), *mfc.carried)}  # fmt: skip
        return files | ({file_name(ROWS, self.rank): rows} if (rows := self.executor.store.tensors(keys)) else {})

    def _restore(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        for role, layout in manifest.layouts.items():
            if (engine := self._home_engine(role)) is not None:
                restore(engine, layout, RoleCheckpoint(folder, role))
        for name in manifest.files if self.rank == 0 else ():
            if name.startswith(f"{ROWS}."):
                self.executor.store.load(load_file(folder / name), self.device)

    def _fetch(self, fetch: messages.Fetch) -> None:
        """Read this worker's part of the prompts."""
        assert self.source is not None, "only fetch ranks read data"
        index, count = self.run.fetch_ranks.index(self.rank), len(self.run.fetch_ranks)
        start, stop = ((fetch.stop - fetch.start) * k // count for k in (index, index + 1))
        first, last, rows = fetch.start + start, fetch.start + stop, fetch.rows[start:stop]
        with self.spans.span("fetch"):
            batch = self.source.chosen(rows, first) if fetch.rows else self._read(self.source, first, last)
            batch = batch.to(self.device)
            self.executor.store.put(batch)
        self._done(fetch.request, fetch.step, outputs=batch.meta)

    def _read(self, source: RowSource, start: int, stop: int) -> SequenceBatch:
        """Return the rows of the prompts ``start`` to ``stop`` of one step of training or evaluation."""
        schedule, evaluation = self.run.schedule, self.run.eval_schedule
        step, offset = divmod(start, schedule.stride)
        if step >= evaluation.first_step:
            first = (step - evaluation.first_step) * evaluation.batch_size + offset
            return source.held_out(first, first + stop - start, start)
        span, first = schedule.span(step), step * schedule.batch_size
        if start < span.stop:
            return source.batch(first + offset, first + offset + stop - start, start)
        positions = range(first, first + span.stop - span.start)
        return source.resampled(step, positions, start - span.stop, stop - span.stop, start)

    def _read_rows(self, ids: tuple[RowId, ...], keys: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return rows with prompt and response as text, scalars, and the fields of the data set."""
        store = self.executor.store
        rows: dict[RowId, dict[str, Any]] = {i: {"prompt_id": i.prompt, "sample": i.sample} for i in ids}
        for row, key in product(ids, keys):
            if (value := store.find(row, key)) is None:
                continue
            if key == "tokens" and (mask := store.find(row, "prompt_mask")) is not None:
                decode = partial(self.tokenizer.decode, skip_special_tokens=True)
                rows[row] |= text_fields(value, mask, store.find(row, "turn_rewards"), decode)
            elif key == "row":
                rows[row]["fields"] = row_fields(value)
            elif value.numel() == 1:
                rows[row][key] = value.item()
        return [fields for fields in rows.values() if len(fields) > 2]

    def _done(self, request: int, step: int, **results: Any) -> None:
        spans = self.spans.take()
        trace = trace_lines(spans, self.rank, step, self.spans.take_concurrent())
        metrics = tuple(metric.measure(spans) for metric in WORKER_METRICS)
        self.send(messages.Done(request, self.rank, trace=trace, metrics=metrics, **results))

    def close(self) -> None:
        for server in self.servers:
            server.close()
        if self.links is not None:
            self.links.close()
        destroy_process_group()


def require_cuda() -> None:
    """Raise UserError if torch has no CUDA or shows no device to this process."""
    if torch.version.cuda is None:
        raise UserError(f"device=cuda, but torch {torch.__version__} is built without CUDA")
    if torch.cuda.device_count() == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UserError(f"device=cuda, but torch {torch.__version__} shows no device on {socket.gethostname()} "
                        f"(CUDA_VISIBLE_DEVICES is {visible})")  # fmt: skip
