"""PPO with a different layout for every call has the curve of one worker."""

import json
from collections.abc import Callable, Mapping

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Task
from tests.integration.conftest import Run, same_curve

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = 5
KINDS = ("following reference", "no critic", "routed experts")
PLACES = {  # mesh, and degrees of data, tensor and pipeline parallelism
    "actor_gen": ("0-3", 4, 1, 1),
    "rew_inf": ("3", 1, 1, 1),
    "ref_inf": ("2-3", 1, 2, 1),
    "critic_inf": ("1,0", 1, 1, 2),
    "critic_train": ("3,1,2,0", 2, 2, 1),
    "actor_train": ("0-3", 1, 2, 2),
}
DIVIDED = {  # with degrees of expert parallelism
    "actor_gen": ("0-3", 2, 2, 1, 2),
    "ref_inf": ("2,1", 2, 1, 1, 2),
    "actor_train": ("3,1,2,0", 2, 2, 1, 4),
}
INTERLEAVED = {  # with chunks of layers per stage
    "ref_inf": ("2,1", 1, 1, 2, 1, 2),
    "actor_train": ("3,1,2,0", 2, 1, 2, 1, 2),
}
ROUTED = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.1}


@pytest.fixture(scope="module")
def runs(
    realhf_all: Callable[..., dict[str, Run]],
    ppo_words: list[str],
    task: Task,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Run]:
    """Variants of PPO on one worker and, ``cut``, on four."""
    folder = tmp_path_factory.mktemp("cut")
    dense = json.loads((task.model / "config.json").read_text())
    (folder / "routed.json").write_text(json.dumps({**dense, **ROUTED}))
    (folder / "deep.json").write_text(json.dumps({**dense, "num_hidden_layers": 5}))
    scratch = ["actor.path=null", "actor.init_from_scratch=True"]
    options = {
        "following reference": ["ppo.ref_ema_eta=0.25"],
        "no critic": ["ppo.disable_value=True", "ppo.group_adv_norm=True"],
        "routed experts": [
            "ppo.router_replay=True",
            *scratch,
            f"actor.config={folder}/routed.json",
            f"actor.tokenizer={task.tokenizer}",
        ],
        "deep": [*scratch, f"actor.config={folder}/deep.json", f"actor.tokenizer={task.tokenizer}"],
    }
    variants = {kind: options[kind] for kind in KINDS}
    variants |= {f"{kind}, cut": [*options[kind], *on_four(PLACES)] for kind in KINDS}
    variants["routed experts, divided"] = [*options["routed experts"], *on_four(PLACES | DIVIDED),
                                           "verify_reallocation=True"]  # fmt: skip
    variants |= {"deep": options["deep"], "deep, interleaved": [*options["deep"], *on_four(PLACES | INTERLEAVED),
                                                                "verify_reallocation=True"]}  # fmt: skip
    length = ["exp_ctrl.total_train_epochs=2", f"exp_ctrl.total_train_steps={STEPS}"]
    return realhf_all("ppo-math", folder, variants, [*ppo_words, *length])


def on_four(places: Mapping[str, tuple]) -> list[str]:
    options = ["n_gpus_per_node=4", "allocation_mode=manual"]
    for call, (mesh, *degrees) in places.items():
        axes = zip(("data", "tensor", "pipeline", "expert", "virtual_pipeline"), degrees, strict=False)
        options += [f"{call}.device_mesh={mesh}", *(f"{call}.parallel.{axis}_parallel_size={n}" for axis, n in axes)]
    return options


CASES = [*((kind, "cut") for kind in KINDS), ("routed experts", "divided"), ("deep", "interleaved")]


@pytest.mark.parametrize("kind, layout", CASES)
def test_the_curve_does_not_depend_on_the_layout(kind: str, layout: str, runs: dict[str, Run]) -> None:
    whole, cut = runs[kind], runs[f"{kind}, {layout}"]
    assert len(whole.curve) == STEPS and whole.curve[-1]["kl/ref"] > 1e-3
    assert same_curve(whole, cut) == []
    loads = [line.get("actor_train/router_max_rank_load", 0.0) for line in cut.metrics]
    assert all(load >= 1 for load in loads) if layout == "divided" else not any(loads)
    for step in range(1, STEPS + 1):
        assert [row["response"] for row in cut.generations(step)] == [
            row["response"] for row in whole.generations(step)
        ]
    for role in {"actor", "critic"} & {folder.name for folder in (whole.root / "models").iterdir()}:
        expected = load_file(whole.model(role, STEPS) / "model.safetensors")
        for name, tensor in load_file(cut.model(role, STEPS) / "model.safetensors").items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)


def test_weights_are_reallocated_where_layouts_differ(runs: dict[str, Run]) -> None:
    spans = json.loads((runs["following reference, cut"].root / "trace.json").read_text())
    moved = {(s["name"], s["pid"]) for s in spans if s["name"].endswith(("Reallocate", "Release"))}
    calls = ("actor_gen/Reallocate", "actor_gen/Release", "actor_train/Reallocate", "critic_inf/Reallocate")
    assert {(call, rank) for call in calls for rank in range(4)} <= moved


def test_routers_report_their_losses(runs: dict[str, Run]) -> None:
    for line in runs["routed experts, cut"].curve:
        for call in ("actor_train", "critic_train"):
            assert 1.9 < line[f"{call}/router_balance_loss"] < 3.0 and line[f"{call}/router_z_loss"] > 1.0
    assert not any("router" in name for line in runs["no critic"].curve for name in line)
