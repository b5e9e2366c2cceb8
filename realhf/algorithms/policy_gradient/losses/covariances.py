"""The tokens whose log-probability and advantage covary most, which reduce the entropy (arXiv 2505.22617, sec. 4).

Covariances are those of the whole batch under the policy before the first optimizer step, so the selection does not
depend on mini-batches, micro-batches or layout. The paper computes them in each mini-batch under the current policy.
"""

import struct

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Engine
from realhf.ops.rows import RowLayout, masked_sums, on_device
from realhf.ops.sampling import uniform

SEED = 0xC0F
BITS, ROUNDS = 8, 4
"""``kth_largest`` finds the 32 bits of a float in rounds of 8."""


def select_tokens(
    engine: Engine, batch: SequenceBatch, logprobs: Tensor, advantages: Tensor, mask: Tensor, config: PPOConfig
) -> Tensor | None:
    """Return the tokens that ``ppo.policy_loss`` treats apart, ``[T]`` bool; None for other losses. Collective.

    clip_cov: tokens with covariances in [low, high], each with the probability that makes their expected number
    ``share`` of all tokens; the draw depends on (seed, prompt, sample, position). kl_cov: the ``share`` of all tokens
    with the highest covariances. Columns are ``[T]``; only tokens in ``mask`` count.
    """
    name = config.policy_loss.value
    if name not in ("clip_cov", "kl_cov"):
        return None
    covariances = covariances_of(engine, logprobs, advantages, mask)
    options = vars(config.losses)[name]
    n_tokens = float(engine.reduce(mask.sum().double().reshape(1)))
    if name == "kl_cov":
        threshold = kth_largest(engine, covariances, mask, int(options.share * n_tokens))
        return mask & (covariances >= threshold)
    is_candidate = mask & (covariances >= options.low) & (covariances <= options.high)
    n_candidates = float(engine.reduce(is_candidate.sum().double().reshape(1)))
    return is_candidate & (draws(engine, batch) < options.share * n_tokens / max(n_candidates, 1.0))


def covariances_of(engine: Engine, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return ``(log p - mean log p) (A - mean A)`` with means over the tokens in ``mask`` of all ranks, ``[T]``."""
    totals = engine.reduce(torch.stack([masked_sums(x, mask) for x in (logprobs, advantages)]))
    means = totals[:, 0] / totals[:, 2].clamp(min=1.0)
    return ((logprobs.double() - means[0]) * (advantages.double() - means[1])).float()


def draws(engine: Engine, batch: SequenceBatch) -> Tensor:
    """Return a number in [0, 1) for each token, by version of the weights, prompt, sample and position, ``[T]``."""
    layout = RowLayout(batch.lengths("tokens"), (), batch["tokens"].device)
    ids = [[row.prompt for row in batch.ids], [row.sample for row in batch.ids]]
    prompts, samples = on_device(torch.tensor(ids, dtype=torch.int64), layout.device)[:, layout.rows]
    return uniform(SEED + engine.version, prompts, samples, layout.positions)


def kth_largest(engine: Engine, values: Tensor, mask: Tensor, k: int) -> float:
    """Return the ``k``-th largest of the values in ``mask`` of all ranks, inf for 0. Collective.

    Finds the bits of the value from the top: the counts of each next byte are summed over ranks, so every rank learns
    the exact value from a few small messages. Values are float32 without NaN, ``[T]``.
    """
    bits = values.masked_fill(values == 0, 0.0).view(torch.int32).long() & 0xFFFFFFFF  # -0 equals 0
    keys = torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31))[mask]  # in the order of the values
    prefix, left = 0, k
    for number in range(ROUNDS):
        shift = 32 - BITS * (number + 1)
        counts = torch.bincount((keys >> shift) & 0xFF, minlength=1 << BITS)
        totals = engine.reduce(counts.double()).long().flip(0).cumsum(0).tolist()
        if number == 0 and not 0 < k <= totals[-1]:
            return float("inf") if k <= 0 else float("-inf")
        place = next(i for i, total in enumerate(totals) if total >= left)
        byte, left = (1 << BITS) - 1 - place, left - (totals[place - 1] if place else 0)
        prefix = prefix << BITS | byte
        keys = keys[keys >> shift == prefix]
    raw = prefix - (1 << 31) if prefix >= 1 << 31 else 0xFFFFFFFF - prefix
    (value,) = struct.unpack("<f", struct.pack("<I", raw))
    return float(value)
