"""Memory against hand computations: weights, optimizer, activations, caches, copies, offloading."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, LoraOptions, OptimizerConfig, OptimizerType
from realhf.api.config.choices import Backend, Quantization, Recompute
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.graph import Graph
from realhf.api.layout import ParallelStrategy
from realhf.api.machine import Workload
from realhf.api.model_config import Lora
from realhf.arch.param_specs import param_specs
from realhf.plan.cost.cost import BatchRows
from realhf.plan.cost.memory import SERVER_BYTES, Bytes, MemoryModel, pipelined_bytes
from realhf.plan.cost.speed import Work, chunk_shards, shard_numels, stage_shards
from realhf.plan.machines.roofline import AnalyticMemory
from tests.plan.search.planners import LLAMA, layout, ppo_planner
from tests.scaling import examples

NUMEL = sum(spec.numel for spec in param_specs(LLAMA))
D1, D2, T2P2 = (ParallelStrategy.parse(text) for text in ("d1", "d2", "t2p2"))
ANALYTIC = AnalyticMemory("cuda")


def memory_model(**options: object) -> MemoryModel:
    return ppo_planner(**options).calls.memory  # type: ignore[arg-type]


def rows(n: int, length: int = 20, minibatches: int = 1) -> BatchRows:
    numbers = tuple(i * minibatches // n for i in range(n))
    return BatchRows(tuple(RowId(i, 0) for i in range(n)), (length,) * n, numbers)


def test_number_of_parameters() -> None:
    block = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160 + 2 * 64
    assert 2 * 120 * 64 + 4 * block + 64 == NUMEL


@pytest.mark.parametrize(("dp", "bf16"), [(1, False), (2, False), (1, True), (4, True)])
def test_resident_bytes_of_a_trained_role(dp: int, bf16: bool) -> None:
    found = memory_model(bf16=bf16).resident("actor", ParallelStrategy(dp=dp))
    state = 8 + (4 if bf16 else 0)  # moments, a float32 copy
    assert found == Bytes(weights=(2 if bf16 else 4) * NUMEL, gradients=4 * NUMEL, optimizer=NUMEL / dp * state)


@pytest.mark.parametrize("bf16", [False, True])
def test_offloaded_optimizer_state_passes_through_the_device(bf16: bool) -> None:
    """It is on the device during a training call; it is smaller than a chunk."""
    kept, offloaded = (
        memory_model(bf16=bf16, device="cuda", optimizer=OptimizerConfig(offload=o)) for o in (False, True)
    )
    state = NUMEL / 2 * (12 if bf16 else 8)
    assert offloaded.resident("actor", D2) == replace(kept.resident("actor", D2), optimizer=0.0)
    train, where = kept.graph["actor_train"], Placement(layout("d2"), MicroBatching())
    calls = [model.transient(train, where, [rows(2), rows(2)], layout("d2")) for model in (kept, offloaded)]
    assert calls[1] == replace(calls[0], optimizer=state)


def test_chunks_of_offloaded_state_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.plan.cost.memory.OPTIMIZER_CHUNK_NUMEL", 1000)
    model = memory_model(bf16=True, device="cuda", optimizer=OptimizerConfig(offload=True))
    train, where = model.graph["actor_train"], Placement(layout("d1"), MicroBatching())
    assert model.transient(train, where, [rows(2)], layout("d1")).optimizer == 2 * 1000 * 12


def test_resident_bytes_of_a_frozen_role() -> None:
    assert memory_model().resident("ref", D2) == Bytes(weights=4 * NUMEL)
    assert memory_model().resident("ref", T2P2) == Bytes(weights=4 * max(shard_numels(LLAMA, T2P2)))
    frozen = memory_model(optimizer=OptimizerConfig(type=OptimizerType.none))
    assert frozen.resident("actor", D1) == Bytes(weights=4 * NUMEL)


def test_moving_average_of_bf16_weights_has_a_float32_master() -> None:
    follows = {"ref_ema_eta": 0.1}
    assert memory_model(bf16=True, options=follows).resident("ref", D1) == Bytes(weights=(2 + 4) * NUMEL)
    assert memory_model(options=follows).resident("ref", D1) == Bytes(weights=4 * NUMEL)


def transient(model: MemoryModel, mfc: str, text: str, some: BatchRows, limits: MicroBatching, home: str = "") -> Bytes:
    where = layout(text)
    return model.transient(model.graph[mfc], Placement(where, limits), [some], layout(home or text))


def test_experts_take_less_memory_with_their_degree() -> None:
    """Weights, gradients and optimizer state of experts fall as 1/ep; other state is divided by all replicas."""
    routed = replace(LLAMA, n_experts=8, experts_per_token=2, expert_intermediate=160)
    model, experts = memory_model(actor=routed), sum(spec.numel for spec in param_specs(routed) if spec.is_expert)
    rest = sum(spec.numel for spec in param_specs(routed)) - experts
    for text, ep in (("d8", 1), ("d8e2", 2), ("d8e4", 4), ("d8e8", 8)):
        found = model.resident("actor", ParallelStrategy.parse(text))
        assert found.weights == found.gradients == 4 * (rest + experts / ep)
        assert found.optimizer == 8 * (rest + experts) / 8


def test_inference_takes_its_largest_micro_batch() -> None:
    (part,) = stage_shards(LLAMA, memory_model().roles["ref"], D1)
    some, limits = rows(10), MicroBatching(max_tokens_per_mb=60)
    expected = ANALYTIC.forward_bytes(part, Work.of([20] * 3))
    assert transient(memory_model(), "ref_inf", "d1", some, limits) == Bytes(activations=expected)
    assert transient(memory_model(), "rew_inf", "d1", rows(1), limits).activations > 0


def test_shared_prompts_count_once() -> None:
    (part,) = stage_shards(LLAMA, memory_model().roles["ref"], D1)
    ids = tuple(RowId(0, sample) for sample in range(4))
    some = BatchRows(ids, (20,) * 4, (0,) * 4)
    model = replace(memory_model(workload=Workload(((8,),), (12,), 4)), share_prompts=True)
    expected = ANALYTIC.forward_bytes(part, Work.of([8, *[12] * 4], before=[0, *[8] * 4]))
    assert transient(model, "ref_inf", "d1", some, MicroBatching()) == Bytes(activations=expected)
    assert transient(model, "actor_train", "d1", some, MicroBatching()).activations < (
        transient(replace(model, share_prompts=False), "actor_train", "d1", some, MicroBatching()).activations
    )


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_training_saves_all_micro_batches_in_flight(pp: int) -> None:
    """1F1B: stage s of pp has pp - s micro-batches in flight at its first backward pass."""
    model = memory_model()
    parts = stage_shards(LLAMA, model.roles["actor"], ParallelStrategy(pp=pp))
    some, limits = rows(16, minibatches=2), MicroBatching(max_tokens_per_mb=40)
    peaks = []
    for stage, part in enumerate(parts):
        kept, peak = ANALYTIC.train_bytes(part, Work.of([20] * (2 if pp < 4 else 1)))  # at least 2 * pp micro-batches
        peaks.append(kept * (pp - 1 - stage) + peak)
    assert transient(model, "actor_train", f"p{pp}", some, limits) == Bytes(activations=max(peaks))


def test_interleaved_stages_have_more_passes_in_flight() -> None:
    """Narayanan et al. 2021, section 2.2: five passes at the first of two stages, three at the last."""
    model = memory_model()
    some, limits = rows(16, minibatches=2), MicroBatching(max_tokens_per_mb=40)
    parts = chunk_shards(LLAMA, model.roles["actor"], ParallelStrategy(pp=2, vpp=2))
    sizes = [ANALYTIC.train_bytes(part, Work.of([20, 20])) for part in parts]
    first = 3 * sizes[0][0] + sizes[2][0] + sizes[0][1]  # four of its first chunk, which keeps more, and one
    last = 2 * sizes[1][0] + sizes[3][1]
    peaks = pipelined_bytes(ANALYTIC, parts, Work.of([20, 20]), 2)
    assert peaks == pytest.approx([first, last])
    assert transient(model, "actor_train", "p2v2", some, limits).activations == pytest.approx(max(peaks))


def test_recomputation_saves_memory() -> None:
    some, limits = rows(4), MicroBatching()
    selective = {"gradient_checkpointing": True, "recompute_granularity": Recompute.selective}
    kept, recomputed, some_recomputed, short = (
        transient(memory_model(**options), "actor_train", "d1", some, limits).activations
        for options in ({}, {"gradient_checkpointing": True}, selective, {"bf16": True})
    )
    assert recomputed < kept / 2 and short < kept and recomputed < some_recomputed < 0.9 * kept


@pytest.mark.parametrize(("slots", "limits", "expected"), [(64, 0, 6), (4, 0, 4), (64, 3, 3)])
def test_kv_cache_covers_all_slots(slots: int, limits: int, expected: int) -> None:
    sampling = GenerationConfig(max_new_tokens=24, max_num_seqs=slots)
    model = memory_model(workload=Workload(((10,),), (24,), 2), options={"gen": sampling})
    prompts = BatchRows(tuple(RowId(i, PROMPT) for i in range(3)), (10, 7, 10), (0, 0, 0))
    found = transient(model, "actor_gen", "d1", prompts, MicroBatching(max_num_seqs=limits))
    assert found.kv_cache == 2 * 4 * 4 * 8 * expected * (10 + 24) * 4  # two of four blocks, four heads of eight
    half = transient(model, "actor_gen", "t2p2", prompts, MicroBatching(max_num_seqs=limits))
    assert half.kv_cache == found.kv_cache / 4
    assert found.buffers == 8 * expected * LLAMA.vocab


def test_fused_decoding_copies_weights() -> None:
    model, prompts = memory_model(), BatchRows((RowId(0, PROMPT),), (10,), (0,))
    for own, copied in (({"head_dim": 16}, True), ({"head_dim": 12, "activation": "relu"}, False)):
        model = replace(model, models={role: replace(config, **own) for role, config in model.models.items()})
        for name in ("d1", "p2", "t2"):
            apart, fused = (
                transient(replace(model, share_prompts=shares), "actor_gen", name, prompts, MicroBatching()).buffers
                for shares in (False, True)
            )
            assert fused - apart == (model.weights("actor", ParallelStrategy.parse(name)) if copied else 0)


def test_served_calls_have_a_server_process() -> None:
    model = replace(memory_model(), server_cache=3e8, device="cpu")
    native = plan(actor_gen="d2")
    placed = replace(native["actor_gen"], backend=Backend.vllm)
    served = replace(native, placements={**native.placements, "actor_gen": placed})
    calls = {mfc.name: [rows(4)] * 2 for mfc in model.graph.mfcs}
    plain, found = (model.devices(one, calls) for one in (native, served))
    weights = model.weights("actor", ParallelStrategy(2))
    for rank in found:
        on_it = rank in placed.layout.mesh.ranks
        assert found[rank].server == (weights + 3e8 + SERVER_BYTES if on_it else 0.0) and plain[rank].server == 0.0
    taken = model.transient(model.graph["actor_gen"], placed, [rows(4)], placed.layout)
    assert taken == Bytes(borrowed=weights), "the server has cache and logits"
    gpu = replace(model, device="cuda")
    assert (
        gpu.transient(model.graph["actor_gen"], placed, [rows(4)], placed.layout) == Bytes()
    )  # no copy of the weights
    sleeping = replace(gpu, server_sleeps=True)
    taken = sleeping.transient(model.graph["actor_gen"], placed, [rows(4)], placed.layout)
    assert taken == Bytes(server=weights + 3e8)
    waking, asleep = (m.devices(served, calls) for m in (gpu, sleeping))
    for rank in placed.layout.mesh.ranks:
        assert waking[rank].server == weights + 3e8 + SERVER_BYTES and asleep[rank].total <= waking[rank].total


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_served_adapters_need_no_copy_of_the_weights(device: str) -> None:
    hot = replace(memory_model(), server_cache=3e8, device=device)
    hot = replace(hot, models={**hot.models, "actor": replace(hot.models["actor"], lora=Lora(4, 8.0))})
    placed, strategy = replace(plan(actor_gen="d2")["actor_gen"], backend=Backend.vllm), ParallelStrategy(2)
    gen, home = hot.graph["actor_gen"], placed.layout
    assert hot.transient(gen, placed, [rows(4)], home) == Bytes()
    assert hot.transient(gen, placed, [rows(4)], layout("d1")) == Bytes(borrowed=hot.weights("actor", strategy))
    merged = replace(hot, merge_lora=True)
    assert merged.transient(gen, placed, [rows(4)], home) == Bytes(borrowed=hot.model("actor", strategy))
    adapters = 3 * hot.weights("actor", strategy)  # with zeros up to rank 8, and as they were loaded
    sizes = [one._server_contents("actor", strategy, allocated=True) for one in (hot, merged)]
    assert sizes == [hot.model("actor", strategy) + adapters + 3e8, hot.model("actor", strategy) + 3e8]


def test_weights_in_another_layout_are_borrowed() -> None:
    some, limits = rows(4), MicroBatching()
    at_home = transient(memory_model(), "critic_inf", "t2", some, limits)
    away = transient(memory_model(), "critic_inf", "t2", some, limits, home="d2")
    critic = shard_numels(replace(LLAMA, head="scalar"), ParallelStrategy(tp=2))[0]
    assert away == at_home + Bytes(borrowed=4 * critic) and at_home.borrowed == 0


def plan(**places: str) -> ExecutionPlan:
    names = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train")
    spots = {name: places.get(name, "d2").split("@") for name in names}
    return ExecutionPlan(4, {n: Placement(layout(text, int((at or ["0"])[0]))) for n, (text, *at) in spots.items()})


def test_peak_is_resident_bytes_plus_largest_call() -> None:
    planner = ppo_planner()
    model, where = planner.calls.memory, plan(actor_gen="t2@2", critic_train="d1@3", critic_inf="d1@3")
    calls = {m.name: planner.calls.rows(m, where[m.name].layout.strategy.dp) for m in planner.graph.mfcs}
    found = model.devices(where, calls)
    homes = {"actor": (0, 1), "critic": (3,), "ref": (0, 1), "rew": (0, 1)}
    taken = {m.name: model.transient(m, where[m.name], calls[m.name], layout("d2")) for m in planner.graph.mfcs}
    taken["critic_train"] = model.transient(model.graph["critic_train"], where["critic_train"],
                                            calls["critic_train"], layout("d1", 3))  # fmt: skip
    for rank, expected in ((0, "actor_train"), (2, "actor_gen"), (3, "critic_train")):
        residents = sum(model.resident(role, D2 if role != "critic" else D1).total
                        for role, ranks in homes.items() if rank in ranks)  # fmt: skip
        assert found[rank].total == pytest.approx(residents + taken[expected].total + 1e6)
    assert found[2].borrowed == 4 * shard_numels(LLAMA, ParallelStrategy(tp=2))[0] and found[2].weights == 0
    assert all(some.runtime == 1e6 for some in found.values())


@pytest.mark.parametrize("bits", (8, 4))
def test_a_quantized_base_takes_less_memory_and_more_time(bits: int) -> None:
    """Its calls need memory for one dequantized product, and decoding on a CPU needs no packed copies."""
    options = LoraOptions(rank=4, quantization=Quantization(f"int{bits}"))
    fusable = replace(LLAMA, n_heads=4, n_kv_heads=2, head_dim=16)
    models = [replace(fusable, lora=lora) for lora in (Lora(4), Lora(4, 1.0, (), bits, 32))]
    planners = [ppo_planner(1, actor=model, device="cpu", lora=options) for model in models]
    plain, small = ([planner.calls.memory.base(role, D1) for role in ("actor", "ref")] for planner in planners)
    matrices = 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 160)
    assert small == [bytes_ - matrices * (4 - bits / 8 - 4 / 32) for bytes_ in plain]
    where, calls = Placement(layout("d1"), MicroBatching()), [rows(2)]
    for name in ("actor_train", "ref_inf", "actor_gen"):
        mfc = planners[0].graph[name]
        before, after = (
            replace(planner.calls.memory, share_prompts=True).transient(mfc, where, calls, layout("d1"))
            for planner in planners
        )
        copies = 4 * NUMEL if name == "actor_gen" else 0
        assert after == replace(before, buffers=before.buffers - copies + 4 * 2 * 64 * 160)
    shards = [stage_shards(model, planners[0].calls.memory.roles["actor"], D1)[0] for model in models]
    before_s, after_s = ((speed.forward(shard, Work.of((16,)), (0,)), speed.decode(shard, 4, 16.0, (0,)))
                         for shard in shards for speed in [planners[0].calls.cost.speed])  # fmt: skip
    assert all(one < other for one, other in zip(before_s, after_s, strict=True))


def test_ring_bytes_stay_with_participants_of_a_reallocation() -> None:
    planner = ppo_planner(device="cpu")
    model, where = planner.calls.memory, plan(actor_gen="t2@2", critic_inf="t2")
    calls = {m.name: planner.calls.rows(m, where[m.name].layout.strategy.dp) for m in planner.graph.mfcs}
    found, without = (m.devices(where, calls) for m in (model, replace(model, device="cuda")))
    far, near = (
        model.ring_bytes("actor", layout("d2"), layout("t2", 2)),
        model.ring_bytes("critic", layout("d2"), layout("t2")),
    )
    assert far > 0 == near  # local copies use no rings
    assert [found[r].total - without[r].total for r in range(4)] == pytest.approx([far] * 4)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_offloaded_weights_are_resident_during_calls(device: str) -> None:
    planner = ppo_planner(device=device)
    model, where = planner.calls.memory, plan(rew_inf="d1@2")
    calls = {m.name: planner.calls.rows(m, where[m.name].layout.strategy.dp) for m in planner.graph.mfcs}
    offloading = replace(model, graph=Graph(model.graph.mfcs, offloaded=("ref", "rew")))
    before, after = model.devices(where, calls), offloading.devices(where, calls)
    weights = 4 * NUMEL
    if device == "cpu":  # host and device memory are the same
        assert before == after
        return
    assert after[0].weights == before[0].weights - weights and after[0].activations == before[0].activations
    assert after[2] == before[2]  # it has only the reward model, which is loaded at its peak
    assert max(b.total for b in after.values()) < max(b.total for b in before.values())


@settings(max_examples=examples(40))
@given(st.lists(st.floats(0, 1e12), min_size=8, max_size=8), st.lists(st.floats(0, 1e12), min_size=8, max_size=8))
def test_bytes_are_added_by_purpose(one: list[float], other: list[float]) -> None:
    both = Bytes(*one) + Bytes(*other)
    assert both == Bytes(*(a + b for a, b in zip(one, other, strict=True)))
    assert both.total == pytest.approx(sum(one) + sum(other))
