"""The seams of tensor parallelism and the cut vocabulary, against megatron-core's layers on the same two ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.comm.process_groups import Group, make_groups
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.ops.logprobs import VocabularyCut, packed_logprobs

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.dist
TOKENS, HIDDEN, WIDE, VOCAB = 7, 8, 12, 10
Pair = tuple[list[Tensor], list[Tensor]]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()


def shard(whole: Tensor, rank: int, dim: int = 0) -> Tensor:
    return whole.chunk(2, dim)[rank]


def both(job: Callable[..., Pair]) -> Callable[[int, int], tuple[float, int]]:
    """Return what a rank does: how far its results are from megatron-core's, at the most, and how many they are."""

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

    weight = drawn(WIDE, HIDDEN, seed=1) if columns else drawn(HIDDEN, WIDE, seed=1)
    x = drawn(TOKENS, HIDDEN, seed=2) if columns else shard(drawn(TOKENS, WIDE, seed=2), rank, 1)
    mine, slope = shard(weight, rank, 0 if columns else 1), drawn(TOKENS, WIDE if columns else HIDDEN, seed=3)
    slope = shard(slope, rank, 1) if columns else slope
    common = {"config": config, "init_method": lambda w: None, "bias": False}
    if columns:
        layer = ColumnParallelLinear(HIDDEN, WIDE, gather_output=False, **common)
    else:
        layer = RowParallelLinear(WIDE, HIDDEN, input_is_parallel=True, skip_bias_add=False, **common)
    with torch.no_grad():
        layer.weight.copy_(mine)
    their_x = leaf(x)
    their_y, _ = layer(their_x[:, None])
    their_y[:, 0].backward(slope)
    our_x, our_w, seams = leaf(x), leaf(mine), TensorParallelRegion(group, TOKENS)
    our_y = F.linear(seams.copy_to_tp(our_x), our_w) if columns else seams.reduce_from_tp(F.linear(our_x, our_w))
    our_y.backward(slope)
    return [our_y, our_x.grad, our_w.grad], [their_y[:, 0], their_x.grad, layer.weight.grad]


def cut_of(rank: int, group: Group) -> VocabularyCut:
    return VocabularyCut(rank * VOCAB // 2, (VOCAB // 2, VOCAB // 2), group.all_reduce, group.all_max)


def column(rank: int, world: int) -> tuple[float, int]:
    return both(lambda *given: linear(*given, columns=True))(rank, world)


def row(rank: int, world: int) -> tuple[float, int]:
    return both(lambda *given: linear(*given, columns=False))(rank, world)


def embedding(rank: int, world: int) -> tuple[float, int]:
    def job(rank: int, group: Group, config: Any) -> Pair:
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        mine, tokens = shard(drawn(VOCAB, HIDDEN, seed=4), rank), torch.tensor([0, 9, 4, 5, 5, 2, 7])
        slope = drawn(TOKENS, HIDDEN, seed=5)
        layer = VocabParallelEmbedding(VOCAB, HIDDEN, init_method=lambda w: None, config=config)
        with torch.no_grad():
            layer.weight.copy_(mine)
        theirs = layer(tokens[:, None])[:, 0]
        theirs.backward(slope)
        weight = leaf(mine)
        local, held = cut_of(rank, group).mine(tokens, len(weight))
        ours = TensorParallelRegion(group, TOKENS).reduce_from_tp(F.embedding(local, weight) * held[:, None])
        ours.backward(slope)
        return [ours, weight.grad], [theirs, layer.weight.grad]

    return both(job)(rank, world)


def cross_entropy(rank: int, world: int) -> tuple[float, int]:
    def job(rank: int, group: Group, config: Any) -> Pair:
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            vocab_parallel_cross_entropy,
        )

        mine, x = shard(drawn(VOCAB, HIDDEN, seed=6), rank), drawn(TOKENS, HIDDEN, seed=7)
        targets, slope = torch.tensor([0, 9, 4, 5, 5, 2, 7]), drawn(TOKENS, seed=8)
        their_x, their_w = leaf(x), leaf(mine)
        logits = F.linear(copy_to_tensor_model_parallel_region(their_x), their_w)
        theirs = vocab_parallel_cross_entropy(logits[:, None].contiguous(), targets[:, None])[:, 0]
        theirs.backward(slope)
        our_x, our_w = leaf(x), leaf(mine)
        ours = -packed_logprobs(
            TensorParallelRegion(group, TOKENS).copy_to_tp(our_x), our_w, targets, cut=cut_of(rank, group)
        )
        ours.backward(slope)
        return [ours, our_x.grad, our_w.grad], [theirs, their_x.grad, their_w.grad]

    return both(job)(rank, world)


@pytest.mark.parametrize("job", [column, row, embedding, cross_entropy])
def test_cut_layers_equal_those_of_megatron_core(
    job: Callable[[int, int], tuple[float, int]], on_ranks: Callable[..., list[tuple[float, int]]]
) -> None:
    for apart, n_compared in on_ranks(2, job):
        assert n_compared >= 2 and apart < 1e-5
