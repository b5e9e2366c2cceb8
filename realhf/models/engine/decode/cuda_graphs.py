"""Decoding steps that stay on the device, as CUDA graphs, which launch hundreds of small kernels at once.

A graph is for one number of slots and one context length, both rounded up so that few graphs cover all steps. Inputs
and outputs have fixed addresses. Slots beyond the live ones write to unused slots, and their tokens are dropped. Routed
experts without a grouped product are not captured: the host reads how many tokens each of them has.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realhf.models.transformer import Transformer
from realhf.ops.cascade import GroupSizes, PrefixGroups, SharedPrefixes
from realhf.ops.rows import on_device
from realhf.ops.sampling import NO_TOKEN

CONTEXT_STEP = 256
"""Context lengths are rounded up to multiples of this."""
STEPS_PER_WAIT = 8
"""Decoding steps between two times at which the host reads tokens."""
MAX_GRAPHS = 64
KEPT_SHARE = 0.1
"""A cache of at most this share of the device's memory is kept between calls of ``generate``."""
SKIPPED = -2
"""The token of a row that ended in an earlier step of a turn."""
Step = Callable[[Tensor, int, SharedPrefixes | None], tuple[Tensor, ...]]
"""Samples from the first five rows of the state, for rows up to a length: tokens and two log-probabilities, ``[S]``."""


class _StepArguments(NamedTuple):
    """What a graph is captured for; it reads the memory of the tensors. ``prefixes`` are packed ``PrefixGroups``."""

    size: int
    context: int
    stop_tokens: Tensor
    prefixes: Tensor
    sizes: GroupSizes | None

    @property
    def shared(self) -> SharedPrefixes | None:
        return SharedPrefixes.of(self.prefixes, self.sizes) if self.sizes else None


class _CapturedStep(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: Tensor
    arguments: _StepArguments


def round_batch(n: int, limit: int) -> int:
    """Round a number of slots up to a power of two or one and a half times a power of two, at most ``limit``."""
    size = 1 << max(0, n - 1).bit_length()
    middle = size * 3 // 4
    return min(middle if size >= 4 and n <= middle else size, limit)


def round_context(longest: int, limit: int) -> int:
    """Round a context length up to a multiple of ``CONTEXT_STEP``, at most ``limit``."""
    return min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, limit)


def decodes_on_device(model: Transformer) -> bool:
    """Return True for models on GPUs that are not split into stages."""
    return model.is_first and model.is_last and model.device.type == "cuda"


class DeviceDecoder:
    """The KV cache of a model, and the decoding steps of its first slots.

    ``state`` is ``[7, n_slots]`` int64: last tokens, positions, the arguments of sampling (prompt numbers, samples,
    token counts), limits of the counts, and 1 for ended rows. A step updates it, so that several steps need no host.
    """

    def __init__(self, model: Transformer, n_slots: int, max_len: int, records_experts: bool = False) -> None:
        self.cache, self.device = model.new_cache(n_slots, max_len, records_experts), model.device
        self.state = torch.zeros(7, n_slots, dtype=torch.int64, device=self.device)
        self.weights_version = model.params.n_allocations
        self._angles = model.rotary.tables(max_len)  # graphs read them, and the model may replace them by longer ones
        self._captured: dict[Hashable, _CapturedStep] = {}
        is_captured = self.device.type == "cuda" and not model.waits_for_experts
        self._pool = torch.cuda.graph_pool_handle() if is_captured else None

    def fits(self, model: Transformer, n_slots: int, max_len: int, records_experts: bool = False) -> bool:
        """Return True if the cache is large enough, and the weights have not moved since the graphs were captured."""
        is_large = self.cache.n_slots >= n_slots and self.cache.max_len >= max_len
        is_same = records_experts == (self.cache.experts is not None)
        return is_large and is_same and self.weights_version == model.params.n_allocations

    def size_for(self, n: int) -> int:
        """Return the number of slots that a step computes for ``n`` live rows."""
        return round_batch(n, self.cache.n_slots)

    def run(
        self,
        step: Step,
        table: npt.NDArray[np.int64],
        stop_tokens: Tensor,
        options: Hashable,
        n_steps: int,
        groups: PrefixGroups | None = None,
    ) -> Tensor:
        """Make ``n_steps`` steps from the state ``table`` ``[6, n]``; return ``[n_steps, 3, n]`` float64.

        Outputs are token (``SKIPPED`` after a row's end), log-probability and sampling log-probability. ``options``
        names everything else that ``step`` depends on. ``groups`` are of ``size_for(n)`` slots.
        """
        n = table.shape[1]
        size = self.size_for(n)
        context = round_context(int(table[1].max()) + n_steps, self.cache.max_len)
        padded = np.zeros((7, size), np.int64)
        padded[:6, :n], padded[6, n:] = table, 1
        self.state[:, :size].copy_(on_device(torch.from_numpy(padded), self.device))
        packed = on_device(torch.from_numpy(groups.packed if groups else np.empty(0, np.int64)), self.device)
        arguments = _StepArguments(size, context, stop_tokens, packed, groups.sizes if groups else None)
        if self._pool is None:  # the host waits for experts; tests run the padded step without a graph
            outputs = [self._advance(step, arguments) for _ in range(n_steps)]
            return torch.stack(outputs)[:, :, :n]
        key = (size, context, arguments.sizes, options)
        captured = self._captured.pop(key, None) or self._capture(step, arguments)
        self._captured[key] = captured  # the last one is the most recent
        if captured.arguments.prefixes is not packed:
            captured.arguments.prefixes.copy_(packed)
        if len(self._captured) > MAX_GRAPHS:
            del self._captured[next(iter(self._captured))]
        outputs = []
        for _ in range(n_steps):
            captured.graph.replay()
            outputs.append(captured.outputs.clone())
        return torch.stack(outputs)[:, :, :n]

    def _advance(self, step: Step, arguments: _StepArguments) -> Tensor:
        """Sample one token per row and update the state; float64 represents every token exactly."""
        state = self.state[:, : arguments.size]
        last, positions, _, _, counts, limits, ended = state
        tokens, *logprobs = step(state[:5], arguments.context, arguments.shared)
        is_live = ended == 0
        is_new = is_live & (tokens != NO_TOKEN)
        last.copy_(torch.where(is_new, tokens, last))
        positions += is_new
        counts += is_new
        is_stop = (tokens[:, None] == arguments.stop_tokens).any(1)  # isin waits for the device if there are many
        ended.logical_or_(~is_new | is_stop | (counts >= limits))
        return torch.stack([x.double() for x in (torch.where(is_live, tokens, SKIPPED), *logprobs)])

    def _capture(self, step: Step, arguments: _StepArguments) -> _CapturedStep:
        """Capture a step after one warm-up run, which initialises libraries and communicators."""
        saved, delta = self.state.clone(), self.cache.delta
        states = delta.clone() if delta is not None else None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._advance(step, arguments)
        torch.cuda.current_stream().wait_stream(stream)
        self.state.copy_(saved)
        if delta is not None and states is not None:
            delta.restore(states)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = self._advance(step, arguments)
        return _CapturedStep(graph, outputs, arguments)


class KeptDecoder:
    """Keeps the decoder of an engine between calls, in bounded memory: captures take as long as many steps.

    It does not refer to the model, whose parameters call ``drop`` when they are released.
    """

    def __init__(self) -> None:
        self._decoder: DeviceDecoder | None = None

    def take(self, model: Transformer, n_slots: int, max_len: int, records_experts: bool = False) -> DeviceDecoder:
        """Return the kept decoder if it fits, else a new one; it is the caller's until ``give``."""
        kept, self._decoder = self._decoder, None
        if kept is not None and kept.fits(model, n_slots, max_len, records_experts):
            return kept
        del kept  # before the new cache is allocated
        max_len = min(round_context(max_len, model.config.max_row_len), model.config.max_row_len)
        return DeviceDecoder(model, n_slots, max_len, records_experts)

    def give(self, decoder: DeviceDecoder) -> None:
        """Keep a decoder if it is small enough."""
        if decoder.device.type == "cuda":
            _, total = torch.cuda.mem_get_info(decoder.device)
            if decoder.cache.nbytes <= KEPT_SHARE * total:
                self._decoder = decoder

    def drop(self) -> None:
        self._decoder = None
