"""Models give the same results where workers divide the tokens of rows as on one worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.api.layout import ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.plan.compile.check import strategy_problems
from tests.models.layout_checks import check_columns, check_saved_bytes, check_statistics, check_step, starts_of
from tests.models.sharding import CONTEXT_LAYOUTS, Results, collect
from tests.models.tiny_models import ONE_OF_EACH, hf_model
from tests.scaling import pairs, spread

pytestmark = [pytest.mark.dist, pytest.mark.slow]
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # refused
ACTORS = (*(name for name in ONE_OF_EACH if name not in HYBRID), "llama_tied")
MODELS = (*ACTORS, "llama critic", "qwen3_moe critic", "gemma2 critic")
LAYOUTS = spread(MODELS, CONTEXT_LAYOUTS, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context_layouts")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    starts, collected = starts_of(MODELS, root), Results()
    names = {model: ("whole", *layouts) for model, layouts in LAYOUTS.items()}
    for some in (MODELS[:12], MODELS[12:24], MODELS[24:]):
        collect(on_ranks, 4, {name: starts[name] for name in some}, names, root, collected)
    return collected


@pytest.mark.parametrize("model", HYBRID)
def test_linear_attention_is_refused(model: str, tmp_path: Path) -> None:
    hf_model(model).save_pretrained(tmp_path)
    config = read_hf_config(tmp_path, False)
    assert strategy_problems(config, ParallelStrategy.parse("c2")) == [
        "its linear attention needs whole rows on a rank, which c divides"
    ]


@pytest.mark.parametrize("model, layout", pairs(LAYOUTS))
def test_every_worker_computes_the_same_and_makes_the_same_step(
    model: str, layout: str, results: Results, root: Path
) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    assert len(members) == len(CONTEXT_LAYOUTS[layout].layout.mesh.ranks)
    check_columns(whole, members)
    names = {"nll", "square", "router_balance_loss", "router_z_loss", "router_max_load"} & whole.stats.keys()
    check_statistics(whole, members, sorted(names), 1e-5)
    check_step(root / model, layout, whole, members)
    check_saved_bytes(root / model, layout)
