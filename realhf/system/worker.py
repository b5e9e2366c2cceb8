"""The model worker: one device, one FIFO inbox, one message at a time, in order."""

import os
import socket
import time
import traceback
from collections.abc import Callable
from logging import Logger
from pathlib import Path
from typing import Any

import torch

from realhf.algorithms import build_interface
from realhf.api.config.preference import KTO_KL_KEYS
from realhf.api.graph import InterfaceSpec
from realhf.api.messages import (
    AwaitCheckpoint,
    Checkpoint,
    Done,
    ExecuteCall,
    Failed,
    Fetch,
    FreeRows,
    Hello,
    PrepareCall,
    ReadRows,
    Ready,
    Save,
    Start,
    ToMaster,
    ToWorker,
)
from realhf.base.activity import ActivityStack
from realhf.base.errors import UserError
from realhf.base.host_memory import resident_bytes
from realhf.base.seeds import stable_seed
from realhf.base.timers import Spans
from realhf.comm.process_groups import (
    Group,
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
from realhf.models.engine import NativeEngine, VllmEngine, VllmLauncher, VllmServer, build_engine, with_vllm
from realhf.models.engine.snapshot import restore, snapshot
from realhf.plan.compile.program import engines_of, groups_of, home, meshes_of, served_of
from realhf.plan.run_spec import RunSpec
from realhf.system.checkpoint.manifest import read_manifest
from realhf.system.checkpoint.writer import Saved, Writer, file_name
from realhf.system.executor import Executor
from realhf.system.metrics.trace import time_spent, trace_lines

IDLE = "nothing, it waits for the master"


class ModelWorker:
    """Answers the master's messages through ``send``. ``handle`` is called with one message after the other."""

    def __init__(self, run: RunSpec, rank: int, send: Callable[[ToMaster], None], log: Logger) -> None:
        self.run, self.rank, self.send, self.log = run, rank, send, log
        self.doing = ActivityStack()
        self.spans = Spans(self.doing)
        self.device = torch.device(
            f"cuda:{rank % max(1, torch.cuda.device_count())}" if run.device == "cuda" else "cpu"
        )
        self.store = open_rendezvous("127.0.0.1", 0, run.config.startup_timeout) if self._opens_store else None
        self.links: SharedMemoryPeers | None = None
        self.servers: list[VllmServer] = []
        self.calls: dict[int, PrepareCall] = {}  # whose rows are here
        self.during = "start-up"
        self.writer = Writer()

    @property
    def _opens_store(self) -> bool:
        return self.rank == 0 and self.run.plan.n_workers > 1

    def hello(self, address: str = "127.0.0.1") -> None:
        """Report to the master; ``address`` is where other workers reach this one."""
        port = self.store.port if self.store else 0
        self.send(Hello(self.rank, os.getpid(), socket.gethostname(), port, address))

    def words(self) -> str:
        """Say what this worker is at, from any thread."""
        return ", ".join(filter(None, (self.during, str(self.doing))))

    def handle(self, message: ToWorker) -> None:
        """Carry out one message and reply; an error is reported to the master and raised."""
        try:
            self._handle(message)
            self.during = IDLE
        except BaseException as error:
            if not isinstance(error, SystemExit):
                user_error = isinstance(error, UserError | ValueError)
                text = str(error) if user_error else f"{type(error).__name__}: {error}"
                self.log.exception("failed during %s", self.during)
                self.send(Failed(self.rank, self.during, text, traceback.format_exc(), user_error))
            raise

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Start(host, port, checkpoint):
                self._start(host, port)
                if checkpoint:
                    self.during = f"reading {checkpoint}"
                    self._restore(Path(checkpoint))
                self.log.info("ready: %s", self.info)
                self.send(Ready(self.rank, self.info))
            case Fetch(request, step, start, stop):
                self.during = f"reading prompts {start} to {stop - 1}"
                self._fetch(request, step, start, stop)
            case PrepareCall():
                self.during = f"moving rows for {message.mfc} of step {message.step + 1}"
                self._bring(message)
            case ExecuteCall(request):
                call = self.calls.pop(request)
                self.during = f"{call.mfc} of step {call.step + 1}"
                self._run(call)
            case ReadRows(request, ids, keys):
                self.during = "collecting rows"
                self.send(Done(request, self.rank, values={"rows": self._collect(ids, keys)}))
            case Save(request, step, role, path):
                self.during = f"saving {role} to {path}"
                with self.spans.span(f"save/{role}"):
                    self.executor.engines[role, home(self.run.graph, self.run.plan, role)].save(Path(path))
                self._done(request, step)
            case Checkpoint(request, step, folder):
                self.during = f"copying what {folder} will hold"
                with self.spans.span("checkpoint"):
                    self.writer.begin(Path(folder), self._changing())
                self._done(request, step)
            case AwaitCheckpoint(request, step):
                self.during = "writing a checkpoint"
                with self.spans.span("checkpoint/settle"):
                    files = self.writer.settle()
                self._done(request, step, values={"files": files})
            case FreeRows(start, stop):
                self.executor.store.drop(start, stop)

    def _start(self, host: str, port: int) -> None:
        run, began = self.run, time.monotonic()
        n_workers = run.plan.n_workers
        groups: dict[tuple[int, ...], Group] = {}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if n_workers > 1:
            self.during = "joining the other workers"
            init_process_group(host, port, self.rank, n_workers, run.device, run.config.call_timeout, self.store)
            groups = make_groups(groups_of(run.program), self.rank, self.doing)
            if self.device.type == "cpu":
                self.links = open_shared_memory_peers(self.rank, n_workers, run.config.call_timeout, doing=self.doing)
        self.during = "loading the tokenizer"
        self.tokenizer = load_tokenizer(run.tokenizer_folder)
        engines = {}
        served_here = served_of(run.graph, run.plan)
        for role, layout in engines_of(run.program, self.rank):
            self.during = f"building {role}"
            keeper = home(run.graph, run.plan, role)
            trainer = run.graph.trainer(role)
            engines[role, layout] = build_engine(
                run.models[role],
                run.roles[role],
                ParallelContext(layout, self.rank, self.device, groups, self.doing),
                trained=trainer is not None and layout == keeper,
                holds_weights=layout == keeper,
                seed=stable_seed(run.config.seed, run.roles[role].starts_as or role),
                total_steps=run.schedule.n_steps,
                stop_ids=(self.tokenizer.eos_token_id,),
                tokenizer_folder=run.tokenizer_folder,
                shared_name=role if (role, layout) in served_here and self.device.type == "cpu" else "",
            )
            if (role, layout) in served_here:
                engines[role, layout] = self._with_server(role, engines[role, layout])
        self.during = "building interfaces"
        interfaces = self._interfaces()
        self.executor = Executor(run, self.rank, self.device, engines, interfaces, self.spans, self.links, self.doing)
        self.during = "reading the data"
        self.source = None
        if self.rank in run.fetchers:
            mismatched = bool(KTO_KL_KEYS.keys() & set(run.graph.dataset_keys))
            self.source = RowSource(run.config.dataset, run.task, self.tokenizer, run.config.seed, mismatched)
            found, expected = (len(self.source), self.source.n_held_out), (run.n_rows, run.n_held_out)
            if found != expected:
                raise UserError(f"{run.config.dataset.path} has {found[0]} rows and {found[1]} held out, at launch it "
                                f"had {expected[0]} and {expected[1]}")  # fmt: skip
        self.info = {
            "parameters": {role: e.params.data.numel() for (role, _), e in engines.items()},
            "seconds": time.monotonic() - began,
            "device": str(self.device),
        }

    def _with_server(self, role: str, engine: NativeEngine) -> VllmEngine:
        """Start the process that generates with an engine's weights."""
        run, name = self.run, f"vllm_{role}_{self.rank}"
        self.during = f"starting vLLM for {role}"
        how = VllmLauncher(run.config.vllm, run.paths.root / "vllm" / name, run.paths.log(name), run.temperature,
                      run.config.verify_reallocation, run.config.n_gpus_per_node)  # fmt: skip
        found = with_vllm(engine, how)
        self.servers += [found.server] if found.server else []
        return found

    def _interfaces(self) -> dict[str, Interface]:
        """Build the interface of every call of this worker; calls of the same judge share it, and its processes."""
        run, interfaces = self.run, dict[str, Interface]()
        judges: list[tuple[InterfaceSpec, int, Interface]] = []
        for mfc in (*run.graph.mfcs, *run.graph.evaluation):
            layout = run.plan[mfc.name].layout
            if self.rank not in layout.mesh.ranks:
                continue
            dp_rank = layout.coord(self.rank).dp
            alike = (judge for spec, at, judge in judges if mfc.role is None and (spec, at) == (mfc.interface, dp_rank))
            if (interface := next(alike, None)) is None:
                context = InterfaceContext(run.config.seed, self.tokenizer, run.paths.root, dp_rank)
                interface = build_interface(mfc.interface, context)
                judges += [(mfc.interface, dp_rank, interface)] if mfc.role is None else []
            interfaces[mfc.name] = interface
        return interfaces

    def _at_home(self, role: str) -> NativeEngine | None:
        return self.executor.engines.get((role, home(self.run.graph, self.run.plan, role)))

    def _changing(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the files of this worker's part of a checkpoint."""
        engines = {role: self._at_home(role) for role in self.run.changing}
        return {file_name(role, self.rank): snapshot(e) for role, e in engines.items() if e is not None}

    def _restore(self, folder: Path) -> None:
        for role, saved in read_manifest(folder).layouts.items():
            if (engine := self._at_home(role)) is not None:
                restore(engine, saved, Saved(folder, role))

    def _fetch(self, request: int, step: int, start: int, stop: int) -> None:
        assert self.source is not None, "only fetchers are asked for data"
        index, count = self.run.fetchers.index(self.rank), len(self.run.fetchers)
        first, last = (start + (stop - start) * k // count for k in (index, index + 1))
        with self.spans.span("fetch"):
            batch = self._read(self.source, first, last)
            batch = batch.to(self.device)
            self.executor.store.put(batch)
        self._done(request, step, outputs=batch.meta)

    def _read(self, source: RowSource, start: int, stop: int) -> SequenceBatch:
        """Return the rows that the prompts ``start`` to ``stop`` of one step stand for."""
        length, trial = self.run.schedule, self.run.eval_schedule
        step, at = divmod(start, length.stride)
        if step >= trial.first_step:
            first = (step - trial.first_step) * trial.batch_size + at
            return source.held_out(first, first + stop - start, start)
        own, first = length.span(step), step * length.batch_size
        if start < own.stop:
            return source.batch(first + at, first + at + stop - start, start)
        positions = range(first, first + own.stop - own.start)
        return source.redrawn(step, positions, start - own.stop, stop - own.stop, start)

    def _bring(self, call: PrepareCall) -> None:
        self.executor.receive_inputs(call)
        if self.rank in meshes_of(self.run.program[call.mfc]):
            self.calls[call.request] = call
        else:
            self._done(call.request, call.step)

    def _run(self, call: PrepareCall) -> None:
        outcome = self.executor.execute(call)
        meta = outcome.outputs.meta if outcome.outputs is not None else None
        self._done(call.request, call.step, outputs=meta, stats=outcome.stats or {}, state=outcome.state)

    def _collect(self, ids: tuple, keys: tuple[str, ...]) -> list[dict[str, Any]]:
        """Describe rows in words: text of prompt and answer, numbers of scalars, the question's own fields."""
        rows: dict[Any, dict[str, Any]] = {i: {"prompt_id": i.prompt, "sample": i.sample} for i in ids}
        for key in keys:
            for row, value in self.executor.held(ids, key).items():
                if key == "tokens" and (mask := self.executor.store.find(row, "prompt_mask")) is not None:
                    cut = int(mask.sum())
                    rows[row]["prompt"] = self.tokenizer.decode(value[:cut].tolist(), skip_special_tokens=True)
                    rows[row]["answer"] = self.tokenizer.decode(value[cut:].tolist(), skip_special_tokens=True)
                    rows[row]["answer_tokens"] = value.numel() - cut
                elif key == "row":
                    rows[row]["fields"] = row_fields(value)
                elif value.numel() == 1:
                    rows[row][key] = value.item()
        return [fields for fields in rows.values() if len(fields) > 2]

    def _done(self, request: int, step: int, **what: Any) -> None:
        spans = self.spans.take()
        trace, (moved, computed) = trace_lines(spans, self.rank, step), time_spent(spans)
        memory = resident_bytes()
        self.send(Done(request, self.rank, trace=trace, moved=moved, computed=computed, memory=memory, **what))

    def close(self) -> None:
        for server in self.servers:
            server.close()
        if self.links is not None:
            self.links.close()
        destroy_process_group()
