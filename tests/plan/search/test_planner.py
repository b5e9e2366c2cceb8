"""Plans by heuristic and by search on synthetic machines, and their predictions."""

from dataclasses import replace

import pytest

from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Hardware, Link, Workload
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.cost.speed import StageShard, Work
from realhf.plan.machines.roofline import Roofline
from realhf.plan.search.planner import Planner, plan_layouts
from tests.plan.search.planners import LLAMA, TOY, WIDE, layout, ppo_planner

SLOW_LINKS = replace(TOY, node=Link(1e8, 1e-4), cluster=Link(1e7, 1e-3))
MACHINES = {"toy": TOY, "slow links": SLOW_LINKS, "shared cores": replace(TOY, cores=2)}


def planners() -> dict[str, Planner]:
    return {
        **{name: ppo_planner(8, machine, WIDE) for name, machine in MACHINES.items()},
        "odd": ppo_planner(6, replace(TOY, node_size=3), WIDE),
        "one": ppo_planner(1),
        "tight": ppo_planner(8, replace(TOY, memory=3.2e8), WIDE),
        "tiny": ppo_planner(4),
        "groups": ppo_planner(4, TOY, WIDE, options={"group_size": 4, "disable_value": True}),
        "offloaded": ppo_planner(4, TOY, WIDE, offload=True),
        "ema": ppo_planner(4, TOY, WIDE, options={"ref_ema_eta": 0.5}),
    }


PLANNERS = planners()


@pytest.mark.parametrize("name", PLANNERS)
def test_a_search_is_never_worse_than_any_heuristic(name: str) -> None:
    planner = PLANNERS[name]
    found = planner.search()
    predicted = planner.predict(found.plan)
    heuristic_plans = {rule: planner.by_heuristic(rule) for rule in HEURISTICS}
    fitting = {rule: planner.predict(plan).seconds for rule, plan in heuristic_plans.items() if planner.fits(plan)}
    assert planner.fits(found.plan) >= bool(fitting)
    for rule, seconds in fitting.items():
        assert predicted.seconds <= seconds, rule


@pytest.mark.parametrize("name", ["toy", "odd", "groups", "offloaded", "ema"])
def test_a_search_returns_the_prediction_of_its_plan(name: str) -> None:
    planner = PLANNERS[name]
    found = planner.search()
    predicted = planner.predict(found.plan)
    assert found.seconds == predicted.seconds and found.prediction == predicted
    assert found.result.seconds == pytest.approx(predicted.seconds, rel=0.1)


def test_the_same_seed_gives_the_same_plan() -> None:
    one, two = (ppo_planner(8, TOY, WIDE).search(seed=3) for _ in range(2))
    assert one.plan == two.plan and one.result.choice == two.result.choice


@pytest.mark.parametrize("rule", HEURISTICS)
@pytest.mark.parametrize("name", PLANNERS)
def test_heuristics_make_valid_plans(name: str, rule: str) -> None:
    planner = PLANNERS[name]
    plan = planner.by_heuristic(rule)
    assert plan.n_workers == planner.n_workers
    predicted = planner.predict(plan)
    assert predicted.seconds > 0 and set(predicted.memory) == set(range(plan.n_workers))
    assert planner.fits(plan) == (predicted.peak <= planner.calls.hardware.usable)


def test_heuristics_shard_more_when_memory_is_tight() -> None:
    large, tight = PLANNERS["toy"], PLANNERS["tight"]
    assert not tight.fits(large.by_heuristic("symmetric"))
    for rule in ("megatron", "symmetric", "real"):
        assert tight.fits(tight.by_heuristic(rule)), rule


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4, 0.25])
def test_micro_batches_shrink_until_a_plan_fits(share: float) -> None:
    rows = Workload(((60,),), (140,))
    large = ppo_planner(1, replace(TOY, memory=1e12), WIDE, 128, rows)
    peak = large.predict(large.by_heuristic("symmetric")).peak
    tight = ppo_planner(1, replace(TOY, memory=share * peak / (1 - TOY.reserve_fraction)), WIDE, 128, rows)
    plan, found = tight.by_heuristic("symmetric"), tight.search()
    finest = {name: replace(limit, max_tokens_per_mb=512, max_num_seqs=8) for name, limit in tight.calls.limits.items()}
    leanest = replace(plan, placements={n: replace(plan[n], micro_batching=finest[n]) for n in finest})
    assert tight.fits(plan) == tight.fits(found.plan) == tight.fits(leanest)


def test_a_search_is_never_slower_than_the_plans_it_starts_from() -> None:
    planner = ppo_planner(8, TOY, WIDE)
    best = planner.search().plan
    hasty = replace(planner, max_evaluations=0)
    assert hasty.search(starts=[best]).seconds <= planner.predict(best).seconds < hasty.search(budget_s=0.0).seconds


def test_candidates_include_heuristics_and_the_fastest_on_every_mesh() -> None:
    planner = PLANNERS["toy"]
    starts = [plan_layouts(planner.by_heuristic(rule)) for rule in HEURISTICS]
    table = planner.candidates(starts)
    for mfc in planner.graph.mfcs:
        here = [candidate.placement.layout for candidate in table[mfc.name]]
        assert len(set(here)) == len(here) and {found[mfc.name] for found in starts} <= set(here)
        whole = [x for x in here if len(x.mesh.ranks) == 8]
        every = [layout(t) for t in ("d8", "d4t2", "d2t4", "d4p2", "d2p4", "p8", "d2t2p2", "t4p2", "t2p4")]
        fastest = min(every, key=lambda x: planner.calls.of(mfc, x).cost.seconds)
        assert fastest in whole


def test_the_problem_uses_the_cost_and_memory_models() -> None:
    planner = PLANNERS["toy"]
    table = planner.candidates([plan_layouts(planner.by_heuristic("symmetric"))])
    problem = planner.problem(table)
    assert problem.capacity == planner.calls.capacity and problem.n_ranks == 8
    train, gen = table["actor_train"], table["actor_gen"]
    away = next(i for i, c in enumerate(gen) if c.placement.layout != train[0].placement.layout)
    move = problem.realloc("actor_gen", away, 0)
    src, dst = train[0].placement.layout, gen[away].placement.layout
    assert move.cost == planner.calls.cost.reallocate("actor", src, dst)
    assert move.nbytes == planner.calls.memory.weights("actor", dst.strategy)
    same = next(i for i, c in enumerate(gen) if c.placement.layout == train[0].placement.layout)
    assert problem.realloc("actor_gen", same, 0).cost.seconds == 0


def test_alternatives_are_predicted() -> None:
    planner = PLANNERS["toy"]
    plan = planner.by_heuristic("symmetric")
    now, found = planner.alternatives(plan)
    assert now == planner.predict(plan).seconds
    table = planner.candidates([plan_layouts(plan)])
    for mfc in planner.graph.mfcs:
        others = [c.placement for c in table[mfc.name] if c.placement != plan[mfc.name]]
        seconds = {
            str(p.layout): planner.predict(replace(plan, placements={**plan.placements, mfc.name: p})).seconds
            for p in others
        }
        best = found[mfc.name]
        assert best is not None and best.seconds == seconds[str(best.layout)] <= 1.01 * min(seconds.values())


def test_meshes_with_gaps_in_any_order_are_supported() -> None:
    planner = PLANNERS["tiny"]
    odd = Layout(DeviceMesh((3, 0)), ParallelStrategy(2))
    places = {m.name: Placement(odd, MicroBatching()) for m in planner.graph.mfcs}
    plan = ExecutionPlan(4, places)
    now, others = planner.alternatives(plan)
    assert now > 0 and all(other is not None and other.layout != odd for other in others.values())
    assert planner.predict(plan).seconds > 0


class PartialProfile(Roofline):
    """A machine whose profile has no tensor parallelism."""

    def forward(self, part: StageShard, work: Work, ranks: object) -> float:
        if part.tp > 1:
            raise ValueError("no profile of tensor parallelism")
        return super().forward(part, work, ranks)  # type: ignore[arg-type]


def partial_profile(hardware: Hardware) -> Planner:
    planner = ppo_planner(4, hardware, WIDE)
    cost = replace(planner.calls.cost, speed=PartialProfile(hardware))
    return replace(planner, calls=replace(planner.calls, cost=cost))


def test_layouts_without_a_profile_are_not_used() -> None:
    planner = partial_profile(TOY)
    table = planner.candidates([])
    by_forward = [c.placement.layout.strategy.tp for name in ("actor_gen", "ref_inf") for c in table[name]]
    assert set(by_forward) == {1}
    found = planner.search()
    assert all(found.plan[name].layout.strategy.tp == 1 for name in ("actor_gen", "rew_inf", "ref_inf", "critic_inf"))
    assert planner.predict(found.plan).seconds > 0
    unknown = ExecutionPlan(4, {m.name: Placement(layout("t4")) for m in planner.graph.mfcs})
    assert planner.search(starts=[unknown, found.plan]).seconds <= found.seconds
    with pytest.raises(ValueError, match="no profile of"):
        planner.predict(unknown)


def test_a_search_interleaves_pipeline_stages_where_that_is_faster() -> None:
    tight = replace(TOY, node_size=8, memory=2e7)  # replicas of whole models do not fit
    planner = ppo_planner(8, tight, replace(LLAMA, n_layers=16), 32)
    table = planner.candidates([])
    chunks = {name: {c.placement.layout.strategy.vpp for c in some} for name, some in table.items()}
    assert {name for name, found in chunks.items() if 2 in found} == {"actor_train", "critic_train"}
    plain = {c.placement.layout for c in table["actor_train"] if c.placement.layout.strategy.vpp == 1}
    capacity = planner.calls.capacity
    for candidate in [c for c in table["actor_train"] if c.placement.layout.strategy.vpp == 2]:
        place = candidate.placement.layout
        one = Layout(place.mesh, replace(place.strategy, vpp=1))
        other = planner.calls.of(planner.graph["actor_train"], one)
        assert one not in plain and (other.cost.seconds > candidate.cost.seconds or other.bytes > capacity)
    found = planner.search()
    assert found.plan["actor_train"].layout.strategy.vpp == 2 and planner.fits(found.plan)
    required = {"actor_train": one}
    others = {name: some[0].placement.layout for name, some in table.items()}
    again = planner.candidates([others | required])
    assert one in {c.placement.layout for c in again["actor_train"]}, "layouts of given plans are kept"


def test_a_search_chooses_between_weights_in_copies_and_in_shares() -> None:
    """Copies fit on few workers of the mesh; a search with both has the plans of either."""
    large = replace(TOY, memory=0.7 * 573e6 / (1 - TOY.reserve_fraction))
    planners = {stage: ppo_planner(4, large, WIDE, 64, zero_stage=stage) for stage in (1, 3, "auto")}
    training = {stage: {str(c.placement.layout.strategy) for c in planner.candidates([])["actor_train"]}
                for stage, planner in planners.items()}  # fmt: skip
    assert training["auto"] == training[1] | training[3] and "d4t1p1z3" in training[3] - training[1]
    generating = planners["auto"].candidates([])["actor_gen"]
    assert not any(candidate.placement.layout.strategy.zero3 for candidate in generating)
    found = {stage: planner.search() for stage, planner in planners.items()}
    assert found["auto"].plan["actor_train"].layout.strategy.zero3
    assert found["auto"].seconds < 0.98 * found[1].seconds and found["auto"].seconds <= found[3].seconds
    roomy = {stage: ppo_planner(4, replace(TOY, memory=1e12), WIDE, 8, zero_stage=stage) for stage in (1, "auto")}
    assert roomy["auto"].search().seconds == roomy[1].search().seconds


def test_a_rule_shares_weights_if_copies_are_too_large() -> None:
    tight = replace(TOY, memory=421e6 / (1 - TOY.reserve_fraction))
    rooms = {"tight": tight, "roomy": replace(TOY, memory=1e12)}
    free, copies = ({room: ppo_planner(4, machine, WIDE, 8, zero_stage=stage) for room, machine in rooms.items()}
                    for stage in ("auto", 1))  # fmt: skip
    plans = {room: planner.by_heuristic("symmetric") for room, planner in free.items()}
    assert plans["tight"]["actor_train"].layout.strategy.zero3 and free["tight"].fits(plans["tight"])
    assert plans["roomy"] == copies["roomy"].by_heuristic("symmetric")
    slower = copies["tight"].predict(copies["tight"].by_heuristic("symmetric")).seconds
    assert free["tight"].predict(plans["tight"]).seconds < slower


def test_a_long_tail_delays_the_step_unless_other_calls_overlap_with_it() -> None:
    """Generation on two workers, everything else on the others, with the same mean length with and without a tail."""
    steps, sums = dict[tuple[bool, int], float](), dict[bool, float]()
    for is_tail, lengths in ((False, (40,)), (True, (20,) * 15 + (340,))):
        rows = Workload(((400,),), lengths, 2)
        planner = ppo_planner(4, replace(TOY, kernel=1e-6), workload=rows)
        names = [mfc.name for mfc in planner.graph.mfcs]
        places = {name: Placement(layout("d2", 0 if name == "actor_gen" else 2)) for name in names}
        plan = ExecutionPlan(4, places)
        for staleness in (0, 1):
            steps[is_tail, staleness] = replace(planner, max_staleness=staleness).predict(plan).seconds
        sums[is_tail] = sum(compute for compute, _ in planner.predict(plan).call_seconds.values())
    assert sums[True] > 1.5 * sums[False]
    # the calls of a step follow one another, and all wait for the longest response
    assert steps[True, 0] - steps[False, 0] == pytest.approx(sums[True] - sums[False], rel=0.02)
    assert all(steps[is_tail, 1] <= steps[is_tail, 0] for is_tail in (False, True))


def test_without_data_all_steps_are_equal() -> None:
    planner = ppo_planner(2, workload=Workload(((20,),), (24,)))
    timeline = planner.predict(planner.by_heuristic("symmetric")).timeline
    ends = timeline.step_ends
    assert ends[2] - ends[1] == pytest.approx(ends[1] - ends[0])
