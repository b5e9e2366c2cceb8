"""KV cache: writes by slot and position, copies of prefixes."""

import torch

from realhf.models.kv_cache import KVCache


def cache() -> KVCache:
    torch.manual_seed(0)
    kv = KVCache(2, 2, 4, n_slots=4, max_len=6, like=torch.empty(0), zeroed=True)
    kv.k.normal_()
    kv.v.normal_()
    return kv


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
