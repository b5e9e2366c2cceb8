"""Costs of calls against hand computations: arithmetic, pipeline bubbles, collectives, decoding."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, OptimizerConfig
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.api.layout import ParallelStrategy
from realhf.api.machine import Cost, EnvironmentLoad, Hardware, Link, Workload
from realhf.api.messages import PrepareCall
from realhf.api.model_config import ModelConfig
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.arch.flops import forward_flops
from realhf.arch.param_specs import param_specs
from realhf.plan.cost.cost import BatchRows, CostModel, mfc_works, works_of
from realhf.plan.cost.speed import CollectiveKind, Traffic, Work, shard_numels, slowest_of, stage_shards
from realhf.plan.cost.traffic import realloc_traffic
from realhf.plan.machines.roofline import Roofline
from realhf.plan.search.simulate import simulate
from realhf.plan.train_schedule import TrainSchedule
from tests.plan.search.planners import COMPUTE_ONLY, CRITIC, FREE, LLAMA, TOY, JitteringSpeed, layout, ppo_planner
from tests.scaling import examples

STRATEGIES = ("d1", "d2", "t2", "p2", "d2p2", "t4", "p4", "d4")


def cost_model(hardware: Hardware = COMPUTE_ONLY, actor: ModelConfig = LLAMA, **options: object) -> CostModel:
    return ppo_planner(hardware=hardware, actor=actor, **options).calls.cost  # type: ignore[arg-type]


def equal_rows(dp: int, n: int = 16, length: int = 30, minibatches: int = 2) -> tuple[BatchRows, ...]:
    """Return ``n`` rows of one length, distributed over ``dp`` ranks and mini-batches."""
    numbers = tuple(i * minibatches // n for i in range(n))
    return tuple(
        BatchRows(tuple(RowId(i, 0) for i in range(d, n, dp)), (length,) * len(range(d, n, dp)), numbers[d::dp])
        for d in range(dp)
    )


def seconds(cost: CostModel, mfc: str, text: str, rows: Sequence[BatchRows] = (), limits: int = 4096) -> float:
    where = layout(text)
    placement = Placement(where, MicroBatching(max_tokens_per_mb=limits))
    return cost.compute(cost.graph[mfc], placement, rows or equal_rows(where.strategy.dp)).seconds


def test_inference_costs_its_operations_on_the_busiest_rank() -> None:
    cost = cost_model()
    predicted = [30 - n for n in cost.workload.prompt_lengths(range(16))]
    expected = forward_flops(LLAMA, [30] * 16, head_tokens=sum(predicted)) / 1e12
    assert seconds(cost, "ref_inf", "d1") == pytest.approx(expected)
    uneven = (equal_rows(1, n=3)[0], equal_rows(1, n=5)[0])
    expected = forward_flops(LLAMA, [30] * 5, head_tokens=sum(predicted[:5])) / 1e12
    assert seconds(cost, "ref_inf", "d2", uneven) == pytest.approx(expected)


ROUTED = replace(LLAMA, n_experts=8, experts_per_token=2, expert_intermediate=160)


def test_replicas_that_divide_experts_exchange_their_tokens() -> None:
    """Rows of two experts per token, one way and back in four blocks; training does so twice. Three quarters leave."""
    linked = replace(COMPUTE_ONLY, node=Link(1e6, 0.0))
    cost, free = cost_model(linked, actor=ROUTED), cost_model(COMPUTE_ONLY, actor=ROUTED)
    tokens, numbers = 16 * 30 / 4 * 2 * 64 * 4 * 3 / 4, 8 * 8 * 3 / 4
    exchanged = seconds(cost, "ref_inf", "d4e4") - seconds(free, "ref_inf", "d4e4")
    assert exchanged == pytest.approx(4 * (2 * tokens + numbers) / 1e6)
    assert seconds(cost, "ref_inf", "d4") == seconds(free, "ref_inf", "d4")
    assert seconds(cost, "ref_inf", "d2t2e2") - seconds(free, "ref_inf", "d2t2e2") == pytest.approx(
        seconds(cost, "ref_inf", "d2t2") - seconds(free, "ref_inf", "d2t2")
    )


def test_gradients_of_divided_experts_are_summed_over_fewer_replicas() -> None:
    linked, traffic = replace(COMPUTE_ONLY, node=Link(1e6, 0.0)), {}
    cost = cost_model(linked, actor=ROUTED)
    experts = sum(spec.numel for spec in param_specs(ROUTED) if spec.is_expert)
    for text in ("d4", "d4e2", "d4e4"):
        where = layout(text)
        placement = Placement(where, MicroBatching())
        rows = [(r.ids, r.lengths) for r in equal_rows(4)]
        traffic[text] = cost._update(cost.graph["actor_train"], placement, rows)
    saved = {text: (traffic["d4"] - traffic[text]) * 1e6 / (2 * 4) for text in traffic}
    assert saved["d4e4"] == pytest.approx(3 / 4 * experts)
    assert saved["d4e2"] == pytest.approx(3 / 4 * experts - 1 / 2 * experts / 2)


@pytest.mark.parametrize("bf16", [False, True])
def test_offloaded_optimizer_state_takes_the_time_of_the_bus(bf16: bool) -> None:
    bus = replace(TOY, host=Link(bandwidth=1e6, latency=0.0))
    kept, offloaded = (cost_model(bus, bf16=bf16, optimizer=OptimizerConfig(offload=o)) for o in (False, True))
    numel = shard_numels(LLAMA, ParallelStrategy())[0]
    (part,) = stage_shards(LLAMA, kept.roles["actor"], layout("d1").strategy)
    more = numel * (12 if bf16 else 8) / 1e6 - kept.speed.optimizer(part, numel)
    assert more > 0
    found = seconds(offloaded, "actor_train", "d1") - seconds(kept, "actor_train", "d1")
    assert found == pytest.approx(2 * more), "of two mini-batches"


@pytest.mark.parametrize("dp", [2, 4])
def test_data_parallelism_divides_arithmetic_and_adds_collectives(dp: int) -> None:
    alone = seconds(cost_model(), "critic_train", "d1")
    # the head skips prompts, whose lengths differ: that of a critic is small
    assert seconds(cost_model(), "critic_train", f"d{dp}") == pytest.approx(alone / dp, rel=1e-4)
    linked = replace(COMPUTE_ONLY, node=TOY.node)
    numel, ranks, speed = shard_numels(CRITIC, ParallelStrategy())[0], tuple(range(dp)), Roofline(linked)
    step = speed.collective(CollectiveKind.REDUCE_SCATTER, 4 * numel, ranks)
    step += speed.collective(CollectiveKind.ALL_GATHER, 4 * numel, ranks)
    step += speed.collective(CollectiveKind.ALL_REDUCE, 8, ranks)  # the norm
    step += 2 * speed.collective(CollectiveKind.ALL_REDUCE, 64, ranks)  # the denominator, and the decision to skip
    assert seconds(cost_model(linked), "critic_train", f"d{dp}") == pytest.approx(alone / dp + 2 * step, rel=1e-4)
    short = cost_model(linked, bf16=True)
    gathered = speed.collective(CollectiveKind.ALL_GATHER, 2 * numel, ranks)
    saved = speed.collective(CollectiveKind.ALL_GATHER, 4 * numel, ranks) - gathered
    assert seconds(short, "critic_train", f"d{dp}") == pytest.approx(alone / dp + 2 * (step - saved), rel=1e-4)


@pytest.mark.parametrize("pp", [2, 4])
def test_equal_stages_have_the_bubble_of_their_schedule(pp: int) -> None:
    cost = cost_model(actor=CRITIC)
    whole, n = seconds(cost, "critic_train", "d1"), 2 * pp  # micro-batches of each mini-batch
    # the head of one number is the stages' only difference
    assert seconds(cost, "critic_train", f"p{pp}") == pytest.approx(whole * (n + pp - 1) / n / pp, rel=5e-3)
    whole = seconds(cost, "critic_inf", "d1")
    assert seconds(cost, "critic_inf", f"p{pp}") == pytest.approx(whole * (2 * pp - 1) / pp / pp, rel=5e-3)
    finer = seconds(cost, "critic_train", f"p{pp}", limits=30)  # eight micro-batches of a row each
    assert finer == pytest.approx(seconds(cost, "critic_train", "d1") * (8 + pp - 1) / 8 / pp, rel=5e-3)


@pytest.mark.parametrize("pp, vpp", [(2, 2), (2, 4), (4, 2)])
def test_interleaved_stages_have_the_bubble_of_their_schedule(pp: int, vpp: int) -> None:
    cost, text = cost_model(actor=replace(CRITIC, n_layers=8)), f"p{pp}v{vpp}"
    whole, n = seconds(cost, "critic_train", "d1"), 2 * pp
    expected = whole * (n + (pp - 1) / vpp) / n / pp
    assert seconds(cost, "critic_train", text) == pytest.approx(expected, rel=5e-3)
    finer = seconds(cost, "critic_train", text, limits=30)
    assert finer == pytest.approx(whole * (8 + (pp - 1) / vpp) / 8 / pp, rel=5e-3)
    whole = seconds(cost, "critic_inf", "d1")
    assert seconds(cost, "critic_inf", text) == pytest.approx(whole * (pp + (pp - 1) / vpp) / pp / pp, rel=5e-3)


def test_interleaved_stages_have_multiples_of_micro_batches() -> None:
    cost = cost_model(actor=replace(CRITIC, n_layers=8))
    rows, limits = equal_rows(1, n=22, minibatches=1)[0].of_minibatch(0), MicroBatching(max_tokens_per_mb=60)
    counts = {
        (call, text): len(
            mfc_works(cost.graph[call], CRITIC, Placement(layout(text), limits), rows, cost.workload, False)
        )
        for call in ("critic_train", "critic_inf")
        for text in ("p4", "p4v2")
    }
    assert counts.pop(("critic_train", "p4v2")) == 12 and set(counts.values()) == {11}


def test_interleaved_stages_send_more() -> None:
    linked = replace(COMPUTE_ONLY, node=Link(1e6, 0.0))
    times = {text: seconds(cost_model(linked), "actor_train", text) for text in ("p2", "p2v2")}
    assert times["p2v2"] > times["p2"]


def test_activations_travel_between_stages() -> None:
    far = replace(COMPUTE_ONLY, node=TOY.node, node_size=1, cluster=TOY.cluster)
    hop = TOY.cluster.seconds(4 * 30 * LLAMA.hidden * 4)  # of eight rows in two micro-batches
    rows = equal_rows(1, n=8)
    added = seconds(cost_model(far), "ref_inf", "p2", rows) - seconds(cost_model(), "ref_inf", "p2", rows)
    assert added == pytest.approx(hop)


def test_core_seconds_are_bounded_by_the_number_of_workers() -> None:
    cost = cost_model(TOY)
    for mfc in cost.graph.mfcs:
        for text in STRATEGIES:
            where = layout(text)
            rows = equal_rows(where.strategy.dp) if mfc.kind is not Kind.GENERATE else prompts_on(where.strategy.dp)
            found = cost.compute(mfc, Placement(where), rows)
            assert 0 < found.core_seconds <= found.seconds * where.strategy.world * (1 + 1e-9), (mfc.name, text)
            if text == "d1":
                assert found.core_seconds == pytest.approx(found.seconds)


def test_ranks_without_rows_cost_nothing() -> None:
    cost, empty = cost_model(), BatchRows((), (), ())
    for mfc in ("ref_inf", "actor_train"):
        some = equal_rows(1, n=4)[0]
        assert seconds(cost, mfc, "d2", (some, empty)) == pytest.approx(seconds(cost, mfc, "d1", (some,)))
    assert seconds(cost, "actor_gen", "d2", (*prompts_on(1), empty)) == seconds(cost, "actor_gen", "d1", prompts_on(1))


@pytest.mark.parametrize(("text", "n_alone"), [("d1", 1), ("d2", 2), ("p2", 2), ("d2p2", 4), ("t4", 1), ("d4", 4)])
def test_a_call_ends_with_its_slowest_worker(text: str, n_alone: int) -> None:
    cost = cost_model(TOY)
    jittering = replace(cost, speed=JitteringSpeed(TOY))
    for mfc in ("ref_inf", "actor_train"):
        expected = slowest_of(n_alone, 0.1) * seconds(cost, mfc, text)
        assert seconds(jittering, mfc, text) == pytest.approx(expected)


def prompts_on(dp: int, n: int = 4) -> tuple[BatchRows, ...]:
    """Return prompts like those of the workload of ``ppo_planner``."""
    lengths = (16, 10, 13)
    return tuple(
        BatchRows(tuple(RowId(p, PROMPT) for p in range(d, n, dp)), tuple(lengths[p % 3] for p in range(d, n, dp)),
             (0,) * len(range(d, n, dp)))
        for d in range(dp)
    )  # fmt: skip


def generating(responses: tuple[int, ...], samples: int = 1, slots: int = 64, hardware: Hardware = TOY) -> CostModel:
    workload = Workload(((4,),), responses, samples)
    options = {"gen": GenerationConfig(max_new_tokens=max(responses), max_num_seqs=slots)}
    return cost_model(hardware, workload=workload, options=options)


def generation(cost: CostModel, n_prompts: int, text: str = "d1") -> float:
    rows = BatchRows(tuple(RowId(p, PROMPT) for p in range(n_prompts)), (4,) * n_prompts, (0,) * n_prompts)
    return seconds(cost, "actor_gen", text, (rows,))


def test_generation_by_hand() -> None:
    """Prompts of 4, responses of 3 and 5: two steps for both rows, two more for the longer one."""
    speed, cost = Roofline(TOY), generating((3, 5))
    (part,) = stage_shards(LLAMA, cost.roles["actor"], layout("d1").strategy)
    prefill = speed.forward(replace(part, last=False), Work.of([4, 4]), (0,))
    prefill += speed.decode(replace(part, n_blocks=0, first=False), 2, 0, (0,))
    steps = 2 * speed.decode(part, 2, 5 + 1, (0,)) + 2 * speed.decode(part, 1, 7 + 1, (0,))
    outside = speed.interface("ppo_actor/generate", 2, 8)
    assert generation(cost, 2) == pytest.approx(prefill + steps + outside)
    assert generation(generating((3, 5)), 2) < generation(generating((5, 5)), 2)
    one_by_one = generation(generating((3,), slots=1), 1) + generation(generating((5,), slots=1), 1) - outside
    assert generation(generating((3, 5), slots=1), 2) == pytest.approx(one_by_one)


def test_a_long_tail_costs_more_than_its_mean() -> None:
    """Responses of 2, 2, 2 and 10 tokens: one step for four rows, eight for the last; of 4 each: three for four rows.

    Steps of a small model are as long for one row as for four: nine steps cost three times as much as three.
    """
    constant = replace(COMPUTE_ONLY, flops=FREE, kernel=1e-3)
    speed, tail, equal = Roofline(constant), generating((2, 2, 2, 10), hardware=constant), generating((4,))
    equal = replace(equal, speed=speed)
    (part,) = stage_shards(LLAMA, tail.roles["actor"], layout("d1").strategy)
    step = speed.decode(part, 1, 5, (0,))
    assert step == pytest.approx(speed.decode(part, 4, 5, (0,))) and step > 1e-3
    outside = generation(replace(tail, workload=Workload(((4,),), (1,))), 4)  # prefill samples the first token
    assert generation(tail, 4) - outside == pytest.approx(9 * step)
    assert generation(equal, 4) - outside == pytest.approx(3 * step)


@pytest.mark.parametrize("n_open", [1, 2, 5, 0])
def test_only_open_episodes_decode_together(n_open: int) -> None:
    responses = (3, 9, 4, 4, 7, 2, 5, 6)
    rollout = replace(generating(responses), environment=EnvironmentLoad(2, 0.0, 1, 1, n_open))
    assert generation(rollout, 8) == generation(generating(responses, slots=n_open or 64), 8)


def test_rollouts_of_several_steps_share_a_long_tail() -> None:
    """Of two steps at once, each takes half of the time of a call with all their rows."""
    cost = generating((2, 2, 2, 10))
    together = replace(cost, rollouts_at_once=2)
    outside = Roofline(TOY).interface("ppo_actor/generate", 8, 32)
    assert generation(together, 4) - outside == pytest.approx((generation(cost, 8) - outside) / 2)
    assert generation(together, 4) < 0.7 * generation(cost, 4)


def test_rows_read_their_own_cache_or_as_much_as_the_longest() -> None:
    """Responses of 3 and 9 tokens and prompts of 4: after two steps one row is left, so that both read the same."""
    wide = generating((3, 9), hardware=replace(TOY, memory_bandwidth=1e9))
    rows = BatchRows((RowId(0, PROMPT), RowId(1, PROMPT)), (4, 200), (0, 0))
    own, padded = (seconds(c, "actor_gen", "d1", (rows,)) for c in (wide, replace(wide, pads_cache=True)))
    (part,) = stage_shards(LLAMA, wide.roles["actor"], layout("d1").strategy)
    two_steps = [2 * Roofline(wide.speed.hardware).decode(part, 2, context + 2, (0,)) for context in (200, 102)]
    assert padded - own == pytest.approx(two_steps[0] - two_steps[1]) and padded > own


def test_prompt_of_a_group_is_prefilled_once() -> None:
    alone, four = generation(generating((8,), 1, hardware=COMPUTE_ONLY), 1), generating((8,), 4, hardware=COMPUTE_ONLY)
    prompt = forward_flops(LLAMA, [4], head_tokens=0) / 1e12
    assert generation(four, 1) == pytest.approx(4 * (alone - prompt) + prompt)


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 5))
def test_generation_time_is_monotonic_in_lengths_and_rows(lengths: list[int], which: int, shorter: int) -> None:
    which %= len(lengths)
    less = [*lengths[:which], max(1, lengths[which] - shorter), *lengths[which + 1 :]]
    n = len(lengths)
    full = generation(generating(tuple(lengths)), n)
    assert generation(generating(tuple(less)), n) <= full * (1 + 1e-9)
    assert n == 1 or generation(generating(tuple(lengths)), n - 1) <= full * (1 + 1e-9)


def test_generation_is_pipelined_over_stages() -> None:
    """Two groups of rows on two stages: a step takes as long as both stages take for half of the rows."""
    cost, speed = generating((9,), hardware=COMPUTE_ONLY), Roofline(COMPUTE_ONLY)
    parts = stage_shards(LLAMA, cost.roles["actor"], layout("p2").strategy)
    step = sum(speed.decode(part, 2, 5 + 4, (0,)) for part in parts)
    slowest = 2 * max(speed.decode(part, 2, 5 + 4, (0,)) for part in parts)
    prefill = forward_flops(LLAMA, [4] * 4, head_tokens=4) / 1e12
    assert generation(cost, 4, "p2") == pytest.approx(prefill + 8 * max(step, slowest))


def test_a_call_without_a_model_costs_only_its_interface() -> None:
    cost = cost_model(TOY)
    judge = MFC("judge", None, Kind.INFERENCE, InterfaceSpec("verifier"), ("tokens",), ("rewards",), 8)
    found = cost.compute(judge, Placement(layout("d2")), equal_rows(2))
    assert found == Cost(100 * TOY.kernel, 200 * TOY.kernel)


def test_reallocation_costs_its_traffic() -> None:
    cost, speed = cost_model(TOY), Roofline(TOY)
    traffic = realloc_traffic(LLAMA, layout("d2"), layout("t2", 2), 4, TOY.node_size)
    found = cost.reallocate("actor", layout("d2"), layout("t2", 2))
    assert found.seconds == speed.exchange(traffic) > 0
    assert found.core_seconds == pytest.approx(found.seconds * traffic.total / traffic.copied)
    short = cost_model(TOY, bf16=True).reallocate("actor", layout("d2"), layout("t2", 2))
    assert 0.4 < short.seconds / found.seconds < 0.6
    assert cost.reallocate("actor", layout("d2"), layout("t2", 2), eta=0.5).seconds >= found.seconds
    assert cost.exchange(Traffic()) == Cost(0.0, 0.0)


def test_offloading_uses_the_host_link() -> None:
    cost = cost_model(TOY)
    numels = shard_numels(LLAMA, ParallelStrategy(tp=2, pp=2))
    assert cost.host_copy("ref", layout("t2p2")).seconds == TOY.host.seconds(4 * max(numels))
    assert cost.host_copy("ref", layout("t2p2")).core_seconds == 4 * cost.host_copy("ref", layout("t2p2")).seconds


def test_every_instruction_of_a_run_has_a_cost() -> None:
    planner = ppo_planner(hardware=TOY)
    cost, graph = planner.calls.cost, replace(planner.graph, offloaded=("rew",))
    places = {"actor_gen": "d4", "rew_inf": "d1", "ref_inf": "t2", "critic_inf": "p2", "critic_train": "d2",
              "actor_train": "t2p2"}  # fmt: skip
    plan = ExecutionPlan(4, {name: Placement(layout(text)) for name, text in places.items()})
    price, seen = cost.price(plan), dict[type, list[tuple[PrepareCall, Instruction, Cost]]]()

    def recorded(call: PrepareCall, step: Instruction) -> Cost:
        seen.setdefault(type(step), []).append((call, step, price(call, step)))
        return seen[type(step)][-1][2]

    simulate(graph, plan, recorded, TrainSchedule(8, 16, 2), cost.workload)
    assert all(c == Cost(0.0, 0.0) for _, _, c in seen[Release])
    assert {c for _, _, c in seen[Load] + seen[Offload]} == {cost.host_copy("rew", layout("d1"))}
    moved = {s.role: c for _, s, c in seen[Reallocate] if isinstance(s, Reallocate)}
    assert moved == {
        "actor": cost.reallocate("actor", layout("t2p2"), layout("d4")),
        "critic": cost.reallocate("critic", layout("d2"), layout("p2")),
    }
    assert all(c.seconds > 0 for _, _, c in seen[Compute]) and any(c.seconds > 0 for _, _, c in seen[Transfer])


def test_shared_prompts_count_once() -> None:
    """Three responses of 6, 8 and 10 tokens to a prompt of 10, and a single row of 12."""
    ids = (*(RowId(0, sample) for sample in range(3)), RowId(1, 0))
    given = (ids, (16, 18, 20, 12), MicroBatching(1, 100), (10, 10, 10, 8))
    (apart,), (shared,) = works_of(*given), works_of(*given, share_prompts=True)
    assert apart == Work.of([12, 16, 18, 20], predicted=28)
    assert shared == Work(rows=5, runs=4, tokens=46, pairs=55 + 78 + sum(n * (n + 1) // 2 + 10 * n for n in (6, 8, 10)),
                          predicted=28)  # fmt: skip
    cost = cost_model()
    groups = [BatchRows(tuple(RowId(i // 4, i % 4) for i in range(16)), (30,) * 16, (0,) * 16)]
    once = replace(cost, share_prompts=True)
    assert seconds(once, "ref_inf", "d1", groups) < seconds(cost, "ref_inf", "d1", groups)
    assert seconds(once, "actor_train", "d1", groups) < seconds(cost, "actor_train", "d1", groups)


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 6), st.integers(8, 80))
def test_micro_batches_contain_every_row_once(lengths: list[int], n_mbs: int, cap: int) -> None:
    ids = tuple(RowId(i, 0) for i in range(len(lengths)))
    works = works_of(ids, tuple(lengths), MicroBatching(n_mbs, cap), tuple(n // 2 for n in lengths))
    assert sum(w.rows for w in works) == len(lengths) and sum(w.tokens for w in works) == sum(lengths)
    assert sum(w.pairs for w in works) == sum(n * (n + 1) // 2 for n in lengths)
    assert sum(w.predicted or 0 for w in works) == sum(n - n // 2 for n in lengths)
