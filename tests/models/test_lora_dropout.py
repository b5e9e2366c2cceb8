"""Dropout of LoRA adapters: uniform masks, the same computation as peft with these masks, only in training."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from realhf.api.config import LoraOptions, Recompute
from realhf.api.execution_plan import MicroBatching
from realhf.api.model_config import Lora
from realhf.arch.hf_config import read_hf_config
from realhf.arch.lora import lora_modules
from realhf.base.seeds import stable_seed
from realhf.models.engine.native import NativeEngine
from realhf.models.low_rank import Dropout, column_keys, mixed, token_keys
from realhf.models.transformer import Transformer
from tests.models.engine.tiny_engine import counted, engine_on, nll, rows_of
from tests.models.test_low_rank import gradients_as_files, theirs_with, with_adapters
from tests.models.test_transformer import LENGTHS, tokens
from tests.models.tiny_models import ONE_OF_EACH, WITH_EXPERTS, hf_model

CPU = torch.device("cpu")
RATE = 0.3
DENSE = tuple(name for name in ONE_OF_EACH if name not in WITH_EXPERTS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@given(rate=st.floats(0.0, 0.99), seed=st.integers(0, 2**63 - 1))
def test_masks_are_uniform_and_keep_the_mean(rate: float, seed: int) -> None:
    x, dropout = torch.ones(400, 200), Dropout(token_keys([seed], [400], CPU), rate)
    y = dropout(x, column_keys("layers.0.wq.lora_a", 0, 200, CPU))
    is_dropped = (y == 0).double()
    assert abs(float(is_dropped.mean()) - rate) < 0.012  # five standard errors
    assert y.max() == pytest.approx(1 / (1 - rate)) or rate > 0.98
    for dim in (0, 1):
        assert float((is_dropped.mean(dim) - rate).abs().max()) < 0.2
    centred = is_dropped - rate  # no correlation between neighbours in either direction
    assert (
        abs(float((centred[1:] * centred[:-1]).mean())) < 0.012 > abs(float((centred[:, 1:] * centred[:, :-1]).mean()))
    )


def test_masks_differ_between_rows_products_and_steps() -> None:
    x = torch.ones(50, 64)
    masks = [
        Dropout(token_keys([row], [50], CPU), 0.5)(x, column_keys(product, 0, 64, CPU)) == 0
        for row in map(stable_seed, range(4))
        for product in ("layers.0.wq.lora_a", "layers.0.wo.lora_a", "layers.1.wq.lora_a")
    ]
    agreements = [float((a == b).double().mean()) for i, a in enumerate(masks) for b in masks[:i]]
    assert min(agreements) > 0.4 and max(agreements) < 0.6


def test_a_part_of_the_columns_has_the_mask_of_the_whole() -> None:
    whole = column_keys("layers.0.down.lora_a", 0, 96, CPU)
    assert torch.equal(torch.cat([column_keys("layers.0.down.lora_a", at, at + 32, CPU) for at in (0, 32, 64)]), whole)
    keys = token_keys([7, 9], [5, 3], CPU)
    assert torch.equal(keys, torch.cat([token_keys([7], [5], CPU), token_keys([9], [3], CPU)]))
    assert len({*mixed(torch.arange(100_000, dtype=torch.int32)).tolist()}) == 100_000  # a bijection


def test_gradients_pass_where_inputs_do() -> None:
    x = torch.randn(20, 30, dtype=torch.float64, requires_grad=True)
    dropout, columns = Dropout(token_keys([1], [20], CPU), RATE), column_keys("w", 0, 30, CPU)
    y = dropout(x, columns)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(y.detach(), x.detach() * gradient)
    assert torch.autograd.gradcheck(lambda x: dropout(x, columns), (x,))


class OurMask(nn.Module):
    """In place of a dropout module of peft: the mask of our product, for rows that are computed one after the other."""

    def __init__(self, rows: list[Tensor], product: str) -> None:
        super().__init__()
        self.rows, self.product = rows, product

    def forward(self, x: Tensor) -> Tensor:
        columns = column_keys(self.product, 0, x.shape[-1], CPU)
        return Dropout(self.rows[0], RATE)(x[0], columns)[None]


@pytest.mark.parametrize("name", DENSE)
def test_training_equals_peft_with_the_same_masks(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    plain = with_adapters(tmp_path)
    config = replace(plain.config, lora=replace(plain.config.lora, dropout=RATE))
    ours = Transformer(config, plain.params, base=plain.base)
    theirs = theirs_with(plain, name, tmp_path / "adapter")
    keys, current = token_keys(range(len(LENGTHS)), LENGTHS, CPU), list[Tensor]()
    for module in lora_modules(config):
        prefix, _, weight = module.weights[0].rpartition(".")
        fused = config.mlp == "gated" or weight != "up"
        product = f"{prefix}.{FIRST.get(weight, weight) if fused else weight}.lora_a"
        layer = theirs.get_submodule(f"base_model.model.{module.path}")
        layer.lora_dropout["default"] = OurMask(current, product)
    weights = torch.linspace(-1, 1, sum(LENGTHS))
    ours.params.enable_grad()
    hidden = ours.states(tokens(), LENGTHS, dropout=Dropout(keys, RATE)).all()
    logprobs = ours.logprobs(hidden, tokens(), LENGTHS)
    (logprobs * weights).sum().backward()
    expected = []
    for row, key in zip(tokens().split(LENGTHS), keys.split(LENGTHS), strict=True):
        current[:] = [key]
        logits = theirs(row[None]).logits[0]
        expected += [torch.zeros(1), logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]]
    joined = torch.cat(expected)
    assert torch.allclose(logprobs, joined, atol=1e-5)
    assert not torch.allclose(logprobs, plain.logprobs(plain.hidden(tokens(), LENGTHS), tokens(), LENGTHS), atol=1e-2)
    (joined * weights).sum().backward()
    mine = gradients_as_files(ours, tmp_path)
    for key, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(mine[key.replace(".default", "")], parameter.grad, atol=1e-5, rtol=1e-5), key


FIRST = {"z": "q", "b": "q", "a": "q", "wk": "wq", "wv": "wq", "up": "gate"}
"""Products of several weights have one mask, named after the first weight."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    hf_model("llama").save_pretrained(made)
    return made


@pytest.fixture
def engine(folder: Path) -> Callable[..., NativeEngine]:
    return lambda rate=RATE, **options: engine_on(folder, lora=LoraOptions(4, 6.0, dropout=rate), **options)


def stepped(engine: NativeEngine, limit: int = 1000, version: int = 0) -> Tensor:
    """Return the adapters after a step; matrices B are not zero before it."""
    engine = replace(engine, micro_batching=MicroBatching(max_tokens_per_mb=limit), version=version)
    with torch.no_grad():
        engine.params.data.copy_(torch.linspace(-0.1, 0.1, len(engine.params.data)).sin())
    batch = rows_of((9, 4, 6, 2, 8, 8), per_prompt=2, vocab=37)
    engine.train(batch, nll, counted(batch))
    return engine.params.data.clone()


@pytest.mark.parametrize("limit", [1, 9, 20])
def test_a_step_does_not_depend_on_micro_batches(limit: int, engine: Callable[..., NativeEngine]) -> None:
    torch.testing.assert_close(stepped(engine(), limit), stepped(engine()), atol=1e-6, rtol=0)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_activations_have_the_same_masks(granularity: str, engine: Callable[..., NativeEngine]) -> None:
    again = engine(gradient_checkpointing=True, recompute_granularity=Recompute(granularity))
    torch.testing.assert_close(stepped(again), stepped(engine()), atol=1e-6, rtol=0)


def test_masks_are_those_of_the_seed_and_the_step(engine: Callable[..., NativeEngine]) -> None:
    first = stepped(engine())
    assert torch.equal(stepped(engine()), first)
    assert not torch.equal(stepped(engine(), version=1), first)
    assert not torch.equal(stepped(replace(engine(), seed=4)), first)
    assert not torch.equal(stepped(engine(0.0)), first)


def test_inference_has_no_dropout(engine: Callable[..., NativeEngine]) -> None:
    batch = rows_of((9, 4, 6), vocab=37)
    logprobs = [some.forward(batch, lambda outputs, _: outputs.logprobs()) for some in (engine(), engine(0.0))]
    assert torch.equal(*logprobs)


def test_experts_have_none(tmp_path: Path) -> None:
    hf_model("qwen3_moe").save_pretrained(tmp_path)
    config = replace(read_hf_config(tmp_path, False), lora=Lora(4, dropout=RATE))
    with pytest.raises(
        ValueError, match=r"lora.dropout=0.3: routed experts \(gate_up_proj\) have none.*lora.targets=\[k_proj"
    ):
        lora_modules(config)
    assert lora_modules(replace(config, lora=Lora(4, dropout=RATE, targets=("q_proj",))))
