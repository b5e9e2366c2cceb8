"""Rows that share a prefix: their groups, for generated tables, and attention equal to that of every row alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.ops import varlen
from realhf.ops.cascade import MAX_MEMBERS, PrefixGroups, SharedPrefixes, group_prefixes
from tests.gpu_emulated.fake_flash import installed
from tests.gpu_emulated.fake_runtime import fake_cuda

TORCH, FLASH_2, FLASH_3 = "torch.nn.attention.varlen", "flash_attn", "flash_attn_interface"


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Prefix numbers, lengths and owners of rows in any order, and a number of slots."""
    numbers = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=50)), np.int64) * 7
    first = {int(n): int(np.flatnonzero(numbers == n)[-1]) for n in numbers}
    owners = np.array([first[int(n)] for n in numbers], np.int64)
    return numbers, numbers % 5 + 1, owners, len(numbers) + draw(st.integers(0, 9))


@given(tables())
def test_every_row_is_in_one_group_of_its_prefix(table: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    numbers, lengths, owners, n_slots = table
    groups = group_prefixes(*table)
    if groups is None:
        assert len(set(numbers.tolist())) == len(numbers)
        return
    n_groups, n_members, _ = groups.sizes
    assert n_members <= MAX_MEMBERS and len(groups.places) == len(groups.starts) == n_slots
    assert len(set(groups.places[: len(numbers)].tolist())) == len(numbers)
    for slot, place in enumerate(groups.places[: len(numbers)].tolist()):
        assert groups.members[place] == slot
        batch = place // n_members
        assert groups.owners[batch] == owners[slot] and groups.lengths[batch] == lengths[slot] == groups.starts[slot]
    used = {place // n_members for place in groups.places[: len(numbers)].tolist()}
    assert all(groups.lengths[batch] == 0 for batch in set(range(n_groups)) - used)


def groups_of(numbers: list[int], lengths: list[int], owners: list[int], n_slots: int) -> PrefixGroups:
    found = group_prefixes(*(np.array(x, np.int64) for x in (numbers, lengths, owners)), n_slots)
    assert found is not None
    return found


@pytest.mark.parametrize("module", [TORCH, FLASH_2, FLASH_3])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("heads, n_kv", [(4, 1), (4, 2), (4, 4), (6, 2)])
def test_attention_equals_that_of_every_row_alone(module: str, softcap: float, heads: int, n_kv: int) -> None:
    """Slots beyond the rows, and cached tokens that no row uses, are not a number."""
    torch.manual_seed(0)
    numbers, lengths, owners = [3, 5, 3, 3, 9], [6, 2, 6, 6, 4], [2, 1, 2, 2, 4]
    used, n_slots, longest, dim = [9, 3, 7, 12, 5, 1], 6, 16, 16
    q = torch.randn(n_slots, heads, dim).bfloat16()
    k, v = (torch.full((n_slots, longest, n_kv, dim), float("nan")).bfloat16() for _ in range(2))
    expected = torch.empty(5, heads, dim)
    for cache in (k, v):
        for slot in range(5):
            start = 0 if owners[slot] == slot else lengths[slot]
            cache[slot, start : used[slot]] = torch.randn(used[slot] - start, n_kv, dim)
        cache[5, :1] = 0.0
    for slot in range(5):
        n = lengths[slot]
        keys, values = (
            torch.cat((cache[owners[slot], :n], cache[slot, n : used[slot]]))
            .float()
            .repeat_interleave(heads // n_kv, 1)
            for cache in (k, v)
        )
        scores = torch.einsum("hd,khd->hk", q[slot].float(), keys) * 0.3
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        expected[slot] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    with installed(*(module,) if module != TORCH else ()), fake_cuda():
        kernel = varlen.kernels()[0]
        assert kernel.module == module
        if softcap and module == TORCH:
            pytest.skip("torch's kernel has no soft caps")
        groups = groups_of(numbers, lengths, owners, n_slots)
        packed = torch.from_numpy(groups.packed).to("cuda:0")
        there = [x.to("cuda:0") for x in (q, k, v, torch.tensor(used, dtype=torch.int32))]
        out = SharedPrefixes.of(packed, groups.sizes).attend(kernel, *there, longest, 0.3, softcap).cpu()
    torch.testing.assert_close(out[:5].float(), expected, atol=0.03, rtol=0.02)
    assert out.isfinite().all()
