"""Runs a stage's schedule: the interpreter of plan/compile/pipeline.py. One stage alone is a pipeline of length one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from realhf.comm.p2p import P2PChannel, PendingRecv
from realhf.comm.process_groups import ParallelContext
from realhf.models.engine.decode.group import DecodeGroup
from realhf.models.engine.packing import Packing
from realhf.models.transformer import Transformer
from realhf.plan.compile.pipeline import (
    Advance,
    Backward,
    ExpectTokens,
    Forward,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    SendTokens,
    generation_schedule,
    inference_schedule,
    train_schedule,
)


class Pipeline:
    """This worker's stage and the wires to the stages before and after it."""

    def __init__(self, model: Transformer, context: ParallelContext) -> None:
        self.model, self.context = model, context
        # neighbours hold the same share of the tokens; members of a tensor-parallel group count by rank
        stages, index = context.layout.axis("pp", context.rank), context.group("tp").index
        self.ranks = tuple(sorted(context.layout.axis("tp", rank))[index] for rank in stages)
        self.stage, self.n_stages = context.coord.pp, len(self.ranks)
        self.wires = P2PChannel(context.device, context.activity)

    @property
    def is_last(self) -> bool:
        return self.stage == self.n_stages - 1

    def infer(self, batches: Sequence[Packing], finish: Callable[[int, Tensor], None]) -> None:
        """Stream batches through; the last stage hands each one's number and hidden states to ``finish``."""
        inputs: dict[int, Tensor] = {}
        for step in inference_schedule(self.stage, self.n_stages, len(batches)):
            match step:
                case RecvActivation(i):
                    inputs[i] = self._receive(batches[i], self.ranks[self.stage - 1])
                case Forward(i):
                    inputs[i] = self._hidden(batches[i], inputs.pop(i, None))
                    if self.is_last:
                        finish(i, inputs.pop(i))
                case SendActivation(i):
                    self.wires.send(inputs.pop(i), self.ranks[self.stage + 1])
                    self.wires.flush(keep=2)
        self.wires.flush()

    def train(
        self, batches: Sequence[Packing], loss: Callable[[int, Tensor], Tensor], token_weight: float = 0.0
    ) -> None:
        """Accumulate the gradients of all batches; the last stage turns hidden states into a scalar by ``loss``.

        Every stage adds the losses of its routers, in which a token counts ``token_weight``.
        """
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        for step in train_schedule(self.stage, self.n_stages, len(batches)):
            match step:
                case RecvActivation(i):
                    inputs[i] = self._receive(batches[i], self.ranks[self.stage - 1]).requires_grad_()
                case Forward(i):
                    hidden = self._hidden(batches[i], inputs.get(i), token_weight)
                    outputs[i] = loss(i, hidden) if self.is_last else hidden
                    del hidden
                case SendActivation(i):
                    self.wires.send(outputs[i].detach(), self.ranks[self.stage + 1])
                case RecvGradient(i):
                    gradients[i] = self._receive(batches[i], self.ranks[self.stage + 1])
                case Backward(i):
                    with_gradient(outputs.pop(i), gradients.pop(i, None)).backward()
                case SendGradient(i):
                    self.wires.send(_gradient_of(inputs.pop(i)), self.ranks[self.stage - 1])
            self.wires.flush(keep=2 * self.n_stages)  # neighbours are never further behind
        self.wires.flush()

    def generate(self, decodings: Sequence[DecodeGroup]) -> None:
        """Stream groups of rows through, turn after turn, until all have ended; every stage learns what is drawn."""
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        expected: dict[int, PendingRecv] = {}
        for step in generation_schedule(self.stage, self.n_stages, len(decodings)):
            decoding = decodings[step.micro_batch]
            if decoding.has_ended:
                if all(one.has_ended for one in decodings):
                    break
                continue
            match step:
                case Advance(i):
                    self.wires.flush(keep=len(decodings) * (self.n_stages - 1))  # older ones were answered
                    decoding.advance(outputs.pop(i) if self.is_last else expected.pop(i).wait())
                case RecvActivation(i):
                    inputs[i] = self._receive_rows(decoding.n_computed, self.ranks[self.stage - 1])
                case Forward(i):
                    outputs[i] = decoding.forward(inputs.pop(i, None))
                case SendActivation(i):
                    self.wires.send(outputs.pop(i), self.ranks[self.stage + 1])
                case ExpectTokens(i):
                    expected[i] = self.wires.post_receive((decoding.slots.n_drawing,), torch.int64, self.ranks[-1])
                case SendTokens(i):
                    for rank in self.ranks[:-1]:
                        self.wires.send(outputs[i], rank)
        self.wires.flush()

    def from_last(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor by the last stage's and return it."""
        return self.context.group("pp").broadcast(tensor, self.n_stages - 1)

    def _hidden(self, batch: Packing, x: Tensor | None, token_weight: float = 0.0) -> Tensor:
        return self.model.hidden(batch.tokens, batch.lengths, x=x, token_weight=token_weight, prefixes=batch.prefixes)

    def _receive(self, batch: Packing, rank: int) -> Tensor:
        return self._receive_rows(self.model.seams(len(batch.tokens)).n_local_tokens, rank)

    def _receive_rows(self, n_rows: int, rank: int) -> Tensor:
        return self.wires.receive((n_rows, self.model.config.hidden), self.model.params.data.dtype, rank)


class _WithGradient(torch.autograd.Function):
    """Takes the place of handing a gradient to ``backward``: that imports torch's symbolic shapes, of 40 MB."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def with_gradient(x: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a scalar whose backward pass gives ``gradient`` to ``x``; ``x`` where it is a loss itself."""
    return x if gradient is None else _WithGradient.apply(x, gradient)


def _gradient_of(x: Tensor) -> Tensor:
    assert x.grad is not None, "every stage's output depends on its input"
    return x.grad
