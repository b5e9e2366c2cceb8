"""The MLPs of routed experts: those of this worker, for its tokens or those that other workers send."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from realhf.comm.expert_parallel import ExpertRegion
from realhf.models.low_rank import LowRank
from realhf.ops.moe import (
    ExpertOrder,
    collect,
    combine,
    dispatch,
    grouped_linear,
    has_grouped_kernel,
    sort_by_expert,
)


@dataclass(frozen=True)
class RoutedMlps:
    """Weights of routed experts: up ``[E, 2, wide, D]`` (gate and up), down ``[E, D, wide]``.

    Biases are ``[E, 2, wide]`` and, of the output columns from ``first_column`` on, ``[E, columns]``.
    """

    up: Tensor
    down: Tensor
    up_adapter: LowRank | None = None
    down_adapter: LowRank | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None
    first_column: int = 0

    @property
    def up_rows(self) -> Tensor:
        """Gate and up as one matrix per expert, ``[E, 2 * wide, D]``."""
        return self.up.flatten(1, 2)

    @cached_property
    def are_grouped(self) -> bool:
        """Whether all experts are one product, without waiting for the device."""
        adapters = [adapter for adapter in (self.up_adapter, self.down_adapter) if adapter is not None]
        thin = [matrix.to(self.up.dtype) for adapter in adapters for matrix in (adapter.a, adapter.b)]
        return has_grouped_kernel(self.up_rows, self.down, *thin)

    def __call__(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        activation: Callable[[Tensor], Tensor],
        region: ExpertRegion | None,
    ) -> Tensor:
        """Return the weighted sum over each token's experts, ``[T, D]``; of sharded experts, this worker's part.

        ``tokens`` are ``[T, D]``, ``weights`` and ``chosen`` ``[T, k]``. In a ``region`` the sum is over the experts of
        its group. Collective over the group.
        """
        if region is None:
            order = sort_by_expert(chosen, len(self.up), self.are_grouped)
            return combine(self._outputs(dispatch(tokens, order), order, activation), weights, order)
        is_grouped = self.are_grouped and region.group.size == 1
        pairs = sort_by_expert(chosen, region.n_reached, is_grouped, region.numbers)
        x = dispatch(tokens, pairs)
        if region.group.size == 1:
            return combine(self._outputs(x, pairs, activation), weights, pairs)
        exchange = region.exchange(pairs.sizes)
        order = sort_by_expert(exchange.experts[:, None], len(self.up), self.are_grouped)
        outputs = self._outputs(dispatch(exchange.to_experts(x), order), order, activation)
        return combine(exchange.from_experts(collect(outputs, order)), weights, pairs)

    def _outputs(self, x: Tensor, order: ExpertOrder, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the experts' outputs for tokens sorted by expert, ``[N, D]`` each."""
        wide = _product(x, self.up_rows, self.up_adapter, order)
        if self.b_up is None or self.b_down is None:
            return _product(activation(wide), self.down, self.down_adapter, order)
        experts = order.experts
        wide = wide + self.b_up.flatten(1).index_select(0, experts)
        y, bias = _product(activation(wide), self.down, self.down_adapter, order), self.b_down.index_select(0, experts)
        rest = y.shape[1] - bias.shape[1] - self.first_column
        return y + (F.pad(bias, (self.first_column, rest)) if bias.shape != y.shape else bias)


def _product(x: Tensor, weight: Tensor, adapter: LowRank | None, order: ExpertOrder) -> Tensor:
    y = grouped_linear(x, weight, order)
    return y if adapter is None else adapter.add_to_experts(y, x, order)
