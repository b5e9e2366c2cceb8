"""Expected gradients of KL penalties by enumeration: a policy over all responses of three tokens of four.

The estimators and the loss are those of the product (``realhf.algorithms.policy_gradient.losses.kl``).
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.losses.kl import kl_terms
from realhf.api.config import KLEstimator

N_TOKENS, LENGTH = 4, 3
STEPS, RATE = 4000, 0.5


@dataclass(frozen=True)
class Responses:
    """All responses: ``tokens[n, LENGTH]``, and ``states[n, LENGTH]``, the number of the prefix before each token."""

    tokens: Tensor
    states: Tensor


def all_responses() -> Responses:
    tokens = torch.tensor(list(product(range(N_TOKENS), repeat=LENGTH)))
    prefixes = {
        prefix: i for i, prefix in enumerate(p for n in range(LENGTH) for p in product(range(N_TOKENS), repeat=n))
    }
    states = [[prefixes[tuple(row[:i])] for i in range(LENGTH)] for row in tokens.tolist()]
    return Responses(tokens, torch.tensor(states))


ALL = all_responses()
N_STATES = int(ALL.states.max()) + 1


def random_policy(seed: int, scale: float = 1.0) -> Tensor:
    """Return logits ``[N_STATES, N_TOKENS]`` in float64."""
    return scale * torch.randn(N_STATES, N_TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs(logits: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens of all responses, ``[n, LENGTH]``."""
    return logits.log_softmax(-1)[ALL.states, ALL.tokens]


def exact_kl(logits: Tensor, reference: Tensor) -> Tensor:
    """Return KL(policy || reference) of whole responses in nats."""
    own = logprobs(logits).sum(1)
    return (own.exp() * (own - logprobs(reference).sum(1))).sum()


def penalty(estimator: KLEstimator, place: str, logits: Tensor, reference: Tensor) -> Tensor:
    """Return a term whose gradient is the expected gradient of an on-policy step with this penalty.

    In the loss, sampled responses are constants. In the reward, the estimate is a constant, and its sum over a response
    multiplies the gradient of the response's log-probability.
    """
    own, other = logprobs(logits), logprobs(reference)
    terms = kl_terms(estimator, own, other, own.detach()).sum(1)
    shares = own.sum(1).detach().exp()
    return (shares * (terms if place == "loss" else terms.detach() * own.sum(1))).sum()


def gradient(term: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(term, logits)
    return found.flatten()


def bias(estimator: KLEstimator, place: str, seed: int) -> dict[str, float]:
    """Return the distance of the expected gradient from that of the exact KL, relative to its norm, and the cosine."""
    logits, reference = random_policy(seed).requires_grad_(), random_policy(seed + 10_000)
    exact = gradient(exact_kl(logits, reference), logits)
    found = gradient(penalty(estimator, place, logits, reference), logits)
    norm = found.norm()
    cosine = float(found @ exact / (norm * exact.norm())) if norm > 1e-12 else 0.0
    return {"bias": float((found - exact).norm() / exact.norm()), "cosine": cosine, "norm": float(norm / exact.norm())}


def optimum(estimator: KLEstimator, place: str, beta: float, seed: int) -> dict[str, float]:
    """Follow the expected gradient of reward and penalty from the reference; return reward and KL at the end."""
    reference = random_policy(seed + 10_000)
    rewards = torch.rand(len(ALL.tokens), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits = reference.clone().requires_grad_()
    for _ in range(STEPS):
        own = logprobs(logits).sum(1)
        objective = (own.exp() * rewards).sum()
        if beta:
            objective = objective - beta * penalty(estimator, place, logits, reference)
        with torch.no_grad():
            logits += RATE * torch.autograd.grad(objective, logits)[0]
    with torch.no_grad():
        reward = (logprobs(logits).sum(1).exp() * rewards).sum()
        return {"reward": float(reward), "kl": float(exact_kl(logits, reference))}


def best_reward(beta: float, seed: int) -> dict[str, float]:
    """Return reward and KL of the optimal policy, ref * exp(reward / beta)."""
    reference = random_policy(seed + 10_000)
    rewards = torch.rand(len(ALL.tokens), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    shares = (logprobs(reference).sum(1) + rewards / beta).softmax(0)
    kl = (shares * (shares.log() - logprobs(reference).sum(1))).sum()
    return {"reward": float((shares * rewards).sum()), "kl": float(kl)}
