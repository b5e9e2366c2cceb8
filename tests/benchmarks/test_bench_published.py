"""The file of published points, and the summary of their errors."""

import json

import pytest

from benchmarks.bench_published import MACHINES, POINTS, TIMED, compare, describe, points, summary, total
from benchmarks.published_engines import ENGINES, engine_name
from benchmarks.published_models import model_of

EVERY = list(points([POINTS]))
MEASURED = {"memory": ("bytes",), "rl": ("seconds",)}  # of timed points, seconds or tokens per second


def test_points_have_a_source_a_machine_a_model_and_a_positive_measurement() -> None:
    assert len(EVERY) == len(POINTS.read_text().splitlines()) == 591
    for point in EVERY:
        assert point["kind"] in (*TIMED, *MEASURED) and point["source"] and point["hardware"] in MACHINES
        model = model_of(point)
        assert model.n_heads % model.n_kv_heads == 0 and model.n_layers > 0
        assert model.tied_embedding == point["model"].get("tied", False)
        measured = MEASURED.get(point["kind"], ("seconds", "tokens_per_s"))
        assert any(point.get(name, 0) > 0 for name in measured)
        assert point["kind"] == "rl" or engine_name(point) in ENGINES


def test_no_point_is_listed_twice() -> None:
    lines = [json.dumps(point, sort_keys=True) for point in EVERY]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("kind", [*TIMED, "memory"])
def test_one_point_of_each_kind_is_compared(kind: str) -> None:
    found = compare(next(point for point in EVERY if point["kind"] == kind))
    assert isinstance(found, float) and 0.5 < found < 2


def test_a_point_without_conditions_has_a_reason() -> None:
    found = compare(next(point for point in EVERY if point.get("engine") == "deepspeed-chat"))
    assert found == "ZeRO stage, offloading and mean lengths of rows are not published"
    memory = next(point for point in EVERY if point["kind"] == "memory")
    assert compare({**memory, "engine": "vllm"}) == "the memory of vllm is not described"


def test_summaries() -> None:
    """Errors of 5, 10, 20 and 60 %: nine tenths of four are all of them."""
    ratios = [1.05, 0.9, 1.2, 0.4]
    assert summary(ratios).startswith("median error 15.0%, 90 % below 60.0%, root mean square")
    assert total("memory", ratios).endswith("; 2 within 10%")
    assert total("rl", ratios).endswith("; 3 within 25%")
    assert "within" not in total("train", ratios)


def test_descriptions_name_the_conditions() -> None:
    steps = next(point for point in EVERY if point["kind"] == "rl")
    assert describe(steps).startswith("h100 Llama-3.1-8B-Instruct n_gpus=16 steps_off_policy=0")
    assert "32x4096 seq=8192 dp=8" in describe(next(point for point in EVERY if point["kind"] == "memory"))
