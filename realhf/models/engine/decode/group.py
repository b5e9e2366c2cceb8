"""A group of rows in generation on one stage: its slots, their cache and the computation of a turn."""

from collections import deque
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from realhf.models.engine.decode.cuda_graphs import (
    SKIPPED,
    STEPS_PER_WAIT,
    DeviceDecoder,
    KeptDecoder,
    decodes_on_device,
)
from realhf.models.engine.decode.lookup import PromptLookup, Proposal
from realhf.models.engine.decode.scheduler import Request, SlotTable
from realhf.models.engine.nonfinite import nonfinite_logits
from realhf.models.fused.fused_steps import FusedSteps
from realhf.models.transformer import Transformer
from realhf.ops.cascade import SharedPrefixes
from realhf.ops.rows import on_device
from realhf.ops.sampling import NO_TOKEN, mix_seed, sample, uniform

MIN_SAVED_BYTES = 1 << 26
"""Bytes of a layer that sharing must save in a step on a GPU: 20 us of its memory, the time of the added kernels."""


class DecodeGroup:
    """Computes the turns of a group. Only the last stage has ``logprobs``: pairs, with sampling ones, by turn.

    ``experts`` are rows that have ended, how many of their tokens were computed, and the experts of these,
    ``[n, L, k]``, by turn.

    A whole model on a GPU makes up to ``steps_per_wait`` decoding steps per turn, between which the host does not read
    tokens. Its cache is taken from ``kept``, and returned by ``close``.
    """

    def __init__(
        self,
        model: Transformer,
        request: Request,
        queue: deque[int],
        n_slots: int,
        kept: KeptDecoder | None = None,
        steps_per_wait: int = STEPS_PER_WAIT,
    ) -> None:
        self.model, self.request, self.steps_per_wait = model, request, steps_per_wait
        self._kept = kept or KeptDecoder()
        self._decoder: DeviceDecoder | None = None
        if decodes_on_device(model):
            self._decoder = self._kept.take(model, n_slots, request.max_row_len, request.records_experts)
        sizes, bf16 = (n_slots, request.max_row_len, request.records_experts), request.config.has_bf16_cache
        self.cache = self._decoder.cache if self._decoder else model.new_cache(*sizes, bf16)
        copies_prefixes = not model.config.delta_layers  # of the model: all stages have the same plan
        self.slots = SlotTable(request, queue, n_slots, self._shares_prefixes(), copies_prefixes)
        self._lookup = self._new_lookup()
        self.logprobs: list[tuple[Tensor, Tensor]] = []
        self.experts: list[tuple[np.ndarray, np.ndarray, Tensor]] = []

    def _shares_prefixes(self) -> bool:
        """Return True if rows read their prompts in one slot; on GPUs only where this saves more than it costs."""
        request, cache = self.request, self.cache
        if not request.share_prefixes or not self.model.supports_shared_prefixes:
            return False
        mean_length = sum(request.lengths) / len(request.lengths)
        saved = cache.bytes_per_token * mean_length * cache.n_slots * (1 - 1 / request.n)
        return not cache.by_token or saved >= MIN_SAVED_BYTES

    def _new_lookup(self) -> PromptLookup | None:
        """Return what proposes tokens, if it is asked for and a step can take several tokens of a row."""
        most, model = self.request.config.prompt_lookup_num_tokens, self.model
        # recurrent states behind a wrong token cannot be taken back
        is_able = model.is_first and model.is_last and model.decodes_tokens_together and not model.config.delta_layers
        return PromptLookup(most) if most and is_able else None

    def close(self) -> None:
        """Return the cache, after the last turn."""
        if self._decoder is not None:
            self._kept.give(self._decoder)

    @property
    def is_finished(self) -> bool:
        return self.slots.n_live == 0

    @property
    def n_tokens(self) -> int:
        """The number of tokens that this turn computes."""
        prefill = self.slots.prefill
        return sum(self.request.lengths[p] for p in prefill.prompts) if prefill else self.slots.n_live

    def forward(self, x: Tensor | None) -> Tensor:
        """Compute this stage's part of a turn: hidden states for the next stage, or on the last one sampled tokens.

        ``x`` is the previous stage's output, ``[n_tokens, D]``. Several steps return ``[k, 3, S]``: tokens and
        log-probabilities.
        """
        slots = self.slots
        if slots.prefill is None and self._decoder is not None:
            n_steps = min(self.steps_per_wait, slots.most_steps)
            table, options = slots.state(self._seed_mask), self._step_options
            groups = slots.prefix_groups(self._decoder.size_for(slots.n_live))
            return self._decoder.run(self._sample_step, table, self.request.stop_tokens, options, n_steps, groups)
        if slots.prefill is None and self._lookup is not None:
            proposal = self._lookup.propose(slots.rows.tolist(), slots.last.tolist(), slots.room.tolist())
            if proposal is not None:
                return self._verify(proposal)
        if slots.prefill is None and self._lookup is None and self.cache.experts is None and self.model.fused_steps:
            return self._decode_steps(self.model.fused_steps)
        if slots.prefill is None:
            inputs = slots.inputs
            hidden = self.model.decode(inputs[0], inputs[1], self.cache, x, self._prefixes(), slots.longest)
        else:
            hidden = self._prefill(x)
        if not self.model.is_last:
            return hidden
        tokens, *logprobs = self._sample(hidden, self.request.seed, *slots.counters)
        self.logprobs.append((logprobs[0], logprobs[1]))
        return tokens

    def _decode_steps(self, steps: FusedSteps) -> Tensor:
        """Make several steps of a whole model on a CPU, ``[k, 3, S]``."""
        slots, request = self.slots, self.request
        state, n_steps = torch.from_numpy(slots.state(0)), min(self.steps_per_wait, slots.most_steps)
        return steps.run(state, self.cache, slots.prefixes, slots.longest, n_steps, request.config, request.seed,
                         request.stop_tokens)  # fmt: skip

    def _verify(self, proposal: Proposal) -> Tensor:
        """Compute proposed tokens and return those that are kept, as several steps: ``[k, 3, S]``."""
        slots, rows = self.slots, proposal.rows
        self.cache.copy_slots(slots.own_prompts())
        _, positions, prompts, samples, counts = torch.from_numpy(slots.inputs.numpy()[:, rows])
        offsets = torch.from_numpy(proposal.offsets)
        positions, index = positions + offsets, torch.from_numpy(rows)
        tokens, longest = torch.from_numpy(proposal.tokens), int(positions.max()) + 1
        hidden = self.model.decode(tokens, positions, self.cache, longest=longest, slots=index)
        drawn = self._sample(hidden, self.request.seed, prompts, samples, counts + offsets)
        sampled = torch.stack([x.double() for x in drawn])
        n_kept = proposal.n_kept(sampled[0].numpy().astype(np.int64), self.request.stop_ids)
        steps = torch.full((int(n_kept.max()), 3, slots.n_live), float(SKIPPED), dtype=torch.float64)
        kept = np.flatnonzero(proposal.offsets < n_kept[rows])
        steps[proposal.offsets[kept], :, rows[kept]] = sampled[:, kept].T
        return steps

    @cached_property
    def _seed_mask(self) -> int:
        """Makes prompt numbers depend on the seed, which is a constant of a captured step."""
        return mix_seed(self.request.seed)

    @cached_property
    def _step_options(self) -> tuple[object, ...]:
        config = self.request.config
        return (config.greedy, config.temperature, config.top_k, config.top_p, config.min_new_tokens,
                self.request.stop_ids)  # fmt: skip

    def _prefixes(self) -> Tensor | SharedPrefixes | None:
        if not self.cache.by_token:
            return self.slots.prefixes
        groups = self.slots.prefix_groups(self.slots.n_live)
        if groups is None:
            return None
        return SharedPrefixes.of(on_device(torch.from_numpy(groups.packed), self.cache.k.device), groups.sizes)

    def _sample_step(self, inputs: Tensor, longest: int, shared: SharedPrefixes | None) -> tuple[Tensor, ...]:
        """Compute a decoding step of a whole model."""
        last, positions, *counters = inputs
        hidden = self.model.decode(last, positions, self.cache, None, shared, longest)
        return self._sample(hidden, 0, *counters)

    def _prefill(self, x: Tensor | None) -> Tensor:
        """Compute each prompt once and share its cache; the last stage returns hidden states at the prompts' ends."""
        prefill, request = self.slots.prefill, self.request
        assert prefill is not None
        lengths = [request.lengths[prompt] for prompt in prefill.prompts]
        tokens = torch.cat([request.prompt_tensors[prompt] for prompt in prefill.prompts])
        hidden = self.model.hidden(tokens, lengths, self.cache, prefill.slots, x)
        self.cache.copy_slots([(src, dst, 0, length) for src, others, length in prefill.copies for dst in others])
        return hidden[on_device(torch.tensor(prefill.ends), hidden.device)] if self.model.is_last else hidden

    def _sample(
        self, hidden: Tensor, seed: int, prompts: Tensor, samples: Tensor, counts: Tensor
    ) -> tuple[Tensor, ...]:
        """Sample the next tokens, with log-probabilities; the result is the same on all tensor-parallel ranks."""
        config = self.request.config
        early = counts < config.min_new_tokens if config.min_new_tokens else None
        return sample(
            self.model.logits(hidden),
            uniform(seed, prompts, samples, counts),
            temperature=0.0 if config.greedy else config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            forbid=self.request.stop_tokens if early is not None else None,
            forbid_rows=early,
        )

    def advance(self, sampled: Tensor) -> None:
        """Record the tokens sampled in this turn and update the cache for the next one, on every stage.

        Raises ValueError for a row whose logits were not finite.
        """
        host = sampled.cpu()
        if host.dim() == 1:
            self._append(host)
        else:
            self._append_steps(host)
        if self.cache.experts is not None:
            rows, counts, where = self.slots.finished_tokens()
            slots, positions = on_device(torch.from_numpy(where), self.cache.k.device)
            self.experts.append((rows, counts, self.cache.experts.read(slots, positions)))
        if self._lookup is not None:
            self._lookup.end(self.slots.finished_rows())
        self.cache.copy_slots(self.slots.end_turn())

    def _append(self, tokens: Tensor) -> None:
        if len(tokens) and int(tokens.min()) == NO_TOKEN:
            raise nonfinite_logits(self.model, self.request, *self.slots.history(int(tokens.argmin())))
        self._tell_lookup(tokens)
        self.slots.append(tokens)

    def _append_steps(self, steps: Tensor) -> None:
        """Record several steps of all rows, ``[k, 3, S]``."""
        tokens = steps[:, 0].long()
        is_new = tokens != SKIPPED
        if (is_wrong := tokens == NO_TOKEN).any():
            step, index = is_wrong.nonzero()[0].tolist()
            row, before = self.slots.history(index)
            raise nonfinite_logits(self.model, self.request, row, [*before, *tokens[:step, index].tolist()])
        for own, step in zip(is_new, tokens, strict=True) if self._lookup is not None else ():
            self._tell_lookup(step[own], own.numpy().nonzero()[0])
        self.slots.append_steps(tokens, is_new)
        self.logprobs.append((steps[:, 1][is_new].float(), steps[:, 2][is_new].float()))

    def _tell_lookup(self, tokens: Tensor, indices: np.ndarray | None = None) -> None:
        if self._lookup is None:
            return
        slots, request = self.slots, self.request
        rows = slots.rows[slots.sampling(indices)]
        if slots.prefill is not None:
            for row in rows.tolist():
                self._lookup.begin(row, request.prompt_tokens[row // request.n])
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._lookup.append(row, token)
