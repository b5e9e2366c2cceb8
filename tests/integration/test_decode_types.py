"""Rollouts with matrices of other types in decoding: they are corrected, and refused where nothing would use them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Run, start

pytestmark = [pytest.mark.dist, pytest.mark.slow]
CORRECTED = ["ppo.recompute_logprobs=True", "exp_ctrl.total_train_steps=2"]


@pytest.fixture(scope="module")
def runs(
    realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    variants = {dtype: [f"ppo.gen.weight_dtype={dtype}"] for dtype in ("auto", "bfloat16", "int8")}
    variants["cache"] = ["ppo.gen.kv_cache_dtype=bfloat16"]
    return realhf_all("grpo", tmp_path_factory.mktemp("types"), variants, [*ppo_words, *CORRECTED])


def test_the_difference_of_log_probabilities_is_that_of_the_type(runs: dict[str, Run]) -> None:
    auto, bf16, int8 = (runs[name].curve[0]["actor_train/logprob_diff"] for name in ("auto", "bfloat16", "int8"))
    assert auto < 1e-5 < bf16 < int8 < 0.05
    assert auto < runs["cache"].curve[0]["actor_train/logprob_diff"] < int8
    for run in runs.values():
        assert run.curve[1]["actor_train/is_weight"] == pytest.approx(1.0, abs=0.05)
        assert run.curve[1]["actor_train/grad_norm"] > 0


def test_without_correction_there_is_a_warning(ppo_words: list[str], tmp_path: Path) -> None:
    words = [*ppo_words, "ppo.gen.weight_dtype=int8", "exp_ctrl.total_train_steps=1"]
    run = start("grpo", tmp_path, words).finish()
    assert run.code == 0 and "the model that samples is not the one that is trained" in run.output, run.output


@pytest.mark.parametrize(
    "options, problem",
    [
        (["actor_gen.backend=vllm"], "gen.weight_dtype and gen.kv_cache_dtype need backend=native"),
        (["ppo.gen.weight_dtype=int4"], "int4"),
    ],
)
def test_options_that_exclude_each_other(
    options: list[str], problem: str, ppo_words: list[str], tmp_path: Path
) -> None:
    run = start("grpo", tmp_path, [*ppo_words, "ppo.gen.weight_dtype=int8", *options]).finish()
    assert run.code == 2 and problem in run.output, run.output
