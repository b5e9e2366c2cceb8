"""Best of n, drops and correlations of the study of reward model ensembles, from scores that were made up."""

import numpy as np
import pytest

from experiments.rm_ensemble.study import GRID, RESPONSES, best_of_n, correlations, drop
from realhf.base.best_of_n import expected_best


def made(members: int = 3, prompts: int = 4) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    gold = generator.normal(size=(prompts, RESPONSES))
    return gold + generator.normal(size=(members, prompts, RESPONSES)), gold


def test_single_is_the_mean_over_members_and_an_ensemble_of_equal_members_is_one() -> None:
    scores, gold = made()
    expected = [[expected_best(one, truth, GRID)[1] for one, truth in zip(member, gold, strict=True)]
                for member in scores]  # fmt: skip
    np.testing.assert_allclose(best_of_n(scores, gold, "single"), np.mean(expected, axis=0))
    equal = np.stack([scores[0]] * 3)
    for name in ("mean", "WCO", "UWO"):
        np.testing.assert_allclose(best_of_n(equal, gold, name), expected[0], rtol=1e-6)


def test_a_mean_of_independent_members_selects_better_responses() -> None:
    scores, gold = made()
    single, ensemble = (best_of_n(scores, gold, name)[:, -1].mean() for name in ("single", "mean"))
    assert single < ensemble < best_of_n(gold[None], gold, "mean")[:, -1].mean()


def test_a_drop_begins_at_the_peak_of_the_mean() -> None:
    curves = np.array([[0.0, 2.0, 1.0], [0.0, 4.0, 1.0]])
    assert drop(curves) == (2.0, 1.0)
    assert drop(curves[:, :2]) == (0.0, 0.0)


def test_errors_are_what_gold_scores_do_not_explain() -> None:
    scores, gold = made(prompts=2)
    found = correlations(scores, gold)
    assert found["gold"] == pytest.approx(0.5**0.5, abs=0.05) and found["members"] == pytest.approx(0.5, abs=0.05)
    assert found["errors"] == pytest.approx(0.0, abs=0.05)
