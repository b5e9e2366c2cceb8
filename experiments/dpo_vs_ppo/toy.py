"""Probability of unseen responses after DPO and after PPO, for policies over 32 responses to each of 8 prompts.

The loss of DPO is that of the product (``realhf.algorithms.preference.preference_loss``). Both algorithms follow exact
gradients: expectations are sums over all responses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from realhf.algorithms.preference.preference_loss import pair_losses
from realhf.api.config.preference import DPOConfig

N_PROMPTS, N_RESPONSES, N_SEEN, WIDTH = 8, 32, 4, 4
BETA, STEPS, RATE = 0.1, 3000, 0.05
Parameters = list[Tensor]


@dataclass(frozen=True)
class Task:
    """``better[p, s]`` is the rank of seen responses ``seen[p, s]`` by their true reward, the best is last."""

    seen: Tensor  # [N_PROMPTS, N_SEEN], in rising order of the true reward
    features: Tensor  # [N_RESPONSES, WIDTH]

    @property
    def pairs(self) -> Tensor:
        """All (chosen, rejected) pairs of seen responses, ``[N_PROMPTS, n, 2]``."""
        order = [(b, w) for b in range(N_SEEN) for w in range(b)]
        return self.seen[:, torch.tensor(order)]

    @property
    def is_unseen(self) -> Tensor:
        return torch.ones(N_PROMPTS, N_RESPONSES, dtype=torch.bool).scatter(1, self.seen, False)


def make_task(seed: int) -> Task:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(N_PROMPTS, N_RESPONSES, generator=generator).argsort(1)
    features = torch.randn(N_RESPONSES, WIDTH, generator=generator, dtype=torch.float64)
    return Task(order[:, :N_SEEN], features)


def tabular(task: Task) -> tuple[Parameters, Callable[[Parameters], Tensor]]:
    """A logit of its own for every response to every prompt."""
    return [torch.zeros(N_PROMPTS, N_RESPONSES, dtype=torch.float64)], lambda parameters: parameters[0]


def shared(task: Task) -> tuple[Parameters, Callable[[Parameters], Tensor]]:
    """Logits are products of a trained vector of the prompt and the fixed features of the response."""
    start = torch.zeros(N_PROMPTS, WIDTH, dtype=torch.float64)
    return [start], lambda parameters: parameters[0] @ task.features.T


POLICIES = {"tabular": tabular, "shared": shared}


def train(parameters: Parameters, loss: Callable[[], Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def reward_model(task: Task) -> Tensor:
    """Fit a reward per prompt and response on the pairs; those of unseen responses stay 0."""
    rewards = torch.zeros(N_PROMPTS, N_RESPONSES, dtype=torch.float64)

    def loss() -> Tensor:
        chosen, rejected = rewards.gather(1, task.pairs.flatten(1)).view_as(task.pairs).unbind(-1)
        return -functional.logsigmoid(chosen - rejected).sum()

    train([rewards], loss)
    return rewards.detach()


def unseen_mass(policy: str, algorithm: str, seed: int) -> float:
    """Return the probability of unseen responses at the end, the mean over prompts."""
    task = make_task(seed)
    parameters, logits = POLICIES[policy](task)
    reference = torch.full(
        (N_PROMPTS, N_RESPONSES), -torch.tensor(float(N_RESPONSES)).log().item(), dtype=torch.float64
    )
    pairs, config = task.pairs.flatten(1), DPOConfig(beta=BETA)

    def dpo() -> Tensor:
        own = logits(parameters).log_softmax(1).gather(1, pairs).view(-1, 2)
        return pair_losses(own, reference.gather(1, pairs).view(-1, 2), torch.ones_like(own), config).sum()

    rewards = reward_model(task)

    def ppo() -> Tensor:
        """The objective of PPO in expectation: the reward model's score - beta * KL from the reference."""
        own = logits(parameters).log_softmax(1)
        return -(own.exp() * (rewards - BETA * (own - reference))).sum()

    train(parameters, {"DPO": dpo, "PPO": ppo}[algorithm])
    with torch.no_grad():
        shares = logits(parameters).softmax(1)
    return float((shares * task.is_unseen).sum(1).mean())
