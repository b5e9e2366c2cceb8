"""The registry of metrics; tests/integration/conftest.py compares it with the metrics of every run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.rewards.sandbox.sandbox import Reason
from realhf.system.metrics.descriptions import PLACEHOLDERS, SECTIONS, MetricPattern, describe
from realhf.system.metrics.telemetry import EVAL_ALIASES, METRIC_ALIASES
from realhf.system.metrics.worker_metrics import WORKER_METRICS

PATTERNS = [pattern for patterns in SECTIONS.values() for pattern in patterns]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.key)
def test_an_example_has_one_pattern(pattern: MetricPattern) -> None:
    assert [other.key for other in PATTERNS if other.match(pattern.example_key)] == [pattern.key]
    assert describe(pattern.example_key) == pattern.match(pattern.example_key)


def test_placeholders_are_used_and_examples_have_none() -> None:
    keys = " ".join(pattern.key for pattern in PATTERNS)
    assert [name for name in PLACEHOLDERS if f"{{{name}}}" not in keys] == []
    assert [pattern.key for pattern in PATTERNS if "{" in pattern.example_key] == []


def test_texts_end_without_a_full_stop_and_do_not_break_a_table() -> None:
    for pattern in PATTERNS:
        assert pattern.name and pattern.text
        assert not pattern.text.endswith(".") and "|" not in pattern.text.replace("|log p", "").replace(
            "generator|", ""
        )


def test_aliases_and_worker_metrics_are_described() -> None:
    aliases = {**METRIC_ALIASES, **EVAL_ALIASES}
    keys = [*aliases, *(name for names in aliases.values() for name in names)]
    keys += [metric.name.replace("{mfc}", "ref_inf") for metric in WORKER_METRICS]
    keys += [f"rew_inf/verdict_{reason.value}" for reason in Reason]
    assert [key for key in keys if describe(key) is None] == []


def test_names_contain_the_call() -> None:
    assert describe("time/ref_inf_s") == ("time of ref_inf", "s", describe("time/actor_gen_s").text)
    assert describe("rew_inf/score_math@10.0.0.1:80").name == "score of math@10.0.0.1:80"


@given(st.text(alphabet="abkz_/0{}", max_size=12))
def test_other_keys_have_no_description(key: str) -> None:
    assert describe(f"{key}/unknown") is None
    assert describe(f"reward/{key}x") is None
