"""Decoding steps as CUDA graphs, which launch hundreds of small kernels at once.

A graph is for one number of slots and one context length, both rounded up so that few graphs cover all steps. Inputs
and outputs have fixed addresses. Slots beyond the live ones write to unused slots, and their tokens are dropped.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from realhf.models.transformer import Transformer

CONTEXT_STEP = 256
"""Context lengths are rounded up to multiples of this."""
Step = Callable[[Tensor, int], Tensor]
"""Computes a step from its inputs ``[5, S]`` and the longest row's length: tokens and log-probabilities, ``[3, S]``."""


def round_batch(n: int, limit: int) -> int:
    """Round a number of slots up to a power of two or one and a half times a power of two, at most ``limit``."""
    size = 1 << max(0, n - 1).bit_length()
    middle = size * 3 // 4
    return min(middle if size >= 4 and n <= middle else size, limit)


def round_context(longest: int, limit: int) -> int:
    """Round a context length up to a multiple of ``CONTEXT_STEP``, at most ``limit``."""
    return min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, limit)


def supports_cuda_graphs(model: Transformer) -> bool:
    """Return True for whole models on one GPU without routed experts."""
    is_whole = model.is_first and model.is_last and model.tp.size == 1
    return is_whole and model.params.data.is_cuda and not model.config.n_experts


class CudaGraphRunner:
    """Runs a ``Step`` for at most ``n_slots`` slots and contexts of at most ``max_len`` tokens.

    ``inputs`` are last tokens, positions, and the arguments of sampling: prompt numbers, samples, token counts.
    """

    def __init__(self, step: Step, n_slots: int, max_len: int, device: torch.device) -> None:
        self.step, self.n_slots, self.max_len = step, n_slots, max_len
        self.inputs = torch.zeros(5, n_slots, dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, inputs: Tensor, longest: int) -> Tensor:
        """Return ``[3, S]`` float64 for ``inputs`` ``[5, S]``: token, log-probability, sampling log-probability."""
        n = inputs.shape[1]
        size, context = round_batch(n, self.n_slots), round_context(longest, self.max_len)
        self.inputs[:, :n] = inputs
        self.inputs[:, n:size] = 0
        if self._pool is None:  # tests run the padded step without a graph
            return self.step(self.inputs[:, :size], context)[:, :n]
        if (size, context) not in self._captured:
            self._captured[size, context] = self._capture(size, context)
        graph, outputs = self._captured[size, context]
        graph.replay()
        return outputs[:, :n].clone()

    def _capture(self, size: int, context: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step after one warm-up run, which initialises libraries and tables."""
        inputs = self.inputs[:, :size]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(inputs, context)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self.step(inputs, context)
        return graph, outputs
