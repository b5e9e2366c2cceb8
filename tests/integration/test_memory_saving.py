"""gradient_checkpointing=auto: the plan has the planner's choice, and no number of the run depends on it."""

import json
from collections.abc import Callable

import pytest

from realhf.apps.commands.plan import Planned, planned
from realhf.apps.commands.quickstart import read_words
from tests.integration.conftest import Run

pytestmark = [pytest.mark.dist, pytest.mark.slow]
EXPLICIT = {
    "none": [],
    "selective": ["model.gradient_checkpointing=True", "model.recompute_granularity=selective"],
    "full": ["model.gradient_checkpointing=True"],
}


def plan_of(words: list[str]) -> Planned:
    return planned("sft", read_words("sft", ["device=cpu", *words])[0])


@pytest.fixture(scope="module")
def variants(sft_words: list[str]) -> dict[str, list[str]]:
    """Explicit values, and ``auto`` with memory for each of them."""
    words = [*sft_words, "planner.hardware=cpu"]
    peaks = {name: plan_of([*words, *options]).peak_bytes for name, options in EXPLICIT.items()}
    assert peaks["full"] < peaks["selective"] < peaks["none"], peaks
    reserve = plan_of(words).report.machine.hardware.reserve_fraction
    found = {name: [*options] for name, options in EXPLICIT.items()}
    for name, peak in peaks.items():
        memory = (1 + 1e-6) * peak / (1 - reserve) / 1e9
        found[f"auto {name}"] = ["model.gradient_checkpointing=auto", "planner.hardware=cpu",
                                 "allocation_mode=d1", f"planner.memory_gb={memory:.9f}"]  # fmt: skip
    return found


@pytest.fixture(scope="module")
def runs(
    realhf_all: Callable[..., dict[str, Run]], variants: dict[str, list[str]], sft_words: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Run]:  # fmt: skip
    return realhf_all("sft", tmp_path_factory.mktemp("saving"), variants, sft_words)


@pytest.mark.parametrize("name", EXPLICIT)
def test_the_run_recomputes_what_its_memory_needs(name: str, runs: dict[str, Run]) -> None:
    plan = json.loads((runs[f"auto {name}"].root / "plan.json").read_text())["plan"]
    (placement,) = plan["placements"].values()
    assert placement["saving"] == {"recompute": None if name == "none" else name, "offload_optimizer": False}
    explicit = json.loads((runs[name].root / "plan.json").read_text())["plan"]["placements"]
    assert [placement["saving"] for placement in explicit.values()] == [None]


def test_all_runs_are_equal_bit_for_bit(runs: dict[str, Run]) -> None:
    expected = runs["none"]
    for run in runs.values():
        assert run.curve == expected.curve and len(run.curve) > 1
        files = [one.model("model", len(run.curve)) / "model.safetensors" for one in (run, expected)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_the_plan_shows_the_choice(variants: dict[str, list[str]], sft_words: list[str]) -> None:
    text = str(plan_of([*sft_words, *variants["auto full"]]))
    assert "memory saving (auto)" in text and "recompute full, optimizer state on the device" in text
    assert "memory saving" not in str(plan_of([*sft_words, *variants["full"]]))
