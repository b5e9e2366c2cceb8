"""Members of context parallelism have all tokens once, with equal numbers of visible keys, and exchange them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.comm.context_parallel import ContextRegion
from realhf.comm.process_groups import Group, make_groups


def region(n_tokens: int, size: int, member: int) -> ContextRegion:
    return ContextRegion(Group(tuple(range(size)), member), n_tokens)


@given(st.integers(0, 200), st.integers(2, 9))
def test_every_token_has_one_member(n_tokens: int, size: int) -> None:
    tokens = torch.arange(n_tokens)
    parts = [region(n_tokens, size, member).local(tokens) for member in range(size)]
    assert torch.equal(torch.cat(parts).sort().values, tokens)
    assert [len(part) for part in parts] == [region(n_tokens, size, member).n_local_tokens for member in range(size)]


def test_members_see_equally_many_keys() -> None:
    """Of one row; the tokens after the last one of a chunk are missing."""
    n, size = 2 * 5 * 64, 5
    pairs = [int((region(n, size, member).local(torch.arange(n)) + 1).sum()) for member in range(size)]
    assert max(pairs) == min(pairs) == n * (n + 1) // 2 // size


def exchange(rank: int, world: int) -> list[tuple[bool, bool]]:
    group, checks = make_groups([tuple(range(world))], rank)[tuple(range(world))], []
    for n_tokens in (0, 1, 5, 16, 37):
        here = ContextRegion(group, n_tokens)
        values = torch.arange(3.0 * n_tokens).view(n_tokens, 3)
        local = here.local(values).requires_grad_()
        gathered = here.copy_to_tp(local)
        slopes = (rank + 1.0) * torch.ones(n_tokens, 3)
        (grad,) = torch.autograd.grad(gathered, local, slopes)
        total = world * (world + 1) / 2
        checks.append((torch.equal(gathered, values), torch.equal(grad, torch.full_like(grad, total))))
        (same,) = torch.autograd.grad(here.gather_from_sp(local), local, values)
        checks.append((torch.equal(same, here.local(values)), True))
    return checks


@pytest.mark.dist
def test_tokens_are_gathered_and_gradients_summed(on_ranks: Callable[..., list[Any]]) -> None:
    assert all(ok for answer in on_ranks(3, exchange) for pair in answer for ok in pair)
