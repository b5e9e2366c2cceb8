"""Sampling with a key/value cache in slots: finished rows leave at once, live rows stay dense, free slots are refilled.

A group's prompt is computed once and its cache copied to the group's other slots. What is drawn depends on
(seed, prompt, sample, position) alone, so neither slots nor placement change a row.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realhf.api.batch import RowId
from realhf.api.config import GenerationConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.engine.pipeline import Pipeline
from realhf.ops.sampling import sample, uniform


@dataclass
class _Drawn:
    """Tokens in the order of drawing; sorted by row once at the end."""

    rows: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    sampling_logprobs: list[Tensor] = field(default_factory=list)


class _Decoding:
    """The state of one generation call: which row sits in which slot, and what it drew last."""

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: SequenceBatch,
        config: GenerationConfig,
        n: int,
        seed: int,
        stops: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.pipeline, self.model, self.prompts, self.config = pipeline, pipeline.model, prompts, config
        self.seed, self.device = seed, device
        self.n = n
        self.stops = torch.tensor(stops, dtype=torch.int64, device=device)
        lengths = prompts.lengths("prompts")
        self.prompt_rows = prompts.columns["prompts"].rows()
        self.prompt_lengths = torch.tensor(lengths, device=device)
        self.row_prompts = torch.tensor([i.prompt for i in prompts.ids], device=device).repeat_interleave(n)
        self.queue = deque(range(len(prompts) * n))
        longest = max(lengths) + config.max_new_tokens
        if longest > (reach := self.model.config.max_positions):
            raise ValueError(f"prompt and answer may reach {longest} tokens, the model has {reach}"
                             " positions; lower max_new_tokens or max_prompt_len")  # fmt: skip
        self.n_slots = min(config.max_slots, len(self.queue))
        self.cache = self.model.new_cache(self.n_slots, longest)
        self.rows = torch.empty(0, dtype=torch.int64, device=device)  # row in each live slot
        self.last = self.rows.clone()  # its last token, not yet in the cache
        self.drawn = _Drawn()
        self.truncated = torch.zeros(len(prompts) * n, dtype=torch.uint8)
        self.counts = torch.zeros(len(prompts) * n, dtype=torch.int64, device=device)  # tokens drawn per row

    def run(self) -> None:
        while self.queue or self.rows.numel():
            free = self.n_slots - self.rows.numel()
            if self.queue and (free * 8 >= self.n_slots or free >= len(self.queue)):
                self._admit(free)
            elif self.rows.numel():
                positions = self.prompt_lengths[self.rows // self.n] + self.counts[self.rows] - 1
                last, live = self.last, len(self.rows)

                def step(x: Tensor | None, last: Tensor = last, positions: Tensor = positions) -> Tensor:
                    return self.model.decode(last, positions, self.cache, x)

                self._draw(self.rows, self.pipeline.relay(step, live))

    def _admit(self, free: int) -> None:
        """Compute the prompts of the next rows and draw their first tokens."""
        live = self.rows.numel()
        fresh = [self.queue.popleft() for _ in range(min(free, len(self.queue)))]
        first_slot: dict[int, int] = {}
        copies: dict[int, list[int]] = {}
        for slot, row in enumerate(fresh, start=live):
            prompt = row // self.n
            if prompt in first_slot:
                copies.setdefault(prompt, []).append(slot)
            else:
                first_slot[prompt] = slot
        order = sorted(first_slot, key=lambda p: (self.prompt_rows[p].numel(), p))
        lengths = [self.prompt_rows[p].numel() for p in order]
        tokens = torch.cat([self.prompt_rows[p] for p in order])
        slots = [first_slot[p] for p in order]
        hidden = self.pipeline.relay(lambda x: self.model.hidden(tokens, lengths, self.cache, slots, x), len(tokens))
        for prompt, slots in copies.items():
            self.cache.copy_prefix(first_slot[prompt], slots, self.prompt_rows[prompt].numel())
        ends = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        at = {p: i for i, p in enumerate(order)}
        pick = torch.tensor([at[row // self.n] for row in fresh], device=self.device)
        rows = torch.tensor(fresh, device=self.device)
        self.rows = torch.cat([self.rows, rows])
        self.last = torch.cat([self.last, torch.zeros_like(rows)])
        self._draw(rows, hidden.index_select(0, ends).index_select(0, pick))

    def _draw(self, rows: Tensor, hidden: Tensor) -> None:
        """Sample the next token of ``rows``, which sit in the last ``len(rows)`` live slots."""
        counts = self.counts[rows]
        tokens, logprobs, sampling = self._sample(rows, counts, hidden)
        self.drawn.rows.append(rows)
        self.drawn.tokens.append(tokens)
        self.drawn.logprobs.append(logprobs)
        self.drawn.sampling_logprobs.append(sampling)
        self.counts[rows] = counts + 1
        self.last[self.last.numel() - tokens.numel() :] = tokens
        stopped = torch.isin(tokens, self.stops)
        ended = stopped | (counts + 1 >= self.config.max_new_tokens)
        if bool(ended.any()):
            self.truncated[rows[ended & ~stopped].cpu()] = 1
            self._leave((ended.nonzero().flatten() + (self.rows.numel() - rows.numel())).tolist())

    def _sample(self, rows: Tensor, counts: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw on the last stage, whose every tensor-parallel rank draws the same, and tell the other stages."""
        config = self.config
        drawn = (torch.empty_like(rows), *(torch.empty(len(rows), device=self.device) for _ in range(2)))
        if self.pipeline.is_last:
            u = uniform(self.seed, self.row_prompts[rows], rows % self.n, counts)
            early = counts < config.min_new_tokens if config.min_new_tokens else None
            drawn = sample(
                self.model.logits(hidden),
                u,
                temperature=0.0 if config.greedy else config.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                forbid=self.stops if early is not None else None,
                forbid_rows=early,
            )
        tokens, logprobs, sampling = (self.pipeline.from_last(part) for part in drawn)
        return tokens, logprobs, sampling

    def _leave(self, slots: list[int]) -> None:
        """Free slots and move the last live rows into the holes."""
        live = self.rows.numel()
        keep = live - len(slots)
        gone = set(slots)
        movers = [s for s in range(keep, live) if s not in gone]
        places = list(range(keep))
        for hole, mover in zip([s for s in slots if s < keep], movers, strict=True):
            row = int(self.rows[mover])
            self.cache.copy_slot(mover, hole, int(self.prompt_lengths[row // self.n] + self.counts[row]) - 1)
            places[hole] = mover
        index = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.rows, self.last = self.rows[index], self.last[index]  # new tensors: the old ones are on record

    def result(self) -> SequenceBatch:
        order = torch.cat(self.drawn.rows).argsort(stable=True)
        lengths = tuple(self.counts.tolist())
        answers = [torch.cat(part)[order].split(lengths) for part in
                   (self.drawn.tokens, self.drawn.logprobs, self.drawn.sampling_logprobs)]  # fmt: skip
        prompts = [self.prompt_rows[row // self.n] for row in range(len(lengths))]
        blanks = [torch.zeros(p.numel(), device=self.device) for p in self.prompt_rows]
        ones = [torch.ones(p.numel(), dtype=torch.uint8, device=self.device) for p in self.prompt_rows]
        zeros = [torch.zeros(count, dtype=torch.uint8, device=self.device) for count in lengths]
        total = tuple(p.numel() + count for p, count in zip(prompts, lengths, strict=True))

        def interleave(head: list[Tensor], tail: tuple[Tensor, ...] | list[Tensor]) -> Column:
            return Column(torch.cat([part for pair in zip(head, tail, strict=True) for part in pair]), total)

        shared = [row // self.n for row in range(len(lengths))]
        columns = {
            "tokens": interleave(prompts, answers[0]),
            "prompt_mask": interleave([ones[i] for i in shared], zeros),
            "logprobs": interleave([blanks[i] for i in shared], answers[1]),
            "sampling_logprobs": interleave([blanks[i] for i in shared], answers[2]),
            "truncated": Column.scalars(self.truncated.to(self.device)),
        }
        ids = tuple(RowId(p.prompt, s) for p in self.prompts.ids for s in range(self.n))
        return SequenceBatch(ids, columns)


def generate(
    pipeline: Pipeline,
    prompts: SequenceBatch,
    config: GenerationConfig,
    n: int,
    seed: int,
    stops: tuple[int, ...],
    device: torch.device,
) -> SequenceBatch:
    """Sample ``n`` answers to every prompt; see ``Engine.generate`` for the columns. No prompts give no rows."""
    if not len(prompts):
        empty = {k: Column(torch.empty(0, dtype=t, device=device), ()) for k, t in COLUMNS.items()}
        return SequenceBatch((), empty)
    decoding = _Decoding(pipeline, prompts, config, n, seed, stops, device)
    decoding.run()
    return decoding.result()


COLUMNS = {
    "tokens": torch.int64,
    "prompt_mask": torch.uint8,
    "logprobs": torch.float32,
    "sampling_logprobs": torch.float32,
    "truncated": torch.uint8,
}
