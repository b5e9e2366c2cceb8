"""One group of rows that is being generated, on one stage: its slots, their cache, and what a turn computes."""

from collections import deque

import torch
from torch import Tensor

from realhf.models.engine.decode.cuda_graphs import GraphedSteps, has_graphs
from realhf.models.engine.decode.scheduler import Request, SlotTable
from realhf.models.transformer import Transformer
from realhf.ops.sampling import sample, uniform


class DecodeGroup:
    """Computes the turns of a group. The last stage alone keeps ``logprobs``, those of sampling beside, by turn."""

    def __init__(self, model: Transformer, request: Request, queue: deque[int], n_slots: int) -> None:
        self.model, self.request = model, request
        self.cache = model.new_cache(n_slots, request.longest)
        self.slots = SlotTable(request, queue, n_slots, request.share and model.reads_prefixes)
        self.logprobs: list[tuple[Tensor, Tensor]] = []
        self.graphs: GraphedSteps | None = None
        if has_graphs(model):
            self.graphs = GraphedSteps(self._whole_step, n_slots, request.longest, model.params.data.device)

    @property
    def has_ended(self) -> bool:
        return self.slots.n_live == 0

    @property
    def n_computed(self) -> int:
        """Tokens that pass the stages in this turn."""
        prefill = self.slots.prefill
        return sum(self.request.lengths[p] for p in prefill.prompts) if prefill else self.slots.n_live

    def forward(self, x: Tensor | None) -> Tensor:
        """Compute this stage's part of a turn: hidden states for the next one, or the tokens that the last one draws.

        ``x`` is what the stage before returned, ``[n_computed, D]``.
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
        tokens, *drawn_with = self._draw(hidden, *slots.counters)
        self.logprobs.append((drawn_with[0], drawn_with[1]))
        return tokens

    def _whole_step(self, inputs: Tensor, longest: int) -> Tensor:
        """Compute a decoding step of a whole model, as ``models/engine/decode/cuda_graphs.py`` wants it; float64 holds every token."""
        last, positions, *counters = inputs
        hidden = self.model.decode(last, positions, self.cache, longest=longest)
        return torch.stack([drawn.double() for drawn in self._draw(hidden, *counters)])

    def _prefill(self, x: Tensor | None) -> Tensor:
        """Compute each prompt once and share its cache; the last stage goes on with what fresh rows end in."""
        prefill, request = self.slots.prefill, self.request
        assert prefill is not None
        lengths = [request.lengths[prompt] for prompt in prefill.prompts]
        tokens = torch.cat([request.texts[prompt] for prompt in prefill.prompts])
        hidden = self.model.hidden(tokens, lengths, self.cache, prefill.slots, x)
        for first, others, length in prefill.copies:
            self.cache.copy_prefix(first, others, length)
        return hidden[torch.tensor(prefill.ends, device=hidden.device)] if self.model.is_last else hidden

    def _draw(self, hidden: Tensor, prompts: Tensor, samples: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the next tokens, with their log-probabilities; all tensor-parallel ranks draw the same."""
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
        """Take the tokens that the turn drew, on whichever stage, and make ready for the next turn."""
        for move in self.slots.record(tokens):
            self.cache.copy_slot(move.src, move.dst, move.start, move.stop)
