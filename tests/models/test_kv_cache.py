"""KV cache: writes by slot and position, copies of prefixes."""

import torch

from realhf.api.model_config import GatedDelta, ModelConfig
from realhf.models.attention.delta_mixer import DeltaCache
from realhf.models.kv_cache import KVCache
from realhf.models.transformer import Transformer
from realhf.plan.cost.speed import StageShard
from tests.models.tiny_models import whole_params

DELTA = GatedDelta(2, 4, 3, 5, 4)


def cache() -> KVCache:
    torch.manual_seed(0)
    kv = KVCache(2, 2, 4, n_slots=4, max_len=6, like=torch.empty(0), zeroed=True)
    kv.k.normal_()
    kv.v.normal_()
    return kv


def test_states_are_copied_as_a_whole() -> None:
    kv = KVCache(1, 1, 4, 4, 6, torch.empty(0), zeroed=True, delta=DeltaCache(DELTA, 2, 4, torch.empty(0)))
    assert kv.delta is not None
    for store in (kv.delta.tails, kv.delta.states):
        store.normal_()
    tails, states = kv.delta.tails.clone(), kv.delta.states.clone()
    kv.copy_slots([(1, 0, 2, 4), (3, 1, 0, 1), (0, 2, 0, 4)])  # the second one replaces the source of the first one
    for now, before in ((kv.delta.tails, tails), (kv.delta.states, states)):
        assert torch.equal(now, before[:, [1, 3, 1, 3]])


def test_the_planned_bytes_are_those_of_the_cache() -> None:
    config = ModelConfig("qwen3_5_text", 4, 32, 4, 2, 8, 48, 37, 64, attention_gate=True, delta=DELTA,
                         delta_layers=(0, 1, 2), qk_norm="head", norm_offset=1.0)  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        cache = Transformer(config, whole_params(config, dtype)).new_cache(3, 16)
        shard = StageShard(config, 1, 4, True, True, bf16=dtype == torch.bfloat16)
        assert cache.nbytes == 3 * (16 * shard.kv_numel * dtype.itemsize + shard.slot_bytes)


def test_tokens_are_written_to_their_slot_and_position() -> None:
    kv = cache()
    before, slots, positions = kv.k.clone(), torch.tensor([2, 0]), torch.tensor([5, 1])
    k, v = torch.randn(2, 2, 2, 4)
    kv.write(1, kv.indices(slots, positions), k, v)
    assert torch.equal(kv.k[1, 2, :, 5], k[0])
    assert torch.equal(kv.v[1, 0, :, 1], v[1])
    assert torch.equal(kv.k[0], before[0])
    assert int((kv.k != before).sum()) == k.numel()


def test_only_the_prefix_is_copied() -> None:
    kv = cache()
    before = kv.k.clone()
    kv.copy_slots([(1, 0, 0, 4), (1, 3, 0, 4)])
    for slot in (0, 3):
        assert torch.equal(kv.k[:, slot, :, :4], before[:, 1, :, :4])
        assert torch.equal(kv.k[:, slot, :, 4:], before[:, slot, :, 4:])
    kv.copy_slots([(2, 0, 3, 5)])
    assert torch.equal(kv.k[:, 0, :, 3:5], before[:, 2, :, 3:5])
    assert torch.equal(kv.k[:, 0, :, :3], before[:, 1, :, :3]) and torch.equal(kv.k[:, 0, :, 5], before[:, 0, :, 5])
