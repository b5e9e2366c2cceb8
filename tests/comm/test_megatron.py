"""Tensor-parallel regions and the sharded vocabulary against the layers of megatron-core on the same two ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.comm.process_groups import Group, make_groups
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.ops.logprobs import VocabShard, packed_logprobs

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.dist, pytest.mark.slow]
TOKENS, HIDDEN, WIDE, VOCAB = 7, 8, 12, 10
Pair = tuple[list[Tensor], list[Tensor]]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()


def shard(whole: Tensor, rank: int, dim: int = 0) -> Tensor:
    return whole.chunk(2, dim)[rank]


def both(job: Callable[..., Pair]) -> Callable[[int, int], tuple[float, int]]:
    """Return a rank function whose result is the largest difference from megatron-core and the number of tensors."""

    def run(rank: int, world: int) -> tuple[float, int]:
        from megatron.core import ModelParallelConfig, parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
        config = ModelParallelConfig(tensor_model_parallel_size=world, use_cpu_initialization=True)
        group = make_groups([(0, 1)], rank)[0, 1]
        ours, theirs = job(rank, group, config)
        assert [a.shape for a in ours] == [b.shape for b in theirs]
        return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)), len(ours)

    return run


def linear(rank: int, group: Group, config: Any, columns: bool) -> Pair:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    weight = randn(WIDE, HIDDEN, seed=1) if columns else randn(HIDDEN, WIDE, seed=1)
    x = randn(TOKENS, HIDDEN, seed=2) if columns else shard(randn(TOKENS, WIDE, seed=2), rank, 1)
    local, grad = shard(weight, rank, 0 if columns else 1), randn(TOKENS, WIDE if columns else HIDDEN, seed=3)
    grad = shard(grad, rank, 1) if columns else grad
    common = {"config": config, "init_method": lambda w: None, "bias": False}
    if columns:
        layer = ColumnParallelLinear(HIDDEN, WIDE, gather_output=False, **common)
    else:
        layer = RowParallelLinear(WIDE, HIDDEN, input_is_parallel=True, skip_bias_add=False, **common)
    with torch.no_grad():
        layer.weight.copy_(local)
    their_x = leaf(x)
    their_y, _ = layer(their_x[:, None])
    their_y[:, 0].backward(grad)
    our_x, our_w, region = leaf(x), leaf(local), TensorParallelRegion(group, TOKENS)
    our_y = F.linear(region.copy_to_tp(our_x), our_w) if columns else region.reduce_from_tp(F.linear(our_x, our_w))
    our_y.backward(grad)
    return [our_y, our_x.grad, our_w.grad], [their_y[:, 0], their_x.grad, layer.weight.grad]


def shard_of(rank: int, group: Group) -> VocabShard:
    return VocabShard(rank * VOCAB // 2, (VOCAB // 2, VOCAB // 2), group.all_reduce, group.all_max)


def column(rank: int, world: int) -> tuple[float, int]:
    return both(lambda *args: linear(*args, columns=True))(rank, world)


def row(rank: int, world: int) -> tuple[float, int]:
    return both(lambda *args: linear(*args, columns=False))(rank, world)


def embedding(rank: int, world: int) -> tuple[float, int]:
    def job(rank: int, group: Group, config: Any) -> Pair:
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        local, tokens = shard(randn(VOCAB, HIDDEN, seed=4), rank), torch.tensor([0, 9, 4, 5, 5, 2, 7])
        grad = randn(TOKENS, HIDDEN, seed=5)
        layer = VocabParallelEmbedding(VOCAB, HIDDEN, init_method=lambda w: None, config=config)
        with torch.no_grad():
            layer.weight.copy_(local)
        theirs = layer(tokens[:, None])[:, 0]
        theirs.backward(grad)
        weight = leaf(local)
        local_ids, held = shard_of(rank, group).to_local(tokens, len(weight))
        ours = TensorParallelRegion(group, TOKENS).reduce_from_tp(F.embedding(local_ids, weight) * held[:, None])
        ours.backward(grad)
        return [ours, weight.grad], [theirs, layer.weight.grad]

    return both(job)(rank, world)


def cross_entropy(rank: int, world: int) -> tuple[float, int]:
    def job(rank: int, group: Group, config: Any) -> Pair:
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            vocab_parallel_cross_entropy,
        )

        local, x = shard(randn(VOCAB, HIDDEN, seed=6), rank), randn(TOKENS, HIDDEN, seed=7)
        targets, grad = torch.tensor([0, 9, 4, 5, 5, 2, 7]), randn(TOKENS, seed=8)
        their_x, their_w = leaf(x), leaf(local)
        logits = F.linear(copy_to_tensor_model_parallel_region(their_x), their_w)
        theirs = vocab_parallel_cross_entropy(logits[:, None].contiguous(), targets[:, None])[:, 0]
        theirs.backward(grad)
        our_x, our_w = leaf(x), leaf(local)
        ours = -packed_logprobs(
            TensorParallelRegion(group, TOKENS).copy_to_tp(our_x), our_w, targets, shard=shard_of(rank, group)
        )
        ours.backward(grad)
        return [ours, our_x.grad, our_w.grad], [theirs, their_x.grad, their_w.grad]

    return both(job)(rank, world)


@pytest.mark.parametrize("job", [column, row, embedding, cross_entropy])
def test_sharded_layers_match_megatron_core(
    job: Callable[[int, int], tuple[float, int]], on_ranks: Callable[..., list[tuple[float, int]]]
) -> None:
    for difference, n_compared in on_ranks(2, job):
        assert n_compared >= 2 and difference < 1e-5
