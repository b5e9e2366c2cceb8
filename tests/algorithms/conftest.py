"""A fake engine with a bigram model, and ranks as threads."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from realhf.api.batch_meta import RowId
from realhf.data.batch import Column, SequenceBatch


class Table:
    """Outputs of a bigram model: token t is predicted from token t-1, the value of a state from its last token."""

    def __init__(self, logits, scores, batch):
        self.logits, self.scores, self.tokens, self.ends = (
            logits,
            scores,
            batch["tokens"],
            torch.tensor(batch.columns["tokens"].offsets),
        )

    def logprobs(self, temperature=1.0, mask=None):
        log_p = (self.logits / temperature).log_softmax(-1)[self.tokens.roll(1), self.tokens]
        return self.masked(log_p.index_fill(0, self.ends[:-1], 0.0), mask)

    @staticmethod
    def masked(found, mask):
        return found if mask is None else found.masked_fill((mask == 0).view(-1, *[1] * (found.ndim - 1)), 0.0)

    def distribution(self, ids, temperature=1.0, mask=None):
        log_p = (self.logits / temperature).log_softmax(-1)[self.tokens.roll(1)].index_fill(0, self.ends[:-1], 0.0)
        is_first = torch.zeros(len(self.tokens), dtype=torch.bool).index_fill(0, self.ends[:-1], True)
        entropies = -(log_p.exp() * log_p).sum(-1).masked_fill(is_first, 0.0)
        return self.masked(log_p.gather(1, ids), mask), self.masked(entropies, mask)

    def top_logprobs(self, k, vocab, temperature=1.0, mask=None):
        log_p = (self.logits / temperature).log_softmax(-1)[self.tokens.roll(1), :vocab]
        top, ids = log_p.topk(k)
        return self.masked(torch.cat((ids, top), 1).index_fill(0, self.ends[:-1], 0.0), mask)

    def values(self, mask=None):
        return self.masked(self.scores[self.tokens], mask)

    def last_values(self):
        return self.values()[self.ends[1:] - 1]


class TableEngine:
    """SGD with learning rate 1 on a table; a micro-batch has the rows of one prompt, in reverse order."""

    version, config = 0, SimpleNamespace(max_row_len=20)

    def __init__(self, vocab=7, all_sum=lambda x: x):
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64).requires_grad_()
        self.scores = torch.randn(vocab, generator=generator, dtype=torch.float64).requires_grad_()
        self.all_sum, self.calls, self.grads = all_sum, [], []

    def reduce(self, sums):
        return self.all_sum(sums.double())

    def forward(self, batch, fn):
        rows = [batch.select([i]) for i in range(len(batch))]
        parts = [fn(Table(self.logits.detach(), self.scores.detach(), row), row) for row in rows]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def train(self, batch, loss_fn, count, limits=None, together=False):
        self.calls.append((batch, count, together))
        stats, total = {}, 0.0 * (self.logits.sum() + self.scores.sum())
        for prompt in {row.prompt for row in batch.ids}:
            part = batch.select([i for i, row in enumerate(batch.ids) if row.prompt == prompt][::-1])
            loss = loss_fn(Table(self.logits, self.scores, part), part)
            total = total + loss.total
            for name, (x, n) in loss.stats.items():
                x0, n0 = stats.get(name, (0.0, 0.0))
                stats[name] = (x0 + float(x), n0 + float(n))
        means = [self.reduce(torch.tensor(stats.get(name, (0.0, 0.0)))) for name in limits or {}]
        step_skipped = any(x / max(n, 1) > limit for (x, n), limit in zip(means, (limits or {}).values(), strict=True))
        count = self.reduce(torch.tensor(count)).clamp(min=1.0)
        grads = torch.autograd.grad(total, (self.logits, self.scores))
        self.grads.append([self.reduce(g) / count for g in grads])
        for parameter, g in zip((self.logits, self.scores), self.grads[-1], strict=True):
            parameter.data -= 0.0 if step_skipped else g
        return {**stats, "step_skipped": (float(step_skipped), 1.0)}


def on_ranks(jobs: list[Callable]):
    """Run each ``job(engine)`` on its own rank, with reductions over all ranks; returns (engines, results)."""
    barrier, slots, results = threading.Barrier(len(jobs), timeout=20), [None] * len(jobs), [None] * len(jobs)

    def all_sum(rank, x):
        slots[rank] = x
        barrier.wait()
        total = sum(slots)
        barrier.wait()
        return total

    engines = [TableEngine(all_sum=lambda x, rank=rank: all_sum(rank, x)) for rank in range(len(jobs))]

    def run(rank):
        results[rank] = jobs[rank](engines[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return engines, results


def rollouts(n_prompts=4, n_samples=2, n_minibatches=2, seed=0):
    """A float64 training batch with responses of different lengths, some truncated."""
    g = torch.Generator().manual_seed(seed)
    ids = tuple(RowId(10 * p, s) for p in range(n_prompts) for s in range(n_samples))
    prompts = [1 + int(torch.randint(3, (), generator=g)) for _ in range(n_prompts) for _ in range(n_samples)]
    lengths = tuple(n + 1 + int(torch.randint(5, (), generator=g)) for n in prompts)
    mask = [(torch.arange(n) < p).byte() for n, p in zip(lengths, prompts, strict=True)]
    first = [(torch.arange(n) > 0).double() for n in lengths]

    def tokenwise(scale):
        return torch.randn(sum(lengths), generator=g, dtype=torch.float64) * scale

    columns = {
        "tokens": torch.randint(7, (sum(lengths),), generator=g),
        "prompt_mask": torch.cat(mask),
        "logprobs": (tokenwise(0.5) - 2) * torch.cat(first),
        "ref_logprobs": (tokenwise(0.5) - 2) * torch.cat(first),
        "values": tokenwise(1.0),
    }
    scalars = {
        "truncated": (torch.arange(len(ids)) % 3 == 0).byte(),
        "rewards": torch.randn(len(ids), generator=g, dtype=torch.float64) * 3,
        "minibatch": torch.arange(len(ids)) // n_samples % n_minibatches,
    }
    columns = {k: Column(v, lengths) for k, v in columns.items()}
    return SequenceBatch(ids, {**columns, **{k: Column.scalars(v) for k, v in scalars.items()}})


@pytest.fixture
def table_engine():
    return TableEngine


@pytest.fixture
def ranks():
    return on_ranks


@pytest.fixture
def make_rollouts():
    return rollouts
