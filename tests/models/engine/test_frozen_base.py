"""The frozen weights below adapters are loaded once for all roles that read the same shard."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf.api.config import LoraOptions, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import Lora, ModelConfig
from realhf.arch.hf_config import read_hf_config
from realhf.models.engine import FrozenBases
from realhf.models.flat_params import FlatParams
from tests.models.tiny_models import hf_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    hf_model("llama_tied").save_pretrained(folder)
    return folder


def get(
    bases: FrozenBases, folder: Path, scalar: bool = False, rank: int = 4, where: str = "d1", worker: int = 0,
    dtype: torch.dtype = torch.float32, lora: Lora | None = None,
) -> FlatParams:  # fmt: skip
    role = RoleSpec(ModelSpec(str(folder), lora=LoraOptions(rank=max(rank, 1))), scalar_head=scalar, is_base=not rank)
    config: ModelConfig = replace(read_hf_config(folder, scalar), lora=lora or Lora(rank))
    strategy = ParallelStrategy.parse(where)
    layout = Layout(DeviceMesh(tuple(range(strategy.world))), strategy)
    return bases.get(config, role, layout, worker, dtype, CPU, seed=1)


def test_actor_reference_and_critic_share_one_copy(folder: Path) -> None:
    bases = FrozenBases()
    actor = get(bases, folder)
    assert get(bases, folder, rank=0) is actor and get(bases, folder, scalar=True) is actor
    assert get(bases, folder, where="d2", worker=1) is actor, "replicas have the same shard"
    assert actor.grad is None and "layers.0.wq" in actor.names


def test_other_shards_and_types_are_other_copies(folder: Path) -> None:
    bases = FrozenBases()
    whole = get(bases, folder)
    shards = [get(bases, folder, where="t2", worker=0), get(bases, folder, where="p2", worker=0),
              get(bases, folder, where="p2", worker=1), get(bases, folder, dtype=torch.bfloat16)]  # fmt: skip
    assert len({id(params) for params in (whole, *shards)}) == 5
    assert get(bases, folder, where="t2", worker=0) is shards[0]
    half = shards[0]
    assert torch.equal(half.view("layers.0.wo"), whole.view("layers.0.wo")[:, : half.view("layers.0.wo").shape[1]])


def test_a_base_with_a_head_of_its_own_is_not_that_of_a_reward_model(folder: Path) -> None:
    """A critic that comes first has no vocabulary head, which the actor needs."""
    bases = FrozenBases()
    hf_model("llama").save_pretrained(folder / "untied")
    critic = get(bases, folder / "untied", scalar=True)
    actor = get(bases, folder / "untied")
    assert "head.weight" not in critic.names and "head.weight" in actor.names


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grouped")
    hf_model("grouped llama").save_pretrained(folder)
    return folder


def test_roles_share_a_quantized_base_of_the_same_kind(grouped: Path) -> None:
    bases = FrozenBases()
    actor = get(bases, grouped, lora=Lora(4, 1.0, (), 8, 4))
    assert get(bases, grouped, rank=0, lora=Lora(0, 1.0, (), 8, 4)) is actor
    others = [get(bases, grouped, lora=lora) for lora in (Lora(4), Lora(4, 1.0, (), 4, 4), Lora(4, 1.0, (), 8, 8))]
    assert len({id(params) for params in (actor, *others)}) == 4


def test_a_quantized_base_holds_less_memory(grouped: Path) -> None:
    """Of all tensors that are alive, before and after the base is built."""
    held: dict[int, int] = {}
    for bits in (0, 8, 4):
        before = live_bytes()
        base = get(FrozenBases(), grouped, lora=Lora(4, 1.0, (), bits, 16 if bits else 0))
        held[bits] = live_bytes() - before
        del base
    matrices, rest = 2 * 4 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48), held[0]
    rest -= matrices
    assert held[8] == rest + matrices // 4 + matrices // 16
    assert held[4] == rest + matrices // 8 + matrices // 16


def live_bytes() -> int:
    """Return the bytes of tensors with memory of their own: other tests leave fake ones of other classes."""
    gc.collect()
    storages = (thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
