"""Roofline times against hand computations: compute-bound, memory-bound and communication-bound work."""

from dataclasses import replace
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.config import Recompute
from realhf.api.machine import Link
from realhf.api.model_config import ModelConfig
from realhf.arch.flops import forward_flops, matrix_params
from realhf.arch.param_specs import param_specs
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work
from realhf.plan.machines.engine_traits import EngineTraits, MemoryTraits
from realhf.plan.machines.launches import counted_launches, launches_of
from realhf.plan.machines.roofline import (
    KERNELS_PER_BLOCK,
    OPTIMIZER_BYTES,
    AnalyticMemory,
    Roofline,
    saved_activation_numel,
)
from tests.plan.search.planners import COMPUTE_ONLY, CRITIC, FREE, LLAMA, TOY
from tests.scaling import examples

MOE = replace(LLAMA, n_experts=8, experts_per_token=2, expert_intermediate=48, dense_layers=(1,))
PLAIN = replace(LLAMA, n_kv_heads=8, mlp="ungated", norm="layer", qkv_bias=True, proj_bias=True, mlp_bias=True)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=8)
BYTES_ONLY = replace(COMPUTE_ONLY, flops=FREE, memory_bandwidth=1e11)


def whole(model: ModelConfig, tp: int = 1, bf16: bool = False, recompute: bool = False) -> StageShard:
    return StageShard(model, tp, model.n_layers, first=True, last=True, bf16=bf16, recompute=recompute)


@pytest.mark.parametrize("model", [LLAMA, CRITIC, MOE, PLAIN], ids=["llama", "critic", "moe", "plain"])
@settings(max_examples=examples(25))
@given(lengths=LENGTHS)
def test_compute_bound_passes_cost_their_operations(model: ModelConfig, lengths: list[int]) -> None:
    speed, work = Roofline(COMPUTE_ONLY), Work.of(lengths)
    seconds = forward_flops(model, lengths) / COMPUTE_ONLY.flops
    head = forward_flops(model, lengths) - forward_flops(model, lengths, head_tokens=0)
    again = head / COMPUTE_ONLY.flops  # logits are recomputed
    assert speed.forward(whole(model), work, (0,)) == pytest.approx(seconds, rel=1e-9)
    forward, backward = speed.train(whole(model), work, (0,))
    attention = 4 * model.n_layers * model.n_heads * model.head_dim * work.pairs / COMPUTE_ONLY.flops
    twice = 2 * seconds + again + 0.5 * attention  # whose backward pass has five products for two
    assert (forward, backward) == (pytest.approx(seconds, rel=1e-9), pytest.approx(twice, rel=1e-9))
    with_again = speed.train(whole(model, recompute=Recompute.full), work, (0,))[1]
    assert speed.train(whole(model, recompute=Recompute.selective), work, (0,))[1] == backward  # no products
    assert with_again == pytest.approx(twice + seconds - again, rel=1e-9)  # blocks again, the head as before


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_cuts_arithmetic_and_adds_two_collectives_a_block(tp: int) -> None:
    speed, work, ranks = Roofline(COMPUTE_ONLY), Work.of([50, 20]), tuple(range(tp))
    assert speed.forward(whole(LLAMA, tp), work, ranks) == pytest.approx(
        speed.forward(whole(LLAMA), work, (0,)) / tp, rel=1e-6
    )
    linked = replace(COMPUTE_ONLY, node=TOY.node)
    nbytes = 70 * LLAMA.hidden * 4
    reduce = 2 * (tp - 1) * (1e-6 + nbytes / tp / 1e10)
    added = Roofline(linked).forward(whole(LLAMA, tp), work, ranks) - speed.forward(whole(LLAMA, tp), work, ranks)
    assert added == pytest.approx(LLAMA.n_layers * 2 * reduce, rel=1e-6)
    both, alone = Roofline(linked).train(whole(LLAMA, tp), work, ranks), speed.train(whole(LLAMA, tp), work, ranks)
    assert sum(both) - sum(alone) == pytest.approx(2 * added, rel=1e-6)  # and two more in the backward pass


@pytest.mark.parametrize("model", [LLAMA, MOE], ids=["llama", "moe"])
def test_overlap_hides_input_gradients_behind_products(model: ModelConfig) -> None:
    work, ranks = Work.of([50, 20]), (0, 1)
    linked = Roofline(replace(COMPUTE_ONLY, node=TOY.node))
    plain, overlapping = whole(model, 2), replace(whole(model, 2), tp_overlap=True)
    reduce = 2 * (1e-6 + 70 * model.hidden * 4 / 2 / 1e10)
    qkv = 2 * 70 * (model.n_heads + 2 * model.n_kv_heads) / 2 * model.head_dim * model.hidden / TOY.flops
    hidden = min(reduce, qkv)
    if model is LLAMA:
        hidden += min(reduce, 2 * 70 * model.intermediate * model.hidden / TOY.flops)
    elif model.dense_layers:
        hidden += min(reduce, 2 * 70 * model.intermediate * model.hidden / TOY.flops * len(model.dense_layers) / 4)
    saved = linked.train(plain, work, ranks)[1] - linked.train(overlapping, work, ranks)[1]
    assert saved == pytest.approx(model.n_layers * hidden, rel=1e-6)


def test_memory_bound_decoding_reads_all_weights_and_the_cache() -> None:
    speed = Roofline(BYTES_ONLY)
    blocks = replace(whole(LLAMA, bf16=True), first=False, last=False)
    cache = 2 * LLAMA.n_layers * LLAMA.n_kv_heads * LLAMA.head_dim
    for rows in (1, 5):
        nbytes = 2 * (matrix_params(LLAMA) + rows * 100 * cache)
        assert speed.decode(blocks, rows, 100, (0,)) == pytest.approx(nbytes / 1e11)
    head = speed.decode(replace(blocks, last=True), 1, 100, (0,)) - speed.decode(blocks, 1, 100, (0,))
    assert head == pytest.approx(2 * LLAMA.hidden * LLAMA.vocab / 1e11, rel=0.1)


def test_compute_bound_decoding_equals_a_pass_of_one_more_token() -> None:
    speed = Roofline(COMPUTE_ONLY)
    flops = forward_flops(LLAMA, [101]) - forward_flops(LLAMA, [100])
    assert speed.decode(whole(LLAMA), 3, 101, (0,)) == pytest.approx(3 * flops / COMPUTE_ONLY.flops)


def test_only_experts_with_tokens_are_read() -> None:
    speed = Roofline(BYTES_ONLY)
    part = replace(whole(MOE), n_blocks=4, first=False, last=False)
    one, many = speed.decode(part, 1, 0, (0,)), speed.decode(part, 4096, 0, (0,))
    blocks = sum(s.numel for s in param_specs(MOE) if 1 <= s.layer <= 4 and len(s.shape) > 1)
    expert = 3 * MOE.hidden * MOE.expert_intermediate
    assert many == pytest.approx(4 * blocks / 1e11, rel=1e-6)
    assert one == pytest.approx(4 * (blocks - 3 * 6 * expert) / 1e11, rel=1e-6)  # three layers of eight experts


@settings(max_examples=examples(50))
@given(LENGTHS, st.integers(1, 60), st.sampled_from([LLAMA, MOE, PLAIN]))
def test_times_are_monotonic_in_work(lengths: list[int], more: int, model: ModelConfig) -> None:
    speed = Roofline(TOY)
    little, much = Work.of(lengths), Work.of([*lengths, more])
    assert speed.forward(whole(model), little, (0,)) < speed.forward(whole(model), much, (0,))
    assert sum(speed.train(whole(model), little, (0,))) < sum(speed.train(whole(model), much, (0,)))
    assert speed.decode(whole(model), 3, more, (0,)) <= speed.decode(whole(model), 4, more, (0,))
    assert speed.decode(whole(model), 3, more, (0,)) < speed.decode(whole(model), 3, more + 1, (0,))


def test_kernel_launches_add_up() -> None:
    slow, fast = Roofline(replace(TOY, kernel=1.0)), Roofline(replace(TOY, kernel=0.0))
    part, kernels = replace(whole(LLAMA), first=False, last=False), LLAMA.n_layers * KERNELS_PER_BLOCK
    work = Work.of([3])
    assert slow.forward(part, work, (0,)) - fast.forward(part, work, (0,)) == pytest.approx(kernels)
    assert slow.decode(part, 1, 3, (0,)) - fast.decode(part, 1, 3, (0,)) == pytest.approx(kernels)


def test_attention_has_a_speed_of_its_own() -> None:
    slow, work = replace(COMPUTE_ONLY, attention_flops=COMPUTE_ONLY.flops / 4), Work.of([50, 20])
    attention = 4 * LLAMA.n_layers * LLAMA.n_heads * LLAMA.head_dim * work.pairs / COMPUTE_ONLY.flops
    for name, factor in (("forward", 1.0), ("train", 3.5)):
        before, after = (getattr(Roofline(machine), name)(whole(LLAMA), work, (0,)) for machine in (COMPUTE_ONLY, slow))
        total = (sum(after) - sum(before)) if name == "train" else after - before
        assert total == pytest.approx(3 * factor * attention)


@pytest.mark.parametrize(
    ("changed", "model", "capability", "is_captured"),
    [
        ({}, LLAMA, 0.0, True),
        ({}, LLAMA, 8.0, True),
        ({"first": False}, LLAMA, 9.0, False),
        ({"last": False}, LLAMA, 9.0, False),
        ({}, MOE, 9.0, True),
        ({}, MOE, 10.3, True),
        ({}, MOE, 8.0, False),
        ({}, MOE, 12.0, False),
        ({"bf16": False}, MOE, 9.0, False),
        ({"bf16": False}, LLAMA, 9.0, True),
    ],
)
def test_the_host_launches_the_steps_that_are_not_captured(
    changed: dict, model: ModelConfig, capability: float, is_captured: bool
) -> None:
    shard, machine = replace(whole(model, bf16=True), **changed), replace(TOY, compute_capability=capability)
    fast, slow = Roofline(machine), Roofline(replace(machine, launch=1.0))
    launches = launches_of(model)[2]
    expected = 0.0 if is_captured else shard.n_blocks * launches
    assert slow.decode(shard, 3, 9, (0,)) - fast.decode(shard, 3, 9, (0,)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "unknown", "mixtral"])
def test_launches_are_those_of_the_family_or_of_a_similar_one(family: str) -> None:
    like = {"unknown": "qwen3_moe", "mixtral": "qwen3_moe"}.get(family, family)
    assert launches_of(replace(MOE, family=family)) == counted_launches()[like]
    assert launches_of(replace(LLAMA, family="unknown")) == counted_launches()["llama"]


def test_passes_take_as_long_as_their_launches() -> None:
    shard, work = replace(whole(LLAMA), first=False, last=False), Work.of([3])
    slow, (inference, training, _) = Roofline(replace(TOY, launch=1.0)), launches_of(LLAMA)
    assert slow.forward(shard, work, (0,)) == pytest.approx(shard.n_blocks * inference)
    assert sum(slow.train(shard, work, (0,))) == pytest.approx(shard.n_blocks * training)
    again = sum(slow.train(replace(shard, recompute=Recompute.full), work, (0,)))
    assert again == pytest.approx(shard.n_blocks * (training + inference))


N, A, B = 1e6, TOY.node, TOY.cluster


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        (CollectiveKind.ALL_REDUCE, (3,), 0.0),
        (CollectiveKind.ALL_REDUCE, (0, 1, 2, 3), 2 * 3 * (A.latency + N / 4 / A.bandwidth)),
        (CollectiveKind.ALL_GATHER, (0, 1, 2, 3), 3 * (A.latency + N / 4 / A.bandwidth)),
        (CollectiveKind.REDUCE_SCATTER, (0, 1), A.latency + N / 2 / A.bandwidth),
        (CollectiveKind.BROADCAST, (0, 1, 2), 2 * A.latency + N / A.bandwidth),
        (CollectiveKind.ALL_REDUCE, (0, 4), 2 * (B.latency + N / 2 / B.bandwidth)),
        # two nodes, four members each: four ports out of a node, of a tenth of the inner bandwidth each
        (
            CollectiveKind.ALL_GATHER,
            tuple(range(8)),
            7 * (B.latency / 4 + A.latency * 3 / 4 + N / 8 / (4 * B.bandwidth)),
        ),
    ],
)
def test_ring_collectives(kind: CollectiveKind, ranks: tuple[int, ...], seconds: float) -> None:
    assert Roofline(TOY).collective(kind, N, ranks) == pytest.approx(seconds)


@settings(max_examples=examples(60))
@given(st.integers(2, 64), st.floats(1, 1e9), st.sampled_from(list(CollectiveKind)))
def test_collectives_are_bounded_by_bandwidth_and_latency(n: int, nbytes: float, kind: CollectiveKind) -> None:
    ranks = tuple(range(n))
    found = Roofline(TOY).collective(kind, nbytes, ranks)
    assert found >= nbytes * (n - 1) / n / TOY.node.bandwidth
    assert found >= TOY.node.latency * log2(n) * 0.99
    assert found < Roofline(TOY).collective(kind, 2 * nbytes, ranks)


def test_links_and_copies() -> None:
    speed = Roofline(TOY)
    assert speed.send(1e6, 0, 3) == 1e-6 + 1e-4 and speed.send(1e6, 3, 4) == 1e-5 + 1e-3
    assert speed.send(1e6, 2, 2) == pytest.approx(2e6 / 1e11)
    assert speed.host_copy(1e6) == 1e-5 + 1e-3 and speed.call == TOY.call
    assert speed.optimizer(whole(LLAMA), 1000) == OPTIMIZER_BYTES * 1000 / 1e11
    assert speed.interface("any/train_step", 0, 0) == 0.0 < speed.interface("any/train_step", 1, 9)


def test_exchange_takes_the_maximum_of_packing_and_links() -> None:
    speed = Roofline(TOY)
    packing = Traffic(local=10**8, n_parts=5, copied=2 * 10**8)
    assert speed.exchange(packing) == pytest.approx(4e8 / 1e11 + 5e-7)
    wire = Traffic(node=10**7, cluster=10**6, n_parts=5, copied=10**7)
    assert speed.exchange(wire) == pytest.approx(1e-6 + 1e-3 + 1e-5 + 1e-3)
    assert Roofline(replace(TOY, node=Link(FREE))).exchange(Traffic(node=8, n_parts=1, copied=8)) > 0


def test_saved_activations_per_token() -> None:
    # 8 query and 4 key/value heads of 8: qkv 128, rotated 96, attention 64; gate and up 320, activated and product 320
    assert saved_activation_numel(LLAMA, 1, False) == 4 * 64 + (128 + 96 + 64) + 4 * 160
    assert saved_activation_numel(LLAMA, 2, False) == 4 * 64 + (128 + 96 + 64) / 2 + 4 * 80
    assert saved_activation_numel(LLAMA, 2, True) == (2 / 2 + 2) * 64 + (128 + 96 + 64) / 2 + 4 * 80
    assert saved_activation_numel(replace(LLAMA, mlp="ungated"), 1, False) == 4 * 64 + 288 + 2 * 160
    routed = (4 * 48 + 2 * 64) * 2 + 3 * 4
    assert saved_activation_numel(replace(MOE, n_experts=4), 1, False) == 4 * 64 + 288 + 4 * 160 / 4 + 0.75 * routed


def test_activations_of_another_engine() -> None:
    """It saves queries, keys and the output once, has all logits with 8 bytes each, and stores scores in a pass."""
    traits = MemoryTraits(saved_queries=2, saved_keys=2, logits_bytes=8, workspace_elements=17, score_bytes=6)
    other, own = AnalyticMemory("cuda", traits), AnalyticMemory("cuda")
    shard, work = whole(LLAMA, bf16=True), Work.of([50, 20])
    unsaved = 4 * (64 + 2 * 32 / 2) * 70 * 2  # in four blocks: a copy of the queries, and one of the keys
    assert own.train_bytes(shard, work)[0] - other.train_bytes(shard, work)[0] == unsaved
    logits = 8 * 120 * 70
    assert other.train_bytes(shard, work)[1] - own.train_bytes(shard, work)[1] == logits - 4 * 120 * 70 - unsaved
    scores = 6 * 8 * (50 * 51 + 20 * 21)  # of eight heads, half of them masked
    assert other.forward_bytes(shard, work) == 17 * 64 * 70 * 2 + scores + logits
    half = whole(LLAMA, tp=2, bf16=True)
    assert other.forward_bytes(half, work) == 17 * 64 * 70 * 2 + (scores + logits) / 2


def test_a_decoding_step_waits_for_the_host_once() -> None:
    own, other = (Roofline(TOY, EngineTraits(host_row=host)) for host in (0.0, 1e-3))
    first, last = (replace(whole(LLAMA), first=i == 0, last=i == 1) for i in range(2))
    waits = [other.decode(shard, 7, 30, (0,)) - own.decode(shard, 7, 30, (0,)) for shard in (first, last)]
    assert waits == [0.0, pytest.approx(7e-3)]
