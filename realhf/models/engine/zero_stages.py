"""Builds what ZeRO-2 and ZeRO-3 add to an engine: memory of layers for gradients and weights, and their collectives."""

from collections.abc import Iterable
from functools import partial

import torch

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, ParamSpec
from realhf.arch.lora import own_specs
from realhf.arch.param_specs import stage_layers
from realhf.comm.process_groups import Group, ParallelContext
from realhf.models.engine import grad_reduction
from realhf.models.flat_params import FlatParams
from realhf.models.transformer import Transformer
from realhf.models.zero.gathering import LayerMessages, WeightGathering
from realhf.models.zero.gradients import LayerGradients, OwnedGradients, ScatteredGradients
from realhf.models.zero.layer_buffers import GatheredParams, LayerBuffers
from realhf.models.zero.layer_memory import EMBEDDING, LayerMemory
from realhf.plan.compile.layer_shares import OwnedPiece, layer_shares, owned_pieces
from realhf.plan.compile.realloc import shard_boxes


def owned_gradients(params: FlatParams, late: frozenset[str], group: Group) -> OwnedGradients:
    """Make ``params`` accumulate gradients layer by layer, of which each rank keeps those of its range (ZeRO-2)."""
    layers = _buffers(params, torch.float32)
    size = params.data.numel() // group.size
    late_params = _like(params, late, torch.float32)

    def pieces(flat: FlatParams, names: Iterable[str]) -> list[OwnedPiece]:
        spans = ((flat.span(name).start, params.span(name)) for name in names)
        return [*owned_pieces(spans, size, grad_reduction.BUCKET_NUMEL)]

    by_layer = {layer: pieces(layers[layer], [name for name in layers[layer].names if name not in late])
                for layer in layers}  # fmt: skip
    late_pieces = pieces(late_params, late_params.names)
    params.use_grads(layers.view)
    total = torch.zeros(size, device=params.data.device)
    return OwnedGradients(layers, by_layer, late_params, late_pieces, total, group.index * size, group)


def gathered_params(config: ModelConfig, shard: FlatParams, context: ParallelContext) -> GatheredParams:
    """Return the whole parameters of a shard of a ZeRO-3 layout, without memory."""
    specs, whole_layout = own_specs(config), context.layout.with_zero3(False)
    boxes = shard_boxes(specs, partial(stage_layers, config), whole_layout, context.rank)
    return GatheredParams(specs, boxes, LayerBuffers(specs, boxes, shard.data.dtype, shard.data.device))


def layer_memory(
    model: Transformer, shard: FlatParams, context: ParallelContext, owned: OwnedGradients | None, trained: bool
) -> LayerMemory:
    """Return the memory of a model's layers: with ZeRO-2 of ``owned`` gradients, else of weights and gradients."""
    blocks = [layer + 1 for layer in model.layers]
    head = _head_layers(model)
    if owned is not None:
        return LayerMemory(blocks, head, None, owned, owned.layers)
    assert isinstance(model.params, GatheredParams), "the weights of a ZeRO-3 layout are gathered"
    messages = _messages(model.params.layers, shard, context)
    gradients: LayerGradients | None = None
    if trained:
        buffers = _buffers(model.params, torch.float32)
        model.params.use_grads(buffers.view)
        gradients = ScatteredGradients(shard, buffers, messages)
    weights = WeightGathering(shard, model.params.layers, messages)
    return LayerMemory(blocks, head, weights, gradients, [*model.params.layers])


def _head_layers(model: Transformer) -> tuple[int, ...]:
    """Return the layers of the parameters that a stage uses after its blocks."""
    is_tied = model.config.head == "lm" and "head.weight" not in {*model.params.names, *model.base.names}
    return (model.config.n_layers + 1, *((EMBEDDING,) if is_tied else ())) if model.is_last else ()


def _messages(layers: LayerBuffers, shard: FlatParams, context: ParallelContext) -> LayerMessages:
    group = context.group("dp")
    members = [context.layout.coord(rank).dp for rank in sorted(group.ranks)]
    boxes = {layer: {name: layers[layer].box(name) for name in layers[layer].names} for layer in layers}
    shares = {layer: layer_shares(of_layer, members) for layer, of_layer in boxes.items()}
    own = {}
    for layer, found in shares.items():
        parts = [part for part in found.parts if part.member == group.index]
        assert all(shard.box(part.name) == part.box for part in parts), "messages have the shares of the layout"
        own[layer] = _merged([shard.span(part.name) for part in parts])
    return LayerMessages(shares, own, group)


def _merged(spans: Iterable[range]) -> tuple[slice, ...]:
    merged: list[slice] = []
    for span in spans:
        if merged and merged[-1].stop == span.start:
            merged[-1] = slice(merged[-1].start, span.stop)
        else:
            merged.append(slice(span.start, span.stop))
    return tuple(merged)


def _declared(params: FlatParams, names: Iterable[str]) -> tuple[list[ParamSpec], dict[str, Box]]:
    boxes = {name: params.box(name) for name in names}
    return [params.spec(name) for name in boxes], boxes


def _buffers(params: FlatParams, dtype: torch.dtype) -> LayerBuffers:
    specs, boxes = _declared(params, params.names)
    return LayerBuffers(specs, boxes, dtype, params.data.device)


def _like(params: FlatParams, names: Iterable[str], dtype: torch.dtype) -> FlatParams:
    wanted = set(names)
    specs, boxes = _declared(params, (name for name in params.names if name in wanted))
    return FlatParams(specs, boxes, dtype, params.data.device)
