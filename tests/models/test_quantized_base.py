"""Quantized bases of LoRA adapters: their values against torchao, models on them against peft, their memory."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from realhf.api.config import Recompute
from realhf.api.model_config import Lora
from realhf.api.param_box import whole
from realhf.arch.hf_config import read_hf_config
from realhf.arch.lora import base_specs, own_specs
from realhf.arch.quantization import base_nbytes, quantized_names
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import load_hf, save_hf
from realhf.models.peft_folder import merged_parameter, save_peft
from realhf.models.quantized_matrix import QuantizedMatrix
from realhf.models.quantized_params import QuantizedParams
from realhf.models.transformer import Transformer
from tests.models.sharding import GROUP_SIZE
from tests.models.test_low_rank import ALPHA, RANK, gradients_as_files, randomise
from tests.models.test_transformer import LENGTHS, loss_and_gradient, their_logits, their_logprobs, tokens
from tests.models.tiny_models import GROUPED, hf_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

BITS = (8, 4)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def quantized_model(folder: Path, bits: int, dtype: torch.dtype = torch.float32, rank: int = RANK) -> Transformer:
    """Return a model of a folder with a quantized base, new adapters and random matrices B."""
    config = replace(read_hf_config(folder, False), lora=Lora(rank, ALPHA, (), bits, GROUP_SIZE))
    own = FlatParams(own_specs(config), {s.name: whole(s.shape) for s in own_specs(config)}, torch.float32, "cpu")
    base = QuantizedParams(config, {s.name: whole(s.shape) for s in base_specs(config)}, dtype, "cpu")
    load_hf(folder, config, base, 0)
    randomise(config, own)
    return Transformer(config, own, base=base)


def dequantized_model(ours: Transformer, folder: Path) -> torch.nn.Module:
    """Return peft's model with our adapters, whose base has our dequantized weights."""
    save_hf(folder / "base", replace(ours.config, lora=None), ours.base.view, None)
    save_peft(folder / "adapter", ours.config, ours.params.view, "base", None)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    return peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True).eval()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", (2, 8, 32))
def test_values_equal_torchao(bits: int, group_size: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 24, bias=False))
    weight = layer[0].weight.detach().clone()
    weight[0, :group_size] = 0.0
    layer[0].weight.data.copy_(weight)
    ours = QuantizedMatrix.of(weight, bits, group_size, torch.float32)
    quantize_(layer, IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(group_size)))
    assert ours.integers.nbytes == weight.numel() * bits // 8
    assert torch.equal(ours.dequantized(), layer[0].weight.dequantize())
    assert torch.equal(ours.scales, layer[0].weight.scale)
    assert torch.equal(ours.dequantized()[0, :group_size], weight[0, :group_size])


@pytest.mark.parametrize("bits", BITS)
def test_bfloat16_weights_are_rounded_once(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 64).bfloat16()
    ours = QuantizedMatrix.of(weight, bits, 32, torch.bfloat16)
    exact = QuantizedMatrix(ours.integers, ours.scales.float(), bits).dequantized()
    assert ours.dequantized().dtype is torch.bfloat16 and torch.equal(ours.dequantized(), exact.bfloat16())
    steps = ours.scales.float().repeat_interleave(32, 1)
    assert ((exact - weight.float()).abs() <= 0.54 * steps).all()


@given(
    st.sampled_from(BITS), st.sampled_from((2, 4, 6, 32)), st.integers(1, 5), st.integers(1, 4), st.data(),
    st.sampled_from((torch.float32, torch.bfloat16)),
)  # fmt: skip
@settings(deadline=None, max_examples=50)
def test_a_shard_is_quantized_as_a_part_of_the_whole(
    bits: int, group_size: int, rows: int, n_groups: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    weight = torch.randn(rows, n_groups * group_size, generator=torch.Generator().manual_seed(rows))
    both = QuantizedMatrix.of(weight, bits, group_size, dtype)
    first = data.draw(st.integers(0, n_groups - 1))
    columns = slice(first * group_size, (first + 1) * group_size)
    some = slice(data.draw(st.integers(0, rows - 1)), rows)
    part = QuantizedMatrix.of(weight[some, columns], bits, group_size, dtype)
    assert torch.equal(part.dequantized(), both.dequantized()[some, columns])
    assert torch.equal(part.scales, both.scales[some, first : first + 1])
    nbytes = group_size * bits // 8
    assert torch.equal(part.integers, both.integers[some, first * nbytes : (first + 1) * nbytes])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", GROUPED)
def test_logits_and_gradients_equal_peft_on_dequantized_weights(name: str, bits: int, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    ours = quantized_model(tmp_path, bits)
    theirs = dequantized_model(ours, tmp_path)
    with torch.no_grad():
        logits = their_logits(theirs)
        assert torch.allclose(ours.logits(ours.hidden(tokens(), LENGTHS)), logits, atol=1e-5)
        assert not torch.allclose(logits, their_logits(hf_model(name)), atol=1e-3)
    loss_and_gradient(ours)
    logprobs = their_logprobs(theirs, 1.0)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    grads = {key.replace(".default", ""): p.grad for key, p in theirs.named_parameters() if p.grad is not None}
    mine = gradients_as_files(ours, tmp_path)
    assert set(mine) == set(grads)
    for key, grad in grads.items():
        assert grad.abs().max() > 0 and torch.allclose(mine[key], grad, atol=1e-5, rtol=1e-5), key


@pytest.mark.parametrize("recompute", (None, *Recompute))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_no_dequantized_weight_is_saved_for_the_backward_pass(
    dtype: torch.dtype, recompute: Recompute | None, tmp_path: Path
) -> None:
    """And gradients are those of a base with the same weights."""
    hf_model("grouped llama").save_pretrained(tmp_path)
    ours = quantized_model(tmp_path, 8, dtype)
    plain = FlatParams(base_specs(ours.config), {n: ours.base.box(n) for n in ours.base.names}, dtype, "cpu")
    for name in plain.names:
        plain.view(name).copy_(ours.base.view(name))
    own = FlatParams(own_specs(ours.config), {n: ours.params.box(n) for n in ours.params.names}, torch.float32, "cpu")
    own.data.copy_(ours.params.data)
    weights = {(48, 32), (64, 32), (32, 32), (96, 32), (32, 48)}
    saved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (shape := tuple(tensor.shape)) in weights or shape[::-1] in weights:
            saved.append(shape)
        return tensor

    ours.recompute = recompute
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gradient = loss_and_gradient(ours)
    assert saved == []
    expected = loss_and_gradient(Transformer(ours.config, own, base=plain))
    assert (gradient - expected).norm() < (1e-6 if dtype == torch.float32 else 2e-2) * expected.norm()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", GROUPED)
def test_decoding_equals_a_full_forward(name: str, bits: int, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    ours = quantized_model(tmp_path, bits)
    with torch.no_grad():
        row = tokens()[:8]
        full = ours.hidden(row, [8])
        cache = ours.new_cache(1, 16)
        ours.hidden(row[:3], [3], cache, [0])
        with ours.decoding():
            for at in range(3, 8):
                hidden = ours.decode(row[at : at + 1], torch.tensor([at]), cache)
                assert torch.allclose(hidden[0], full[at], atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_new_adapters_have_no_effect(dtype: torch.dtype, tmp_path: Path) -> None:
    hf_model("grouped gpt2").save_pretrained(tmp_path)
    ours = quantized_model(tmp_path, 4, dtype)
    for name in ours.params.names:
        if name.endswith(".lora_b"):
            ours.params.view(name).zero_()
    own = FlatParams((), {}, torch.float32, "cpu")
    reference = Transformer(replace(ours.config, lora=Lora(0, 1.0, (), 4, GROUP_SIZE)), own, base=ours.base)
    with torch.no_grad():
        assert torch.equal(ours.hidden(tokens(), LENGTHS), reference.hidden(tokens(), LENGTHS))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bits", BITS)
def test_the_planner_knows_the_bytes(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    hf_model("grouped llama").save_pretrained(tmp_path)
    ours = quantized_model(tmp_path, bits, dtype)
    assert isinstance(ours.base, QuantizedParams)
    assert ours.base.nbytes == base_nbytes(ours.config, 1, range(4), dtype.itemsize)
    plain = replace(ours.config, lora=Lora(RANK))
    small, large = ({s.name: s for s in base_specs(c)} for c in (ours.config, plain))
    assert small.keys() == large.keys() and len(quantized_names(ours.config)) == 2 * 7
    rest = sum(spec.numel for name, spec in large.items() if name not in quantized_names(ours.config))
    matrices = (ours.base.nbytes - rest * dtype.itemsize) / sum(large[n].numel for n in quantized_names(ours.config))
    assert matrices == bits / 8 + dtype.itemsize / GROUP_SIZE


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_adapters_are_merged_into_dequantized_weights(dtype: torch.dtype, bits: int, tmp_path: Path) -> None:
    hf_model("grouped gpt2").save_pretrained(tmp_path)
    ours = quantized_model(tmp_path, bits, dtype)

    def read(name: str) -> torch.Tensor:
        return (ours.params if name in ours.params.names else ours.base).view(name)

    save_hf(tmp_path / "merged", ours.config, lambda name: merged_parameter(ours.config, read, name), None)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {dtype}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        logits = ours.logits(ours.hidden(tokens(), LENGTHS))
        assert torch.allclose(their_logits(model), logits, atol=1e-5 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    hf_model("grouped llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="layers.1.up: weights are not finite"):
        quantized_model(tmp_path, 8)
