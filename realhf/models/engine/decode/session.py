"""Multi-turn generation: episodes wait for their environments without a slot, and keep their cache.

Live rows are dense in the first slots, as in ``group``. Every open episode has a home slot behind them, which keeps its
keys and values between turns. New tokens of an episode are part of a decoding step, or computed by themselves, so that
a row's result depends on no other row of the pass (where this holds for the decoding kernel), and not on the order of
replies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import msgspec
import numpy as np
import torch
from torch import Tensor

from realhf.api.config import GenerationConfig
from realhf.comm.process_groups import Group
from realhf.data.turns import TurnDriver, TurnInput, TurnOutput, TurnRequest
from realhf.models.engine.decode.cuda_graphs import SKIPPED, STEPS_PER_WAIT, DeviceDecoder, decodes_on_device
from realhf.models.engine.decode.session_table import Admission, SessionTable
from realhf.models.engine.nonfinite import nonfinite_turn
from realhf.models.engine.pipeline_runner import Pipeline
from realhf.ops.rows import on_device
from realhf.ops.sampling import NO_TOKEN, mix_seed, sample, uniform


@dataclass(frozen=True)
class SessionOptions:
    """``max_len`` bounds the tokens of an episode, ``max_episodes`` the open episodes."""

    config: GenerationConfig
    seed: int
    stop_ids: tuple[int, ...]
    max_len: int
    max_episodes: int


class DecodeSession:
    """Samples turns on one rank of a replica; all ranks call it with the same turns."""

    def __init__(self, pipeline: Pipeline, options: SessionOptions) -> None:
        self.pipeline, self.model, self.options = pipeline, pipeline.model, options
        n_slots = min(options.config.max_num_seqs, options.max_episodes)
        self.device = self.model.device
        # with several stages, all would have to decide alike
        together = self.model.decodes_tokens_together and pipeline.stage == 0 and pipeline.is_last
        self.table = SessionTable(n_slots, options.max_episodes, options.stop_ids, together)
        self._decoder: DeviceDecoder | None = None
        sizes = (n_slots + options.max_episodes, options.max_len)
        # steps on the device go on for ended rows, whose states would change
        if decodes_on_device(self.model) and not self.model.config.delta_layers:
            self._decoder = DeviceDecoder(self.model, *sizes)
        self.cache = (
            self._decoder.cache if self._decoder else self.model.new_cache(*sizes, bf16=options.config.has_bf16_cache)
        )
        self.stop_tokens = on_device(torch.tensor(options.stop_ids, dtype=torch.int64), self.device)

    def step(self, inputs: Sequence[TurnInput], closed: Sequence[tuple[int, int]]) -> list[TurnOutput]:
        """Take new turns, and make one pass: compute the tokens of admitted turns, or one token per live row."""
        self.table.release(closed)
        self.table.submit(inputs)
        admitted, moves = self.table.admit()
        self.cache.copy_slots(moves)
        if admitted:
            self._record(self._admit(admitted))
        elif self.table.n_live == 0:
            return []
        elif (several := self._several_steps()) is not None:
            for step in several:
                self._record(step[:, step[0] != SKIPPED], np.flatnonzero((step[0] != SKIPPED).numpy()))
        else:
            self._record(self._decode())
        outputs, moves = self.table.finish()
        self.cache.copy_slots(moves)
        return outputs

    def _record(self, sampled: Tensor, indices: np.ndarray | None = None) -> None:
        """Record a pass: ``sampled`` is ``[3, n]`` float64 on the host: tokens and two log-probabilities."""
        tokens, *logprobs = sampled.numpy()
        if len(tokens) and tokens.min() == NO_TOKEN:
            key, position = self.table.where(int(tokens.argmin()), indices)
            raise nonfinite_turn(self.model, key, position)
        self.table.record(tokens.astype(np.int64), np.stack(logprobs), indices)

    def _admit(self, admitted: Sequence[Admission]) -> Tensor:
        """Compute the new tokens of turns, one row at a time; equal first turns once."""
        ends = []
        for _, some in groupby(admitted, key=lambda one: (one.start, one.tokens) if one.start == 0 else id(one)):
            first, *others = some
            hidden = self._through(partial(self._extend, first), len(first.tokens))
            moves = [(first.slot, one.slot, 0, len(first.tokens)) for one in others]
            self.cache.copy_slots(moves)
            ends += [hidden[-1:]] * (1 + len(others))
        counters = self._on_device(self.table.counters(len(admitted)))
        return self._sample(torch.cat(ends) if self.model.is_last else None, self.options.seed, counters)

    def _extend(self, one: Admission, x: Tensor | None) -> Tensor:
        tokens = on_device(torch.tensor(one.tokens), self.device)
        if one.start == 0:
            return self.model.hidden(tokens, [len(tokens)], self.cache, [one.slot], x)
        return self.model.extend(tokens, one.start, one.slot, self.cache, x)

    def _decode(self) -> Tensor:
        inputs, longest = self._on_device(self.table.state[:5]), self.table.longest
        if (step := self.table.tokens_of_step()) is not None:
            (tokens, positions, slots), ends = map(self._on_device, step)
            hidden = self.model.decode(tokens, positions, self.cache, longest=longest, slots=slots)[ends]
            return self._sample(hidden, self.options.seed, inputs[2:])

        def compute(x: Tensor | None) -> Tensor:
            return self.model.decode(inputs[0], inputs[1], self.cache, x, None, longest)

        hidden = self._through(compute, self.table.n_live)
        return self._sample(hidden if self.model.is_last else None, self.options.seed, inputs[2:])

    def _several_steps(self) -> Tensor | None:
        """Make up to ``STEPS_PER_WAIT`` steps, ``[k, 3, n]``; None where single steps are used."""
        if self._decoder is not None:
            return self._decode_on_device(self._decoder)
        steps, table = self.model.fused_steps, self.table
        if steps is None or not steps.are_short or table.tokens_of_step() is not None:
            return None
        rule = replace(self.options.config, min_new_tokens=0)
        n_steps = min(STEPS_PER_WAIT, table.most_steps)
        return steps.run(self._on_device(table.state), self.cache, None, table.longest, n_steps, rule,
                         self.options.seed, self.stop_tokens)  # fmt: skip

    def _decode_on_device(self, decoder: DeviceDecoder) -> Tensor:
        """Make up to ``STEPS_PER_WAIT`` steps, ``[k, 3, n]``."""
        table = self.table.state.copy()
        table[2] ^= mix_seed(self.options.seed)
        config = self.options.config
        key = ("session", config.greedy, config.temperature, config.top_k, config.top_p)

        def step(inputs: Tensor, longest: int, _: object) -> tuple[Tensor, ...]:
            last, positions, *counters = inputs
            return self._sample_tokens(self.model.decode(last, positions, self.cache, longest=longest), 0, counters)

        n_steps = min(STEPS_PER_WAIT, self.table.most_steps)
        return decoder.run(step, table, self.stop_tokens, key, n_steps).cpu()

    def _through(self, compute: Callable[[Tensor | None], Tensor], n_tokens: int) -> Tensor:
        """Compute this stage's part of a pass."""
        pipeline = self.pipeline
        x = None
        if pipeline.stage:
            x = pipeline.receive_rows(n_tokens, pipeline.ranks[pipeline.stage - 1])
        hidden = compute(x)
        if not pipeline.is_last:
            pipeline.p2p.send(hidden, pipeline.ranks[pipeline.stage + 1])
            pipeline.p2p.flush()
        return hidden

    def _sample(self, hidden: Tensor | None, seed: int, counters: Tensor) -> Tensor:
        """Sample on the last stage, and return its result on all, ``[3, n]`` float64 on the host."""
        sampled = torch.empty(3, counters.shape[1], dtype=torch.float64, device=self.device)
        if hidden is not None:
            sampled = torch.stack([x.double() for x in self._sample_tokens(hidden, seed, list(counters))])
        return self.pipeline.from_last(sampled).cpu()

    def _sample_tokens(self, hidden: Tensor, seed: int, counters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        config = self.options.config
        temperature = 0.0 if config.greedy else config.temperature
        numbers = uniform(seed, *counters)
        return sample(self.model.logits(hidden), numbers, temperature=temperature, top_k=config.top_k,
                      top_p=config.top_p)  # fmt: skip

    def _on_device(self, array: np.ndarray) -> Tensor:
        return on_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)


def run_turns(pipeline: Pipeline, options: SessionOptions, make_driver: Callable[[], TurnDriver]) -> bytes:
    """Sample turns until the driver, which runs on the replica's first rank, ends the rollout; return its result."""
    context = pipeline.context
    tp, pp = context.group("tp"), context.group("pp")
    is_driver = pipeline.stage == 0 and tp.index == 0

    def share(data: bytes) -> bytes:
        if pipeline.stage == 0:
            data = broadcast_bytes(tp, data, tp.ranks.index(min(tp.ranks)), context.device)
        return broadcast_bytes(pp, data, 0, context.device)

    driver = make_driver() if is_driver else None
    alone = tp.size == pp.size == 1
    outputs: list[TurnOutput] = []
    with torch.no_grad(), pipeline.model.decoding(options.config.weight_dtype):
        session = DecodeSession(pipeline, options)
        while True:
            request = driver.next(outputs, session.table.is_idle) if driver else TurnRequest()
            if not alone:
                request = msgspec.msgpack.decode(share(msgspec.msgpack.encode(request)), type=TurnRequest)
            if request.done:
                break
            outputs = session.step(request.inputs, request.closed)
    return share(driver.result() if driver else b"")


def broadcast_bytes(group: Group, data: bytes, index: int, device: torch.device) -> bytes:
    """Return the bytes of member ``index``. Collective."""
    if group.size == 1:
        return data
    size = int(group.broadcast(torch.tensor([len(data)], device=device), index))
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    if len(data) == size and size:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return bytes(group.broadcast(buffer, index).cpu().numpy()) if size else b""


def session_options(
    config: GenerationConfig, seed: int, stop_ids: Sequence[int], max_len: int, max_episodes: int, max_num_seqs: int
) -> SessionOptions:
    stops = tuple(dict.fromkeys((*stop_ids, *config.stop_token_ids)))
    return SessionOptions(replace(config, max_num_seqs=max_num_seqs), seed, stops, max_len, max_episodes)
