"""Decoding steps on a GPU as CUDA graphs: hundreds of small kernels are launched as one.

A graph is for one number of slots and one reach of the cache; both are rounded up, so that few graphs serve all steps.
What a step reads and gives lies in places that do not move. Slots beyond the live ones compute too: they write into
slots that nobody holds, and what they draw is not looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.models.transformer import Transformer

CONTEXT_STEP = 256
"""The reach of a cache is rounded up to multiples of this."""
Step = Callable[[Tensor, int], Tensor]
"""Computes a step from its inputs ``[5, S]`` and the longest row's length: tokens and log-probabilities, ``[3, S]``."""


def bucket(n: int, most: int) -> int:
    """Return for how many slots a step of ``n`` is computed: powers of two and the middles between them."""
    size = 1 << max(0, n - 1).bit_length()
    middle = size * 3 // 4
    return min(middle if size >= 4 and n <= middle else size, most)


def round_context(longest: int, most: int) -> int:
    """Return how far into the cache a step looks whose longest row has ``longest`` tokens."""
    return min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, most)


def has_graphs(model: Transformer) -> bool:
    """Tell whether decoding steps can be graphs: whole models on one GPU, without routed experts."""
    whole = model.is_first and model.is_last and model.tp.size == 1
    return whole and model.params.data.is_cuda and not model.config.n_experts


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: Tensor


class GraphedSteps:
    """Carries out a ``Step`` for ``n_slots`` slots with places for ``max_len`` tokens each.

    ``inputs`` are last tokens, positions, and what a draw depends on: prompt numbers, samples, counts.
    """

    def __init__(self, step: Step, n_slots: int, max_len: int, device: torch.device) -> None:
        self.step, self.n_slots, self.max_len = step, n_slots, max_len
        self.inputs = torch.zeros(5, n_slots, dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, inputs: Tensor, longest: int) -> Tensor:
        """Return ``[3, S]`` float64 of ``inputs`` ``[5, S]``: token, log-probability, and that of sampling."""
        n = inputs.shape[1]
        size, far = bucket(n, self.n_slots), round_context(longest, self.max_len)
        self.inputs[:, :n] = inputs
        self.inputs[:, n:size] = 0
        if self._pool is None:  # elsewhere a step is what a graph would repeat
            return self.step(self.inputs[:, :size], far)[:, :n]
        if (size, far) not in self._captured:
            self._captured[size, far] = self._capture(size, far)
        captured = self._captured[size, far]
        captured.graph.replay()
        return captured.outputs[:, :n].clone()

    def _capture(self, size: int, far: int) -> _Captured:
        """Record a step. It is computed once before: libraries and tables make ready at their first use."""
        inputs = self.inputs[:, :size]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.step(inputs, far)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self.step(inputs, far)
        return _Captured(graph, outputs)
