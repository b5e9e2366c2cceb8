"""Quantized folders are read as transformers or a packer of this file stores them: FP8, MXFP4, GPTQ, AWQ."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from realhf.arch.hf_config import read_hf_config
from realhf.models.stored_formats import stored_format
from tests.models.tiny_models import hf_model, load_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""What gptqmodel subtracts from the integers of zero points for the first format of GPTQ."""
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class Folder:
    """The tensors of a file, as ``stored_format`` takes them."""

    def __init__(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        save_file(tensors, path)
        self._file, self.names = safe_open(path, framework="pt"), set(tensors)

    def handle(self, name: str) -> Any:
        return self._file.get_slice(name)


def random_box(shape: tuple[int, ...], rng: random.Random) -> tuple[slice, ...]:
    edges = [sorted(rng.sample(range(size + 1), 2)) for size in shape]
    return tuple(slice(start, stop) for start, stop in edges)


def check_boxes(folder: Folder, options: dict[str, Any], name: str, expected: torch.Tensor) -> None:
    """All of a tensor and random boxes equal the expected values."""
    form, rng = stored_format(folder, options), random.Random(3)
    assert form.shape(name) == tuple(expected.shape) and name in form.names
    boxes = [tuple(slice(0, size) for size in expected.shape), *(random_box(expected.shape, rng) for _ in range(40))]
    for box in boxes:
        assert torch.equal(form.read(name, box).float(), expected[box])


def packed(values: np.ndarray, order: tuple[int, ...], bits: int) -> torch.Tensor:
    """Pack the last dimension: integer i has the values ``order`` of its part, from the lowest bits."""
    per = 32 // bits
    result = np.zeros((*values.shape[:-1], values.shape[-1] // per), dtype=np.uint32)
    for column in range(result.shape[-1]):
        for place, one in enumerate(order):
            result[..., column] |= values[..., column * per + one].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(result.view(np.int32).copy())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("order", ["groups", "permuted", "none"])
def test_gptq(bits: int, version: str, order: str, tmp_path: Path) -> None:
    rng, n_in, n_out = np.random.default_rng(bits), 32, 48
    group = {"groups": np.arange(n_in) // 8, "permuted": rng.permutation(n_in) // 8, "none": np.zeros(n_in, int)}[order]
    values, zeros = rng.integers(0, 1 << bits, (n_in, n_out)), rng.integers(0, 1 << bits, (group.max() + 1, n_out))
    scales = torch.rand(group.max() + 1, n_out).half()
    places = tuple(range(32 // bits))
    tensors = {
        "m.qweight": packed(values.T.copy(), places, bits).t().contiguous(), "m.scales": scales,
        "m.qzeros": packed(zeros, places, bits) - ONES[bits] * (version == "gptq"),
    }  # fmt: skip
    if order == "permuted":
        tensors["m.g_idx"] = torch.from_numpy(group).int()
    expected = scales.float()[group] * torch.from_numpy(values - zeros[group]).float()
    options = {**GPTQ, "bits": bits, "checkpoint_format": version, "group_size": -1 if order == "none" else 8}
    check_boxes(Folder(tensors, tmp_path / "w"), options, "m.weight", expected.t())


def test_awq(tmp_path: Path) -> None:
    rng, n_in, n_out = np.random.default_rng(0), 32, 48
    values, zeros, group = rng.integers(0, 16, (n_in, n_out)), rng.integers(0, 16, (4, n_out)), np.arange(n_in) // 8
    scales = torch.rand(4, n_out).half()
    tensors = {
        "m.qweight": packed(values, AWQ_COLUMNS, 4), "m.qzeros": packed(zeros, AWQ_COLUMNS, 4), "m.scales": scales
    }  # fmt: skip
    expected = scales.float()[group] * torch.from_numpy(values - zeros[group]).float()
    check_boxes(Folder(tensors, tmp_path / "w"), AWQ, "m.weight", expected.t())


def as_fp8(weight: torch.Tensor, block: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 weights and the scales of their blocks."""
    if block is None:
        scale = weight.abs().max() / 448
        return (weight / scale).to(torch.float8_e4m3fn), scale.reshape(())
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    scales = torch.zeros(rows, columns)
    values = torch.zeros_like(weight)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[place].abs().max() / 448
            values[place] = weight[place] / scales[i, j]
    return values.to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("block", [(8, 8), (16, 16), (8, 20), None])
def test_fp8_equals_transformers(block: tuple[int, int] | None, tmp_path: Path) -> None:
    """The products of the blocks are quantized, embeddings and norms are not."""
    hf_model("grouped qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = as_fp8(tensors[name], block)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    options = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    write_format(tmp_path, options)
    ours, rows = load_model(tmp_path), torch.arange(3, 30)
    dequantised = {
        name: value for name in tensors if not name.endswith("_scale_inv")
        for value in [restored(tensors, name, block)]
    }  # fmt: skip
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(dequantised, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(without_format(tmp_path))
    assert torch.equal(load_model(plain).params.data, ours.params.data)
    if block == (8, 8):  # transformers needs blocks that divide
        reference = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=block),
            dtype=torch.float32,
        )  # fmt: skip
        with torch.no_grad():
            logits = ours.logits(ours.hidden(rows, [len(rows)]))
            assert torch.allclose(logits, reference(rows[None]).logits[0].float(), atol=1e-4)


def restored(tensors: dict[str, torch.Tensor], name: str, block: tuple[int, int] | None) -> torch.Tensor:
    if f"{name}_scale_inv" not in tensors:
        return tensors[name]
    weight, scales = tensors[name].float(), tensors[f"{name}_scale_inv"]
    if block is None:
        return weight * scales
    wide = scales.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)
    return weight * wide[:, : weight.shape[1]]


def write_format(folder: Path, options: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": options}))


def without_format(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    return json.dumps(config)


def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    hf_model("gpt_oss_blocks").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, ins, outs = tensors.pop(name).shape
        shape = (count, outs, ins // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator).byte()
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape, generator=generator).byte()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    write_format(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    ours, rows = load_model(tmp_path), torch.arange(3, 30)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    expected = dict(reference.named_parameters())["model.layers.0.mlp.experts.down_proj"].float()
    assert torch.equal(ours.params.view("layers.0.experts.down"), expected.transpose(1, 2))
    with torch.no_grad():
        logits = ours.logits(ours.hidden(rows, [len(rows)]))
        assert torch.allclose(logits, reference(rows[None]).logits[0].float(), atol=1e-3)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "supported are the methods fp8, mxfp4, gptq, awq"),
        ("fp8", "supported are the methods"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fmt' is 'e5m2', supported is 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size' is \\[128\\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "'weight_block_size' is"),
        ({**GPTQ, "bits": 3}, "'bits' is 3, supported is 2, 4, 8"),
        ({**GPTQ, "bits": True}, "'bits' is True"),
        ({**GPTQ, "group_size": 0}, "'group_size' is 0"),
        ({"quant_method": "gptq"}, "'bits' is missing"),
        ({**AWQ, "version": "gemv"}, "'version' is 'gemv'"),
        ({**AWQ, "zero_point": False}, "'zero_point' is False"),
        ({**AWQ, "a_later_invention": 3}, "'a_later_invention' is 3, which is not supported"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(options: Any, problem: str, tmp_path: Path) -> None:
    hf_model("llama").config.save_pretrained(tmp_path)
    write_format(tmp_path, options)
    with pytest.raises(ValueError, match=f"field 'quantization_config' is .*{problem}"):
        read_hf_config(tmp_path, scalar_head=False)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    tensors[name], scales = as_fp8(tensors[name], (16, 16))
    write_format(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    for more, problem in (
        ({}, f"tensor '{name}' is in FP8 and has no"),
        ({f"{name}_scale_inv": scales[:1].contiguous()}, "has shape .* for blocks of"),
    ):
        save_file({**tensors, **more}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=problem):
            load_model(tmp_path)
    (tmp_path / "config.json").write_text(without_format(tmp_path))
    save_file({**tensors}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"tensor '{name}' has the type F8_E4M3"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_moe"])
def test_stacked_experts_are_those_of_a_folder_with_one_matrix_each(name: str, tmp_path: Path) -> None:
    model = hf_model(name)
    model.save_pretrained(tmp_path / "split")
    model.config.save_pretrained(tmp_path / "stacked")
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    assert any(key.endswith(".mlp.experts.gate_up_proj") for key in tensors)
    save_file(tensors, tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    split, stacked = (load_model(tmp_path / folder) for folder in ("split", "stacked"))
    assert torch.equal(split.params.data, stacked.params.data)
