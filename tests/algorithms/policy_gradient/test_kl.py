"""KL estimators by enumeration of a small distribution, and the controller."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.losses.kl import kl_coefficient, kl_terms, next_kl_coefficient
from realhf.api.config import KLEstimator
from tests.scaling import examples

K1, K2, K3, K4 = KLEstimator
logits = st.lists(st.floats(-2, 2), min_size=4, max_size=4).map(lambda x: torch.tensor(x, dtype=torch.float64))


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def gradient(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of, by, retain_graph=True)[0]


@settings(max_examples=examples(40))
@given(logits, logits, logits)
def test_values_and_gradients_in_expectation(theta: Tensor, reference: Tensor, old: Tensor) -> None:
    theta = theta.clone().requires_grad_()
    log_p, log_ref, log_old = (x.log_softmax(0) for x in (theta, reference, old))
    p = log_p.detach().exp()  # the expectation is over tokens of the policy

    def value(estimator: KLEstimator) -> float:
        return (p * kl_terms(estimator, log_p, log_ref, log_p.detach())).sum().item()

    def expected_gradient(estimator: KLEstimator, sampled_from: Tensor) -> Tensor:
        terms = kl_terms(estimator, log_p, log_ref, sampled_from.log())
        return gradient((sampled_from * terms).sum(), theta)

    reverse = gradient(divergence(log_p, log_ref), theta)
    forward = gradient(divergence(log_ref, log_p), theta)
    for estimator in (K1, K3, K4):
        assert value(estimator) == pytest.approx(divergence(log_p, log_ref).item(), abs=1e-9)
    assert torch.allclose(expected_gradient(K1, p), torch.zeros(4, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(expected_gradient(K2, p), reverse, atol=1e-9)
    assert torch.allclose(expected_gradient(K3, p), forward, atol=1e-9)
    assert torch.allclose(expected_gradient(K4, p), reverse, atol=1e-9)
    assert torch.allclose(expected_gradient(K4, log_old.exp()), reverse, atol=1e-9)  # off-policy too


def test_estimates_are_finite_at_probability_0_of_the_reference() -> None:
    log_p = torch.tensor([-1.0, -500.0], requires_grad=True)
    for estimator in KLEstimator:
        terms = kl_terms(estimator, log_p, torch.tensor([-1000.0, -1.0]), torch.tensor([-1.0, -1.0]))
        assert torch.isfinite(terms).all() and torch.isfinite(gradient(terms.sum(), log_p)).all()


def test_values_of_k2_and_k3() -> None:
    p, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.5])
    assert kl_terms(K2, p, ref, p).tolist() == [2.0, 0.125]
    assert kl_terms(K3, p, ref, p).tolist() == pytest.approx([2 + 0.1353353 - 1, -0.5 + 1.6487213 - 1])


def test_adaptive_kl_coefficient() -> None:
    config = PPOConfig(use_adaptive_kl_ctl=True, adaptive_kl_target=6.0, adaptive_kl_horizon=100.0)
    assert next_kl_coefficient(0.1, 6.6 * 10, 10, config) == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    assert next_kl_coefficient(0.1, 600.0, 10, config) == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert next_kl_coefficient(0.1, 0.0, 10, config) == pytest.approx(0.1 * (1 - 0.2 * 10 / 100))
    assert next_kl_coefficient(0.1, 0.0, 0, config) == 0.1
    assert kl_coefficient({"kl_coef": 0.7}, config) == 0.7 and kl_coefficient({}, config) == config.kl_ctl
    assert kl_coefficient({"kl_coef": 0.7}, PPOConfig(kl_ctl=0.3)) == 0.3
