"""Token sampling with counter-based randomness: a token depends only on (seed, prompt, sample, position)."""

import torch
from torch import Tensor

from realhf.ops import extension


def as_int64(x: int) -> int:
    """Return the lowest 64 bits as a two's complement integer."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


NO_TOKEN = -1
"""The sampled token of a row whose logits are not finite."""
_INCREMENT = as_int64(0x9E3779B97F4A7C15)
_FACTORS = (as_int64(0xBF58476D1CE4E5B9), as_int64(0x94D049BB133111EB))


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words."""
    x = (x ^ _logical_shift_right(x, 30)) * _FACTORS[0]
    x = (x ^ _logical_shift_right(x, 27)) * _FACTORS[1]
    return x ^ _logical_shift_right(x, 31)


def uniform(seed: int, prompts: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Return one number in [0, 1) per row, ``[S]`` float64 with 53 random bits, from int64 counters ``[S]``."""
    kernel = extension.kernel("counter_uniform", prompts.device.type)
    if kernel is None:
        return uniform_reference(seed, prompts, samples, positions)
    return kernel(as_int64(seed), prompts, samples, positions)


def mix_seed(seed: int) -> int:
    """Return a number x such that ``uniform(0, prompts ^ x, ...)`` equals ``uniform(seed, prompts, ...)``."""
    first, zero = _mix(torch.tensor([as_int64(seed + _INCREMENT), _INCREMENT])).tolist()
    return int(first ^ zero)


def uniform_reference(seed: int, prompts: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """The reference implementation of ``uniform``, with identical bits."""
    state = _mix(torch.full_like(prompts, as_int64(seed + _INCREMENT)))
    for counter in (prompts, samples, positions):
        state = _mix((state ^ counter) + _INCREMENT)
    return _logical_shift_right(state, 11).double() * 2.0**-53


def _top_k_ids(logits_SV: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest logits, descending, ``[S, k]``; ties go to the lowest id on every device."""
    bits = (logits_SV.float() + 0.0).contiguous().view(torch.int32).long()  # -0.0 + 0.0 is 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers that sort like the floats
    vocab = logits_SV.shape[-1]
    keys = (ordered << 32) + torch.arange(vocab - 1, -1, -1, device=logits_SV.device)
    return keys.topk(k).indices


def _candidates(logits_SV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """Return candidate logits (-inf: excluded) and their token ids, or None for the whole vocabulary in order."""
    if 0 < top_k < logits_SV.shape[-1]:
        ids = _top_k_ids(logits_SV, top_k)
        logits = logits_SV.gather(-1, ids)
    elif top_p < 1.0:
        logits, ids = logits_SV.sort(dim=-1, descending=True, stable=True)
    else:
        return logits_SV, None
    if top_p < 1.0:
        mass = logits.softmax(-1).double()
        logits = logits.masked_fill(mass.cumsum(-1) - mass >= top_p, float("-inf"))
    return logits, ids


def _inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Return the index ``[S]`` of the first candidate whose cumulative probability exceeds ``u``."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    target = u.double().unsqueeze(-1) * cdf[:, -1:]
    index = torch.searchsorted(cdf, target, right=True).clamp(max=probs.shape[-1] - 1)
    # u close to 1, or a parallel cumsum that is not monotone, can select a candidate of probability 0
    index = torch.where(probs.gather(-1, index) > 0, index, probs.argmax(-1, keepdim=True))
    return index.squeeze(-1)


def sample(
    logits: Tensor,
    u: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    forbid: Tensor | None = None,
    forbid_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row by inverse CDF; return (tokens int64, logprobs, sampling_logprobs), each ``[S]``.

    ``logits`` is ``[S, V]`` float32, ``u`` is ``[S]`` in [0, 1). Token ids ``forbid`` (``[n]``) are excluded in the
    rows of ``forbid_rows`` (``[S]`` bool; None: all). Of the rest, the ``top_k`` most likely tokens are kept (0: all),
    and of those the smallest prefix whose mass reaches ``top_p``. ``logprobs`` is log_softmax(logits / temperature),
    which training recomputes; ``sampling_logprobs`` is of the truncated distribution. Temperature 0 is greedy, with the
    lowest id on ties, ``logprobs`` of temperature 1 and ``sampling_logprobs`` 0. A row without a distribution gives
    ``NO_TOKEN`` and NaN: one of its tempered logits is NaN or inf, or every allowed one is -inf.

    The kernel does not sort. Its tokens equal those of ``sample_reference`` unless ``u`` is within rounding error of
    the boundary between two tokens. Raises ValueError for options out of range.
    """
    kernel = extension.kernel("sample_tokens", logits.device.type)
    if kernel is None:
        return sample_reference(logits, u, temperature, top_k, top_p, forbid, forbid_rows)
    _check_options(temperature, top_k, top_p)
    return kernel(logits.detach().float(), u.double(), forbid, forbid_rows, temperature, top_k, top_p)


def sample_reference(
    logits: Tensor,
    u: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    forbid: Tensor | None = None,
    forbid_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference implementation of ``sample``, which sorts."""
    _check_options(temperature, top_k, top_p)
    scaled = logits.float() / (temperature or 1.0)
    log_p = scaled.log_softmax(-1)
    allowed = scaled
    if forbid is not None and forbid.numel():
        banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill(0, forbid, True)
        banned = banned if forbid_rows is None else forbid_rows.unsqueeze(-1) & banned
        allowed = scaled.masked_fill(banned, float("-inf"))
    if temperature == 0.0:
        tokens = allowed.argmax(-1)
        sampling_logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    else:
        kept, ids = _candidates(allowed, top_k, top_p)
        log_q = log_p if kept is scaled else kept.log_softmax(-1)
        index = _inverse_cdf(log_q.exp(), u).unsqueeze(-1)
        tokens = (index if ids is None else ids.gather(-1, index)).squeeze(-1)
        sampling_logprobs = log_q.gather(-1, index).squeeze(-1)
    logprobs, scores = (x.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for x in (log_p, allowed))
    invalid = ~(logprobs.isfinite() & scores.isfinite())
    return (
        tokens.masked_fill(invalid, NO_TOKEN),
        logprobs.masked_fill(invalid, torch.nan),
        sampling_logprobs.masked_fill(invalid, torch.nan),
    )


def _check_options(temperature: float, top_k: int, top_p: float) -> None:
    if not temperature >= 0.0 or top_k < 0 or not 0.0 < top_p <= 1.0:
        raise ValueError(f"need temperature >= 0, top_k >= 0, 0 < top_p <= 1: got {temperature}, {top_k}, {top_p}")
