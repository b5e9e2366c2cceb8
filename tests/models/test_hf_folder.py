"""Hugging Face folders: whole and sharded files, reading slices, invalid folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2Model,
    PreTrainedModel,
)

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import relative, shard_box, whole
from realhf.arch.hf_config import read_hf_config
from realhf.arch.param_specs import param_specs
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import init_random, load_hf, save_hf
from tests.models.tiny_models import GPT2, MODELS, ONE_OF_EACH, whole_params
from tests.models.tiny_models import hf_model as hugging_face
from tests.models.tiny_models import load_model as load

TOKENS = torch.arange(4, 16)
WITHOUT_CLASSIFIER = ("granite", "cohere2", "olmoe", "glm4_moe", "qwen3_5_moe_text")
"""Families for which transformers has no class with a scalar head."""


def boxes(config: ModelConfig, tp: int = 1, rank: int = 0) -> dict[str, tuple]:
    return {spec.name: shard_box(spec, tp, rank) for spec in param_specs(config)}


def written_by_hf(name: str, folder: Path, **options: object) -> PreTrainedModel:
    model = hugging_face(name)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_bytes", [5e9, 2e4])
def test_transformers_loads_saved_folders(
    name: str, max_bytes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realhf.models.hf_folder.MAX_FILE_BYTES", max_bytes)
    original = written_by_hf(name, tmp_path / "in", max_shard_size=int(max_bytes))
    ours = load(tmp_path / "in")
    save_hf(tmp_path / "out", ours.config, ours.params.view, None)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (max_bytes < 1e5)
    back, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        expected = original(TOKENS[None]).logits
        assert torch.allclose(back.eval()(TOKENS[None]).logits, expected, atol=1e-5)
        again = load(tmp_path / "out")
        assert again.config == ours.config
        assert torch.equal(again.params.data, ours.params.data)
        assert torch.allclose(again.logits(again.hidden(TOKENS, [12])), expected[0], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_scalar_head_is_a_sequence_classifier(name: str, tmp_path: Path) -> None:
    written_by_hf(name, tmp_path / "in")
    critic = load(tmp_path / "in", scalar_head=True, seed=5)
    assert critic.params.view("head.weight").std() > 0
    save_hf(tmp_path / "out", critic.config, critic.params.view, None)
    assert torch.equal(load(tmp_path / "out", scalar_head=True).params.data, critic.params.data)
    if critic.config.family in WITHOUT_CLASSIFIER:
        return
    back, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    with torch.no_grad():
        scores = back.eval()(TOKENS[None]).logits
        values = critic.values(critic.states(TOKENS, [12]), 12)
    assert scores.shape == (1, 1)
    assert torch.allclose(scores[0, 0], values[-1], atol=1e-4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_shards_read_their_slices(name: str, tmp_path: Path) -> None:
    written_by_hf(name, tmp_path, max_shard_size=20_000)
    full = load(tmp_path)
    specs = {spec.name: spec for spec in param_specs(full.config)}
    for rank in range(2):
        params = FlatParams(list(specs.values()), boxes(full.config, 2, rank), torch.float32, "cpu")
        load_hf(tmp_path, full.config, params, 0)
        for spec in specs.values():
            expected = full.params.view(spec.name)[relative(params.box(spec.name), whole(spec.shape))]
            assert torch.equal(params.view(spec.name), expected)


def test_a_pipeline_stage_reads_its_layers(tmp_path: Path) -> None:
    written_by_hf("llama", tmp_path)
    full = load(tmp_path)
    mine = {name: box for name, box in boxes(full.config).items() if name.startswith("layers.1.")}
    params = FlatParams(param_specs(full.config), mine, torch.bfloat16, "cpu")
    load_hf(tmp_path, full.config, params, 0)
    assert torch.equal(params.view("layers.1.wq"), full.params.view("layers.1.wq").bfloat16())


def test_a_base_model_without_prefix_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = GPT2Model(GPT2Config(**GPT2)).eval()
    base.save_pretrained(tmp_path)
    ours = load(tmp_path)
    with torch.no_grad():
        assert torch.allclose(ours.hidden(TOKENS, [12]), base(TOKENS[None]).last_hidden_state[0], atol=1e-4)


def test_bfloat16_weights_are_saved_as_bfloat16(tmp_path: Path) -> None:
    written_by_hf("qwen2", tmp_path / "in")
    config = read_hf_config(tmp_path / "in", False)
    params = whole_params(config, torch.bfloat16)
    load_hf(tmp_path / "in", config, params, 0)
    save_hf(tmp_path / "out", config, params.view, None)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_tokenizer_files_are_copied_and_an_old_folder_is_replaced(tmp_path: Path) -> None:
    written_by_hf("llama", tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "README.md"):
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale").write_text("")
    ours = load(tmp_path / "in")
    save_hf(tmp_path / "out", ours.config, ours.params.view, tmp_path / "in")
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "config.json"} < files
    assert not {"README.md", "stale"} & files
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3_moe"])
def test_a_random_model_does_not_depend_on_its_sharding(name: str, tmp_path: Path) -> None:
    written_by_hf(name, tmp_path)
    config = read_hf_config(tmp_path, False)
    full, half = (FlatParams(param_specs(config), boxes(config, tp, tp - 1), torch.float32, "cpu") for tp in (1, 2))
    for params in (full, half):
        init_random(config, params, 7)
    for name in half.names:
        assert torch.equal(half.view(name), full.view(name)[relative(half.box(name), whole(half.spec(name).shape))])
    assert full.view("layers.0.wq").std() == pytest.approx(config.init_std, rel=0.1)
    assert bool((full.view("final_norm.weight") == 1 - config.norm_offset).all())
    assert "layers.1.bo" not in full.names or not full.view("layers.1.bo").any()
    before = full.data.clone()
    init_random(config, full, 8)
    assert not torch.equal(full.data, before)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_invalid_folders_are_rejected(tmp_path: Path) -> None:
    written_by_hf("llama", tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 tensors: score\.weight"):
        config = read_hf_config(tmp_path, True)
        load_hf(tmp_path, config, whole_params(config), 0)
    edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    with pytest.raises(ValueError, match="1 tensors that this architecture lacks: .*q_norm"):
        load(tmp_path)
    edit(tmp_path, lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"))
    edit(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ValueError, match=r"'model.norm.weight' has shape \[31\], expected \[32\] by config.json"):
        load(tmp_path)
    edit(tmp_path, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"lacks 1 tensors: model\.norm\.weight"):
        load(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled .bin weights"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="has no model.safetensors and no model.safetensors.index.json"):
        load(tmp_path)


UNUSED = {
    "lm_head.bias": torch.ones(67),
    "model.layers.0.self_attn.q_proj.weight_scale": torch.ones(1),
    "model.layers.2.mlp.up_proj.weight": torch.ones(50, 32),
    "embed_tokens.weight": torch.zeros(67, 32),
}


@pytest.mark.parametrize("name", UNUSED)
def test_tensors_that_would_be_ignored_are_refused(name: str, tmp_path: Path) -> None:
    written_by_hf("llama_tied", tmp_path)
    edit(tmp_path, lambda t: t.update({name: UNUSED[name]}))
    with pytest.raises(ValueError, match=f"1 tensors that this architecture lacks: {name}"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama_tied", "gemma", "gpt2", "gpt_neox_serial"])
def test_a_stored_copy_of_a_tied_embedding_must_equal_it(family: str, tmp_path: Path) -> None:
    written_by_hf(family, tmp_path)
    names = {"gpt2": ("transformer.wte.weight", "lm_head.weight"),
             "gpt_neox_serial": ("gpt_neox.embed_in.weight", "embed_out.weight")}  # fmt: skip
    embed, copy = names.get(family, ("model.embed_tokens.weight", "lm_head.weight"))
    edit(tmp_path, lambda t: t.update({copy: t[embed].clone()}))
    load(tmp_path)
    edit(tmp_path, lambda t: t[copy][66, 31].add_(1e-3))
    load(tmp_path, scalar_head=True)  # has no head over the vocabulary
    with pytest.raises(ValueError, match=f"'{embed}' and '{copy}' differ, but config.json ties them"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
def test_weights_that_are_not_floats_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    written_by_hf("llama", tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    edit(tmp_path, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"tensor '{name}' has the type .*: dequantise the weights"):
        load(tmp_path)
