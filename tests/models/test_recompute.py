"""What autograd saves for the backward pass with and without recomputation, against the planner's estimate."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from realhf.api.config import Recompute
from realhf.api.model_config import GatedDelta, ModelConfig
from realhf.models.engine.native import NativeEngine
from realhf.models.hf_folder import init_random
from realhf.models.transformer import Transformer
from realhf.ops import extension
from realhf.plan.machines.roofline import recomputed_numel, saved_activation_numel
from tests.models.engine.tiny_engine import engine_on, rows_of
from tests.models.tiny_models import hf_model, whole_params

LENGTHS = (9, 7, 12)
HYBRID = ModelConfig("qwen3_5_text", 1, 32, 4, 2, 8, 48, 37, 4096, norm_offset=1.0, qk_norm="head", attention_gate=True)
FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "olmo2", "gpt_neox")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in FAMILIES:
        found[name] = tmp_path_factory.mktemp(name)
        hf_model(name).save_pretrained(found[name])
    return found


def saved_numel(engine: NativeEngine) -> int:
    """Return the elements of float32 activations that a forward pass saves."""
    batch = rows_of(LENGTHS)
    return saved_bytes(engine.model, batch["tokens"], batch.lengths("tokens")) // 4


def saved_bytes(model: Transformer, tokens: Tensor, lengths: Sequence[int]) -> int:
    """Return the bytes of activations that a forward pass saves."""
    weights = model.params.data.untyped_storage().data_ptr()
    storages, kept = dict[int, int](), list[Any]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() != weights:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(storage)  # its address is not used again
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden(tokens, lengths)
    assert hidden.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_selective_recomputation_saves_fewer_activations(family: str, folders: dict[str, Path]) -> None:
    none, selective, full = (
        saved_numel(engine_on(folders[family], gradient_checkpointing=granularity is not None,
                              recompute_granularity=granularity or Recompute.full))
        for granularity in (None, Recompute.selective, Recompute.full)
    )  # fmt: skip
    config = engine_on(folders[family]).config
    per_token = (none - selective) / sum(LENGTHS) / config.n_layers
    expected = recomputed_numel(config, 1)
    if family == "olmo2":  # without norms in front of its blocks
        expected = config.intermediate
    assert per_token == pytest.approx(expected, rel=0.05)  # norms save a mean and a scale, too
    assert full < selective < none < 1.5 * saved_activation_numel(config, 1, False) * sum(LENGTHS) * config.n_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "delta", [GatedDelta(2, 4, 16, 16, 4), GatedDelta(4, 4, 32, 16, 4), GatedDelta(2, 8, 16, 64, 4)]
)
def test_activations_of_the_gated_delta_rule(delta: GatedDelta, dtype: torch.dtype) -> None:
    """Bytes per token of a block that rows of whole chunks save, as planned: with the CPU kernels, and without."""
    for device, has_kernels in (("cpu", True), ("cuda", False)):
        with pytest.MonkeyPatch.context() as patch:
            if not has_kernels:
                patch.setattr(extension, "kernel", without_delta_kernels(extension.kernel))
            check_saved_bytes(delta, dtype, device)


def without_delta_kernels(kernel: Callable[[str, str], object]) -> Callable[[str, str], object]:
    missing = "delta_rule", "causal_conv_silu"
    return lambda name, device: None if name in missing else kernel(name, device)


def check_saved_bytes(delta: GatedDelta, dtype: torch.dtype, device: str) -> None:
    found = []
    for n_layers in (1, 2):
        config = replace(HYBRID, n_layers=n_layers, delta=delta, delta_layers=tuple(range(n_layers)))
        params = whole_params(config, dtype)
        init_random(config, params, 0)
        params.enable_grad()
        found.append(saved_bytes(Transformer(config, params), torch.zeros(512, dtype=torch.int64), (128, 256, 128)))
    planned = saved_activation_numel(config, 1, False, itemsize=dtype.itemsize, device=device) * dtype.itemsize
    assert found[1] - found[0] == pytest.approx(512 * planned, rel=0.07)


def test_products_are_not_computed_again(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation ends when the inputs of a product are known."""
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for granularity in (None, Recompute.selective, Recompute.full):
        engine = engine_on(folders["llama"], gradient_checkpointing=granularity is not None,
                           recompute_granularity=granularity or Recompute.full)  # fmt: skip
        batch = rows_of(LENGTHS)
        with FlopCounterMode(display=False) as counter:
            engine.model.hidden(batch["tokens"], batch.lengths("tokens")).sum().backward()
        flops[granularity] = counter.get_total_flops()
    assert flops[None] == flops[Recompute.selective] < flops[Recompute.full]
