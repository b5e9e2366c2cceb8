"""Flat parameters: order, fused views, float32 gradients, release of memory."""

import pytest
import torch

from realhf.api.param_box import ParamSpec, whole
from realhf.models.flat_params import FlatParams

SPECS = (
    ParamSpec("embed.weight", (6, 4), 0, 0, 6),
    ParamSpec("norm", (4,), 1),
    ParamSpec("wq", (4, 4), 1, 0, 2),
    ParamSpec("wk", (2, 4), 1, 0, 1),
    ParamSpec("bq", (4,), 1),
    ParamSpec("bk", (2,), 1),
    ParamSpec("wo", (4, 4), 1, 1, 2),
)


def flat(dtype: torch.dtype = torch.float32, pad_to: int = 1) -> FlatParams:
    params = FlatParams(SPECS, {s.name: whole(s.shape) for s in SPECS}, dtype, "cpu", pad_to)
    torch.manual_seed(0)
    for spec in SPECS:
        params.write(spec.name, whole(spec.shape), torch.randn(spec.shape))
    return params


def test_matrices_come_first_and_the_length_is_padded() -> None:
    params = flat(pad_to=64)
    assert params.names == ("embed.weight", "wq", "wk", "wo", "norm", "bq", "bk")
    assert params.n_matrix == 24 + 16 + 8 + 16
    assert params.data.numel() == 128
    assert not params.data[74:].any()


def test_fused_views_share_memory() -> None:
    params = flat()
    fused, bias = params.view("wq", "wk"), params.view("bq", "bk")
    assert fused.shape == (6, 4)
    assert bias.shape == (6,)
    params.write("wk", ((1, 2), (0, 4)), torch.full((1, 4), 7.0))
    assert bool((fused[5] == 7).all())
    fused[0] = 3.0
    assert bool((params.read("wq", ((0, 1), (0, 4))) == 3).all())
    with pytest.raises(AssertionError, match="are not adjacent"):
        params.view("wk", "wq")


def test_parameters_move_to_shared_memory() -> None:
    params, before = flat(), flat().data.clone()
    params.read("wk", ((0, 1), (0, 4)))
    params.share("weights")
    shared, n_allocations = params.shared, params.n_allocations
    assert shared is not None and n_allocations == 1 and torch.equal(params.data, before)
    params.write("wk", ((0, 1), (0, 4)), torch.full((1, 4), 7.0))
    assert torch.frombuffer(shared.map, dtype=torch.float32)[40:44].tolist() == [7.0] * 4
    params.share("weights")
    assert params.shared is shared and params.n_allocations == n_allocations


def test_shards_use_global_coordinates() -> None:
    params = FlatParams(SPECS, {"wq": ((2, 4), (0, 4))}, torch.float32, "cpu")
    assert params.names == ("wq",)
    params.write("wq", ((3, 4), (1, 3)), torch.tensor([[1.0, 2.0]]))
    assert params.data.tolist() == [0, 0, 0, 0, 0, 1, 2, 0]
    with pytest.raises(AssertionError, match="not inside"):
        params.read("wq", ((0, 1), (0, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_accumulate_in_float32(dtype: torch.dtype) -> None:
    params = flat(dtype)
    params.enable_grad()
    leaf = params.leaf("wq", "wk")
    assert params.leaf("wq", "wk") is leaf
    assert params.grad is not None
    memory = params.grad.data_ptr()
    steps = 300
    for _ in range(steps):  # in bfloat16, 1 + 2**-8 would stay 1
        (leaf.sum() * 2**-8).backward()
    assert params.grad.dtype == torch.float32
    assert params.grad.data_ptr() == memory
    assert bool((params.grad[24:48] == steps * 2**-8).all())
    assert params.grad.sum() == 24 * steps * 2**-8
    if dtype != torch.float32:
        assert leaf.grad is None
    params.zero_grad()
    assert not params.grad.any()


def test_the_gradient_of_a_tied_leaf_is_a_sum() -> None:
    params = flat()
    params.enable_grad()
    embed = params.leaf("embed.weight")
    (embed.sum() + 2 * params.leaf("embed.weight").sum()).backward()
    assert params.grad is not None
    assert bool((params.grad[:24] == 3).all())


def test_memory_can_be_released_and_allocated_again() -> None:
    params = flat(pad_to=64)
    params.enable_grad()
    leaf, view, backup = params.leaf("wo"), params.view("bk"), params.data.clone()
    params.free()
    assert params.is_free
    assert params.data.untyped_storage().nbytes() == 0
    with pytest.raises(AssertionError, match="released"):
        params.view("wo")
    params.allocate()
    params.data.copy_(backup)
    assert torch.equal(view, backup[72:74])
    leaf.sum().backward()
    assert params.grad is not None
    assert params.grad.sum() == 16


def test_leaves_are_plain_views_without_gradients() -> None:
    params = flat()
    assert not params.leaf("wq").requires_grad
    assert params.leaf("wq") is not params.leaf("wq")
