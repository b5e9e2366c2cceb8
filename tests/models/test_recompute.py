"""What autograd saves for the backward pass with and without recomputation, against the planner's estimate."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from realhf.api.config import Recompute
from realhf.models.engine.native import NativeEngine
from realhf.plan.machines.roofline import recomputed_numel, saved_activation_numel
from tests.models.engine.tiny_engine import engine_on, rows_of
from tests.models.tiny_models import hf_model

LENGTHS = (9, 7, 12)
FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "olmo2", "gpt_neox")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in FAMILIES:
        found[name] = tmp_path_factory.mktemp(name)
        hf_model(name).save_pretrained(found[name])
    return found


def saved_numel(engine: NativeEngine) -> int:
    """Return the elements of activations that a forward pass saves."""
    weights = engine.params.data.untyped_storage().data_ptr()
    batch, storages = rows_of(LENGTHS), dict[int, int]()
    kept: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() != weights:
            storages[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
            kept.append(storage)  # its address is not used again
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = engine.model.hidden(batch["tokens"], batch.lengths("tokens"))
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
