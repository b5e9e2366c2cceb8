"""Error messages for plans that do not fit, and the suggested changes."""

import re
from dataclasses import replace

import pytest

from realhf.api.config import OptimizerConfig
from realhf.api.config.choices import Recompute
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.machine import Workload
from realhf.plan.advice.remedies import changed_options, share_weights
from realhf.plan.advice.suggest_fix import out_of_memory_message, suggest_fix
from realhf.plan.search.planner import Planner
from tests.plan.search.planners import TOY, WIDE, layout, ppo_planner


def planner_with(usable: float, n_workers: int = 4, node_size: int = 4, **options: object) -> Planner:
    rows = Workload(((240,),), (560,))
    hardware = replace(TOY, memory=usable / (1 - TOY.reserve_fraction), node_size=node_size)
    return ppo_planner(n_workers, hardware, WIDE, 64, rows, **options)  # type: ignore[arg-type]


def fixed(planner: Planner, text: str = "d4") -> ExecutionPlan:
    """The plan of ``allocation_mode=d4`` with the configured micro-batching."""
    limits = planner.calls.limits
    return planner.with_zero3(ExecutionPlan(planner.n_workers, {n: Placement(layout(text), limits[n]) for n in limits}))


def peak(planner: Planner, plan: ExecutionPlan) -> float:
    return planner.predict(plan).peak


LARGE = planner_with(1e12)
NEEDED = peak(LARGE, fixed(LARGE))


def test_message_names_worker_largest_parts_and_fix() -> None:
    planner = planner_with(NEEDED - 1)
    plan = fixed(planner)
    prediction = planner.predict(plan)
    text = out_of_memory_message(planner, plan, prediction, fixed, "ppo.gen.max_num_seqs")
    found = re.fullmatch(
        r"worker (\d) would need ([\d.]+) GB \((.*)\), it has ([\d.]+), of "
        r"which plans leave 9% free for the expected error of 10%; it fits with (.*)",
        text,
    )
    assert found, text
    worst = prediction.memory[int(found[1])]
    assert worst.total == prediction.peak and float(found[2]) == pytest.approx(NEEDED / 1e9, rel=1e-3)
    parts = [(name.rpartition(" ")[0], float(name.rpartition(" ")[2])) for name in found[3].split(", ")]
    assert [size for _, size in parts] == sorted((size for _, size in parts), reverse=True)
    sizes = {name.replace("_", " "): size for name, size in vars(worst).items()}
    assert all(size == pytest.approx(sizes[name] / 1e9, rel=1e-2) for name, size in parts)
    assert sum(size for _, size in parts) > 0.95 * NEEDED / 1e9


def applied(planner: Planner, words: str) -> tuple[Planner, ExecutionPlan]:
    """Return the planner and the plan with the suggested options."""
    given = [word.partition("=")[::2] for word in words.split(" ")]
    limits, changes, n_workers, node_size, mode = dict(planner.calls.limits), {}, planner.n_workers, 4, ""
    offloaded: list[str] = []
    for key, value in given:
        owner, _, option = key.partition(".")
        match key, option:
            case _, "mb_spec.max_tokens_per_mb":
                limits[owner] = MicroBatching(max_tokens_per_mb=int(value))
            case "slots", _:
                changes["options"] = {"gen": replace(planner.calls.cost.sampling, max_num_seqs=int(value))}
            case _, "gradient_checkpointing" | "bf16":
                changes[option] = value == "True"
            case _, "recompute_granularity":
                changes[option] = Recompute(value)
            case _, "optimizer.offload":
                changes["optimizer"] = OptimizerConfig(offload=True)
            case _, "offload":
                offloaded.append(owner)
            case _, "zero_stage":
                changes[option] = int(value)
            case "n_nodes", _:
                n_workers = int(value) * int(dict(given)["n_gpus_per_node"])
            case "n_gpus_per_node", _:
                node_size = int(value)
            case "allocation_mode", _:
                mode = value
            case _:
                raise AssertionError(f"unknown option {key}")
    made = planner_with(planner.calls.hardware.usable, n_workers, node_size, **changes)
    graph = replace(made.graph, offloaded=tuple(offloaded))
    cost, memory = replace(made.calls.cost, graph=graph), replace(made.calls.memory, graph=graph)
    made = replace(made, graph=graph, calls=replace(made.calls, limits=limits, cost=cost, memory=memory))
    return made, made.by_heuristic(mode) if mode else fixed(made)


FIXES = {
    0.999: r"\w+_train\.mb_spec\.max_tokens_per_mb=2048",
    0.95: r"critic_train\.mb_spec\.max_tokens_per_mb=2048 actor_train\.mb_spec\.max_tokens_per_mb=2048",
    0.45: r"(\w+\.gradient_checkpointing=True ){2}(\w+\.recompute_granularity=selective ){2}(\w+\.mb_spec\.\S+ ?)+",
    0.3: r"allocation_mode=megatron",
    0.15: r"(\w+\.gradient_checkpointing=True ){2}.*(\w+\.zero_stage=3 ){2}(\w+\.mb_spec\.\S+ ?)+",
    0.1: r"(\w+\.gradient_checkpointing=True ){2}(\w+\.optimizer.offload=True ){2}(\w+\.offload=True )*allocation_\S+",
    0.08: r"(\w+\.gradient_checkpointing=True ){2}n_nodes=1 n_gpus_per_node=8 allocation_mode=symmetric",
    0.03: r"(\w+\.bf16=True ){4}(\S+=True )+n_nodes=2 n_gpus_per_node=8 allocation_mode=symmetric",
}
"""The smallest fixes by fraction of the required memory."""


@pytest.mark.parametrize("share", FIXES)
def test_the_smallest_fix_comes_first_and_fits(share: float) -> None:
    planner = planner_with(share * NEEDED)
    assert not planner.fits(fixed(planner))
    words = suggest_fix(planner, fixed, "slots")
    assert re.fullmatch(f"it fits with {FIXES[share]}", words), words
    changed, plan = applied(planner, words.removeprefix("it fits with "))
    assert changed.fits(plan), words


def test_options_name_the_role_of_the_model() -> None:
    words = suggest_fix(planner_with(0.03 * NEEDED), fixed, "slots")
    roles = {word.partition(".")[0] for word in words.split(" ") if word.endswith("bf16=True")}
    assert roles == {"actor", "critic", "rew", "ref"}
    recomputing = {word.partition(".")[0] for word in words.split(" ") if "checkpointing" in word}
    assert recomputing == {"actor", "critic"}  # the others are never trained


def test_generation_uses_fewer_concurrent_sequences() -> None:
    gen = replace(LARGE.calls.cost.sampling, max_new_tokens=8000, max_num_seqs=128)  # type: ignore[type-var]
    options = {"gen": gen}
    large = planner_with(1e12, 1, options=options)
    needed = peak(large, fixed(large, "d1"))
    words = suggest_fix(
        planner_with(0.9 * needed, 1, options=options), lambda p: fixed(p, "d1"), "ppo.gen.max_num_seqs"
    )
    assert words == "it fits with ppo.gen.max_num_seqs=32"


def test_a_heuristic_is_applied_again_after_the_change() -> None:
    def plan_symmetric(planner: Planner) -> ExecutionPlan:
        return planner.by_heuristic("symmetric")

    planner = planner_with(0.56 * NEEDED, 1)
    assert not planner.fits(plan_symmetric(planner))
    words = suggest_fix(planner, plan_symmetric, "")
    assert words == "it fits with actor.gradient_checkpointing=True critic.gradient_checkpointing=True"
    recomputing = planner_with(0.56 * NEEDED, 1, gradient_checkpointing=True)
    assert recomputing.fits(plan_symmetric(recomputing))


def test_more_workers_are_not_suggested_if_they_share_memory() -> None:
    assert suggest_fix(planner_with(2e6, 2), lambda p: fixed(p, "d2"), "slots").startswith(
        "no change that was tried fits"
    )
    planner = planner_with(0.03 * NEEDED)
    assert "n_nodes=2" in suggest_fix(planner, fixed, "slots")
    shared = replace(planner, calls=replace(planner.calls, hardware=replace(planner.calls.hardware, cores=2)))
    assert suggest_fix(shared, fixed, "slots").startswith("no change that was tried fits")


def test_no_fix_is_claimed_without_time() -> None:
    planner = planner_with(0.999 * NEEDED)
    assert suggest_fix(planner, fixed, "slots", timeout_s=0.0).startswith("no change that was tried fits")


def test_a_fix_is_minimal() -> None:
    """Without any of the kinds of suggested options the plan does not fit."""
    planner = planner_with(0.1 * NEEDED)
    words = suggest_fix(planner, fixed, "slots").removeprefix("it fits with ").split(" ")
    kinds = {word.partition("=")[0].partition(".")[2] for word in words}
    assert kinds == {"gradient_checkpointing", "optimizer.offload", "offload", ""}
    for kind in kinds:
        rest = [word for word in words if word.partition("=")[0].partition(".")[2] != kind]
        changed, plan = applied(planner, " ".join(rest))
        assert not changed.fits(plan), kind


def test_shares_of_weights_and_gradients_help_where_these_take_the_memory() -> None:
    """Rows are short, so that activations and caches are small."""

    def short_rows(usable: float) -> Planner:
        hardware = replace(TOY, memory=usable / (1 - TOY.reserve_fraction))
        return ppo_planner(4, hardware, WIDE, 8)

    needed = peak(short_rows(1e12), fixed(short_rows(1e12)))
    planner = short_rows(0.8 * needed)
    shared = share_weights(planner)
    assert not planner.fits(fixed(planner)) and shared.fits(fixed(shared))
    assert changed_options(planner, shared, "slots") == ["actor.zero_stage=3", "critic.zero_stage=3"]
