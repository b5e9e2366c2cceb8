"""Which routed experts a worker computes, and the exchange of tokens with the workers that have the others.

Experts are divided over tensor-parallel ranks, which have the same tokens, and then over data-parallel ranks, which
send their tokens to each other (expert parallelism: GShard, Lepikhin et al. 2020, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from realhf.api.param_box import ParamSpec, numbered_box
from realhf.comm.process_groups import Group, ParallelContext


@dataclass(frozen=True)
class ExpertRegion:
    """The experts ``spans[i]`` belong to member i of ``group``, together those of one tensor-parallel rank.

    The members have different tokens. Other experts, of ``n_experts``, belong to other tensor-parallel ranks, which
    have the same tokens as this one.
    """

    n_experts: int
    spans: tuple[range, ...]
    group: Group
    device: torch.device

    @property
    def own(self) -> range:
        """The experts of this worker."""
        return self.spans[self.group.index]

    @cached_property
    def n_reached(self) -> int:
        """Number of experts of the group."""
        return sum(map(len, self.spans))

    @cached_property
    def numbers(self) -> Tensor:
        """For every expert its place among those of the group, ``[E]`` int64; ``n_reached`` for other experts."""
        with torch.inference_mode(False):
            table = torch.full((self.n_experts,), self.n_reached, dtype=torch.int64)
            for place, expert in enumerate(expert for span in self.spans for expert in span):
                table[expert] = place
            return table.to(self.device)

    def exchange(self, sizes: Sequence[int]) -> "TokenExchange":
        """Tell the members how many tokens each of their experts gets from this one. Collective.

        ``sizes`` are the numbers of tokens by the place of their expert, ``[n_reached]``.
        """
        widths, n_own = [len(span) for span in self.spans], len(self.own)
        counts = torch.tensor(sizes, dtype=torch.int64)
        received = torch.empty(self.group.size * n_own, dtype=torch.int64, device=self.device)
        self.group.all_to_all(received, counts.to(self.device), [n_own] * self.group.size, widths)
        sent = [int(part.sum()) for part in counts.split(widths)]
        by_member = received.view(self.group.size, n_own)
        arrived = by_member.sum(1).tolist()
        experts = torch.arange(n_own, device=self.device).repeat(self.group.size)
        return TokenExchange(self.group, sent, arrived, experts.repeat_interleave(received, output_size=sum(arrived)))


def expert_region(n_experts: int, context: ParallelContext) -> ExpertRegion | None:
    """Return a worker's region of the routed experts of a layer; None where all ranks have all of them."""
    layout, group = context.layout, context.group("ep")
    strategy, spec = layout.strategy, ParamSpec("experts", (n_experts, 1), 0, is_expert=True)
    if strategy.ep == 1 or not n_experts:
        return None
    coords = [layout.coord(rank) for rank in sorted(group.ranks)]
    boxes = [numbered_box(spec, strategy.cuts, strategy.shard_number(at.dp, at.tp)) for at in coords]
    return ExpertRegion(n_experts, tuple(range(*box[0]) for box in boxes if box), group, context.device)


@dataclass(frozen=True)
class TokenExchange:
    """Sends ``sent[i]`` tokens to member i and receives ``received[i]``, those of ``experts`` of this worker."""

    group: Group
    sent: list[int]
    received: list[int]
    experts: Tensor

    def to_experts(self, tokens: Tensor) -> Tensor:
        """Return the tokens ``[R, D]`` for this worker's experts; ``tokens`` are sorted by their expert's place."""
        return _AllToAll.apply(tokens, self.group, self.received, self.sent)

    def from_experts(self, results: Tensor) -> Tensor:
        """Return the results of the tokens that this worker has sent, in the same order."""
        return _AllToAll.apply(results, self.group, self.sent, self.received)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
        ctx.group, ctx.splits = group, (sent, received)
        return _exchanged(x, group, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.group, *ctx.splits), None, None, None


def _exchanged(x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    group.all_to_all(result, x.contiguous(), received, sent)
    return result
