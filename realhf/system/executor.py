"""Executes the program instructions of a call on one worker. The plan has made all decisions."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from realhf.api.batch_meta import PROMPT, BatchMeta, RowId
from realhf.api.graph import MFC, Kind
from realhf.api.layout import Layout
from realhf.api.messages import PrepareCall, State, Stats
from realhf.api.param_box import box_numel, box_shape
from realhf.api.program import Compute, Load, Offload, Reallocate, Release, Transfer
from realhf.arch.lora import own_specs
from realhf.arch.param_specs import stage_layers
from realhf.base.activity import ActivityStack
from realhf.base.timers import Spans
from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.shared_memory import SharedMemoryPeers
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Interface
from realhf.models.engine import NativeEngine, own_dtype
from realhf.ops.strided_copy import copy_box
from realhf.plan.compile.realloc import plan_realloc
from realhf.plan.compile.transfer import plan_transfer, stored_row_id
from realhf.plan.run_spec import RunSpec
from realhf.system.row_store import RowStore


@dataclass
class CallResult:
    """Results of a call on this worker."""

    outputs: BatchMeta | None = None
    stats: Stats = field(default_factory=dict)
    state: State | None = None
    carried: BatchMeta | None = None


@dataclass
class Executor:
    """Runs program instructions with a worker's engines, interfaces and row store."""

    run: RunSpec
    rank: int
    device: torch.device
    engines: dict[tuple[str, Layout], NativeEngine]
    interfaces: dict[str, Interface]
    spans: Spans
    links: SharedMemoryPeers | None = None
    activity: ActivityStack = field(default_factory=ActivityStack)
    store: RowStore = field(default_factory=RowStore)
    _copies: dict[Reallocate, list[P2PCopy]] = field(default_factory=dict)

    def receive_inputs(self, call: PrepareCall) -> None:
        """Execute the transfers of the call's input rows."""
        for step in self.run.program[call.mfc]:
            if isinstance(step, Transfer):
                carried = [key for key in self.run.graph[call.mfc].carried if key in call.inputs.columns]
                with self.spans.span(f"{call.mfc}/Transfer"):
                    self._transfer(call, (*step.keys, *carried, *call.forwarded), step.layout)

    def execute(self, call: PrepareCall) -> CallResult:
        """Execute all other instructions of the call's program."""
        result = CallResult()
        for step in self.run.program[call.mfc]:
            if isinstance(step, Transfer):
                continue
            with self.spans.span(f"{call.mfc}/{type(step).__name__}"):
                match step:
                    case Reallocate():
                        self._reallocate(step)
                    case Compute(_, role, layout) if self.rank in layout.mesh.ranks:
                        result = self._compute(call, role, layout)
                    case Load(role, layout) if self.rank in layout.mesh.ranks:
                        self.engines[role, layout].params.load()
                    case Offload(role, layout) if self.rank in layout.mesh.ranks:
                        self.engines[role, layout].params.offload()
                    case Release(role, dst) if self.rank in dst.mesh.ranks:
                        self.engines[role, dst].params.free()
        return result

    def _transfer(self, call: PrepareCall, keys: tuple[str, ...], layout: Layout) -> None:
        copies = [
            P2PCopy(c, c.src, c.dst, TensorSlice(getattr(torch, c.dtype), c.length))
            for c in plan_transfer(call, keys, layout)
        ]

        def read(copy: Any) -> Tensor:
            return self.store.get(copy.row, copy.key)

        def write(copy: Any, value: Tensor) -> None:
            self.store.put_value(copy.row, copy.key, value)

        exchange(copies, self.rank, read, write, self.device, peers=self.links, activity=self.activity)

    def _reallocate(self, step: Reallocate) -> None:
        if step not in self._copies:
            self._copies[step] = self._plan_copies(step)
        source: Any = self.engines.get((step.role, step.src))
        target: Any = self.engines.get((step.target, step.dst))
        if target is not None:
            target.params.allocate()

        def read(copy: Any) -> Tensor:
            return source.params.read(copy.name, copy.box)

        def write(copy: Any, value: Tensor) -> None:
            target.params.lerp_(copy.name, copy.box, value.view(box_shape(copy.box)), step.eta)

        def destination(copy: Any) -> Tensor:
            return target.params.read(copy.name, copy.box)

        exchange(self._copies[step], self.rank, read, write, self.device,
                 into=destination if step.eta == 1.0 else None, peers=self.links,
                 verify=self.run.config.verify_reallocation, copy=copy_box, activity=self.activity)  # fmt: skip

    def _plan_copies(self, step: Reallocate) -> list[P2PCopy]:
        """Return the copies that this worker sends or receives, and those of its peers in shared memory."""
        config = self.run.models[step.role]
        node_size = self.run.config.n_gpus_per_node
        routes = plan_realloc(own_specs(config), partial(stage_layers, config), step.src, step.dst, node_size)
        local = {self.rank, *(self.links.ranks if self.links else ())}
        dtype = own_dtype(self.run.roles[step.role])
        return [
            P2PCopy(c, c.src, c.dst, TensorSlice(dtype, box_numel(c.box)), (c.name, c.box, route.dsts))
            for route in routes
            if route.src in local or self.rank in route.dsts
            for c in route.copies()
        ]

    def _compute(self, call: PrepareCall, role: str | None, layout: Layout) -> CallResult:
        mfc = self.run.graph[call.mfc]
        batch = self._gather(call, layout)
        engine: Any = None
        if role is not None:
            limits = self.run.plan[call.mfc].micro_batching
            engine = replace(self.engines[role, layout], micro_batching=limits, version=call.version)
        interface = self.interfaces[call.mfc]
        head = self.rank in layout.dp_heads()
        if mfc.kind is Kind.TRAIN:
            stats, state = interface.train_step(engine, batch, call.state)
            return CallResult(stats=stats if head else {}, state=state)
        method = interface.generate if mfc.kind is Kind.GENERATE else interface.inference
        outputs, stats = method(engine, batch, call.state)
        if not head:
            return CallResult()
        ids = tuple(RowId(i.prompt, PROMPT) for i in outputs.ids) if mfc.per_prompt else outputs.ids
        outputs = SequenceBatch(ids, {key: outputs.columns[mfc.interface_key(key)] for key in mfc.outputs})
        self.store.put(outputs)
        return CallResult(outputs.meta, stats, carried=self._carry(call, mfc, interface))

    def _carry(self, call: PrepareCall, mfc: MFC, interface: Any) -> BatchMeta | None:
        """Store the rows that the call passes to the next step, whose prompts have other numbers."""
        if not mfc.carried or call.step + 1 >= self.run.schedule.n_steps:
            return None
        rows, stop = interface.carry(), self.run.schedule.span(call.step + 1).stop
        ids = [RowId(row.prompt + self.run.schedule.stride, PROMPT) for row in rows.ids]
        carried = SequenceBatch(tuple(ids), rows.columns).select([i for i, row in enumerate(ids) if row.prompt < stop])
        self.store.put(carried)
        return carried.meta

    def _gather(self, call: PrepareCall, layout: Layout) -> SequenceBatch:
        """Return this data-parallel rank's batch from the store; it may have no rows."""
        mfc, indices = self.run.graph[call.mfc], call.assignment[layout.coord(self.rank).dp]
        ids = tuple(call.inputs.ids[i] for i in indices)
        columns: dict[str, Column] = {}
        for key, meta in call.inputs.columns.items():
            sources = [stored_row_id(row, key, call.shared) for row in ids]
            empty = Column(torch.empty(0, dtype=getattr(torch, meta.dtype), device=self.device), ())
            columns[mfc.interface_key(key)] = self.store.gather(sources, key) if sources else empty
        batch = SequenceBatch(ids, columns)
        if not mfc.is_train:
            return batch
        minibatches = torch.tensor([call.minibatches[i] for i in indices], dtype=torch.int64, device=self.device)
        return batch.with_scalars("minibatch", minibatches)
