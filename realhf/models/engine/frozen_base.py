"""The frozen weights below LoRA adapters: one copy per worker for all roles and layouts that hold the same shard."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from realhf.api.experiment import RoleSpec
from realhf.api.layout import Layout
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box
from realhf.arch.lora import base_specs
from realhf.arch.param_specs import stage_layers
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import init_random, load_hf
from realhf.models.quantized_params import QuantizedParams
from realhf.plan.compile.realloc import shard_boxes

Source = tuple[str | None, str | None, int | None, torch.dtype, int, int]


class FrozenBases:
    """Loads frozen weights once per source and shard. Of two roles, the one with a vocabulary head comes first."""

    def __init__(self) -> None:
        self._loaded: list[tuple[Source, FlatParams]] = []

    def get(
        self, config: ModelConfig, role: RoleSpec, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device,
        seed: int,
    ) -> FlatParams:  # fmt: skip
        """Return the frozen weights of a role's shard in ``layout``, for reading."""
        spec = role.spec
        assert config.lora is not None
        quantization = config.lora.bits, config.lora.group_size
        source = spec.path, spec.config, seed if spec.init_from_scratch else None, dtype, *quantization
        boxes = shard_boxes(base_specs(config), partial(stage_layers, config), layout, rank)
        for other, params in self._loaded:
            if other == source and _covers(params, boxes):
                return params
        quantized = config.lora.bits > 0
        params = (QuantizedParams(config, boxes, dtype, device) if quantized
                  else FlatParams(base_specs(config), boxes, dtype, device))  # fmt: skip
        if spec.init_from_scratch:
            init_random(config, params, seed)
        else:
            load_hf(Path(spec.path or ""), config, params, seed, allow_missing=frozenset({"head.weight"}))
        self._loaded.append((source, params))
        return params


def _covers(params: FlatParams, boxes: dict[str, Box]) -> bool:
    """Whether a shard has the same layers, and all the weights of ``boxes``; it may have a head besides."""
    layers: Callable[[frozenset[str]], set[str]] = lambda names: {name for name in names if name.startswith("layers.")}
    names = frozenset(params.names)
    return (
        names >= boxes.keys()
        and layers(names) == layers(frozenset(boxes))
        and all(params.box(name) == box for name, box in boxes.items())
    )
