"""Runs the schedules of plan/compile/pipeline.py on one stage. A single stage is a pipeline of length one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from realhf.comm.p2p import P2PChannel, PendingTransfer
from realhf.comm.process_groups import ParallelContext
from realhf.models.engine.decode.cuda_graphs import KeptDecoder
from realhf.models.engine.decode.group import DecodeGroup
from realhf.models.engine.packing import Packing
from realhf.models.token_head import FinalStates
from realhf.models.transformer import Transformer
from realhf.plan.compile import pipeline as schedule

Pass = tuple[int, int]  # micro-batch, chunk of layers


class Pipeline:
    """This worker's stage, with point-to-point communication to the adjacent stages."""

    def __init__(self, model: Transformer, context: ParallelContext) -> None:
        self.model, self.context = model, context
        # peers hold the same tokens; members of a tensor-parallel group are ordered by rank
        stages, index = context.layout.axis("pp", context.rank), context.group("tp").index
        self.ranks = tuple(sorted(context.layout.axis("tp", rank))[index] for rank in stages)
        self.stage, self.n_stages = context.coord.pp, len(self.ranks)
        self.previous, self.next = (self.ranks[(self.stage + step) % self.n_stages] for step in (-1, 1))
        self.p2p = P2PChannel(context.device, context.activity, context.directed)
        self.kept_decoder = KeptDecoder()
        model.params.on_free.append(self.kept_decoder.drop)

    @property
    def is_last(self) -> bool:
        return self.stage == self.n_stages - 1

    def _is_end(self, chunk: int) -> bool:
        """Return True for the last chunk of layers of the model."""
        return self.is_last and chunk == len(self.model.chunks) - 1

    def infer(self, batches: Sequence[Packing], finish: Callable[[int, FinalStates], None]) -> None:
        """Run batches through the pipeline; the last stage calls ``finish(number, states)`` for each."""
        inputs: dict[Pass, Tensor] = {}
        for step in schedule.inference_schedule(self.stage, self.n_stages, len(batches), len(self.model.chunks)):
            match step:
                case schedule.RecvActivation(i, chunk):
                    inputs[i, chunk] = self._receive(batches[i], self.previous)
                case schedule.Forward(i, chunk):
                    states = self._states(batches[i], inputs.pop((i, chunk), None), chunk)
                    if self._is_end(chunk):
                        finish(i, states)
                    else:
                        inputs[i, chunk] = states.all()
                    del states
                    if self.model.memory is not None:
                        self.model.memory.release()
                case schedule.SendActivation(i, chunk):
                    self.p2p.send(inputs.pop((i, chunk)), self.next)
                    self.p2p.flush(keep=2)
        self.p2p.flush()

    def train(
        self,
        batches: Sequence[Packing],
        loss: Callable[[int, FinalStates], Tensor],
        token_weight: float = 0.0,
        last_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Accumulate the gradients of all batches; the last stage computes a scalar ``loss`` of its states.

        Every stage adds its router losses, with ``token_weight`` per token. The last backward pass of each chunk runs
        in the context ``last_backward``; those of later chunks come first.
        """
        inputs: dict[Pass, Tensor] = {}
        outputs: dict[Pass, Tensor] = {}
        gradients: dict[Pass, Tensor] = {}
        for step in schedule.train_schedule(self.stage, self.n_stages, len(batches), len(self.model.chunks)):
            match step:
                case schedule.RecvActivation(i, chunk):
                    inputs[i, chunk] = self._receive(batches[i], self.previous).requires_grad_()
                case schedule.Forward(i, chunk):
                    states = self._states(batches[i], inputs.get((i, chunk)), chunk, token_weight)
                    outputs[i, chunk] = loss(i, states) if self._is_end(chunk) else states.all()
                    del states
                case schedule.SendActivation(i, chunk):
                    self.p2p.send(outputs[i, chunk].detach(), self.next)
                case schedule.RecvGradient(i, chunk):
                    gradients[i, chunk] = self._receive(batches[i], self.next)
                case schedule.Backward(i, chunk):
                    with last_backward() if i == len(batches) - 1 else nullcontext():
                        with_gradient(outputs.pop((i, chunk)), gradients.pop((i, chunk), None)).backward()
                    if self.model.memory is not None:
                        self.model.memory.backward_ended()
                case schedule.SendGradient(i, chunk):
                    gradient = inputs.pop((i, chunk)).grad
                    assert gradient is not None, "every stage's output depends on its input"
                    self.p2p.send(gradient, self.previous)
            self.p2p.flush(keep=2 * self.n_stages)  # no stage blocks with so many unfinished sends (tests/plan/compile)
        self.p2p.flush()

    def generate(self, groups: Sequence[DecodeGroup]) -> None:
        """Run groups of rows through the pipeline until all are finished; every stage receives the sampled tokens."""
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        expected: dict[int, PendingTransfer] = {}
        for step in schedule.generation_schedule(self.stage, self.n_stages, len(groups)):
            group = groups[step.micro_batch]
            if group.is_finished:
                if all(one.is_finished for one in groups):
                    break
                continue
            match step:
                case schedule.Advance(i):
                    self.p2p.flush(keep=len(groups) * (self.n_stages - 1))  # the tokens of older ones have arrived
                    group.advance(outputs.pop(i) if self.is_last else expected.pop(i).wait())
                case schedule.RecvActivation(i):
                    inputs[i] = self.receive_rows(group.n_tokens, self.previous)
                case schedule.Forward(i):
                    outputs[i] = group.forward(inputs.pop(i, None))
                case schedule.SendActivation(i):
                    self.p2p.send(outputs.pop(i), self.next)
                case schedule.ExpectTokens(i):
                    expected[i] = self.p2p.post_receive((group.slots.n_sampling,), torch.int64, self.ranks[-1])
                case schedule.SendTokens(i):
                    for rank in self.ranks[:-1]:
                        self.p2p.send(outputs[i], rank)
        self.p2p.flush()

    def from_last(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with the last stage's and return it."""
        return self.context.group("pp").broadcast(tensor, self.n_stages - 1)

    def from_stages(self, own: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate the stages' tensors ``[n, width]`` to ``[n, sum of widths]`` on every stage."""
        group, parts = self.context.group("pp"), list[Tensor]()
        for stage, width in enumerate(widths):
            part = own if stage == self.stage else own.new_empty(len(own), width)
            parts.append(group.broadcast(part.contiguous(), stage) if part.numel() else part)
        return torch.cat(parts, 1)

    def _states(self, batch: Packing, x: Tensor | None, chunk: int, token_weight: float = 0.0) -> FinalStates:
        token_weight = 0.0 if batch.is_filler else token_weight
        return self.model.states(batch.tokens, batch.lengths, x=x, token_weight=token_weight, prefixes=batch.prefixes,
                                 experts=batch.experts, dropout=batch.dropout, chunk=chunk)  # fmt: skip

    def _receive(self, batch: Packing, rank: int) -> Tensor:
        return self.receive_rows(self.model.token_region(len(batch.tokens)).n_local_tokens, rank)

    def receive_rows(self, n_rows: int, rank: int) -> Tensor:
        """Receive the hidden states of ``n_rows`` tokens from another stage."""
        return self.p2p.receive((n_rows, self.model.config.hidden), self.model.dtype, rank)


class _WithGradient(torch.autograd.Function):
    """Replaces the argument of ``backward``, which imports torch's symbolic shapes (40 MB)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def with_gradient(x: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a scalar whose backward pass has ``gradient`` at ``x``; without a gradient ``x``, which is a loss."""
    return x if gradient is None else _WithGradient.apply(x, gradient)
