"""A group of rows in generation on one stage: its slots, their cache and the computation of a turn."""

from collections import deque

import torch
from torch import Tensor

from realhf.models.engine.decode.cuda_graphs import CudaGraphRunner, supports_cuda_graphs
from realhf.models.engine.decode.scheduler import Request, SlotTable
from realhf.models.engine.nonfinite import nonfinite_logits
from realhf.models.transformer import Transformer
from realhf.ops.sampling import NO_TOKEN, sample, uniform


class DecodeGroup:
    """Computes the turns of a group. Only the last stage has ``logprobs``: pairs, with sampling ones, by turn."""

    def __init__(self, model: Transformer, request: Request, queue: deque[int], n_slots: int) -> None:
        self.model, self.request = model, request
        self.cache = model.new_cache(n_slots, request.max_row_len)
        shares_prefix = request.share_prefixes and model.supports_shared_prefixes
        self.slots = SlotTable(request, queue, n_slots, shares_prefix)
        self.logprobs: list[tuple[Tensor, Tensor]] = []
        self.graphs: CudaGraphRunner | None = None
        if supports_cuda_graphs(model):
            self.graphs = CudaGraphRunner(self._full_step, n_slots, request.max_row_len, model.params.data.device)

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

        ``x`` is the previous stage's output, ``[n_tokens, D]``.
        """
        slots = self.slots
        if slots.prefill is None and self.graphs is not None:
            tokens, *logprobs = self.graphs(slots.inputs, slots.longest)
            self.logprobs.append((logprobs[0].float(), logprobs[1].float()))
            return tokens.long()
        if slots.prefill is None:
            inputs = slots.inputs
            hidden = self.model.decode(inputs[0], inputs[1], self.cache, x, slots.prefixes, slots.longest)
        else:
            hidden = self._prefill(x)
        if not self.model.is_last:
            return hidden
        tokens, *logprobs = self._sample(hidden, *slots.counters)
        self.logprobs.append((logprobs[0], logprobs[1]))
        return tokens

    def _full_step(self, inputs: Tensor, longest: int) -> Tensor:
        """Compute a decoding step of a whole model in one tensor; float64 represents every token exactly."""
        last, positions, *counters = inputs
        hidden = self.model.decode(last, positions, self.cache, longest=longest)
        return torch.stack([output.double() for output in self._sample(hidden, *counters)])

    def _prefill(self, x: Tensor | None) -> Tensor:
        """Compute each prompt once and share its cache; the last stage returns hidden states at the prompts' ends."""
        prefill, request = self.slots.prefill, self.request
        assert prefill is not None
        lengths = [request.lengths[prompt] for prompt in prefill.prompts]
        tokens = torch.cat([request.prompt_tensors[prompt] for prompt in prefill.prompts])
        hidden = self.model.hidden(tokens, lengths, self.cache, prefill.slots, x)
        for first, others, length in prefill.copies:
            for slot in others:
                self.cache.copy_slot(first, slot, 0, length)
        return hidden[torch.tensor(prefill.ends, device=hidden.device)] if self.model.is_last else hidden

    def _sample(self, hidden: Tensor, prompts: Tensor, samples: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        """Sample the next tokens, with log-probabilities; the result is the same on all tensor-parallel ranks."""
        config = self.request.config
        early = counts < config.min_new_tokens if config.min_new_tokens else None
        return sample(
            self.model.logits(hidden),
            uniform(self.request.seed, prompts, samples, counts),
            temperature=0.0 if config.greedy else config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            forbid=self.request.stop_tokens if early is not None else None,
            forbid_rows=early,
        )

    def advance(self, tokens: Tensor) -> None:
        """Record the tokens sampled in this turn and update the cache for the next one, on every stage.

        Raises ValueError for a row whose logits were not finite.
        """
        sampled = tokens.cpu()
        if int(sampled.min()) == NO_TOKEN:
            raise nonfinite_logits(self.model, self.request, *self.slots.history(int(sampled.argmin())))
        for move in self.slots.record(sampled):
            self.cache.copy_slot(*move)
