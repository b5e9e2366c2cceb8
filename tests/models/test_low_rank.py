"""LoRA against the library peft: forward passes, gradients, decoding, folders in both directions."""

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from realhf.api.model_config import Lora, ModelConfig
from realhf.api.param_box import whole
from realhf.arch.hf_config import read_hf_config
from realhf.arch.lora import base_specs, lora_modules, own_specs
from realhf.arch.peft_config import check_adapter
from realhf.base.errors import UserError
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import init_random, load_hf, save_hf
from realhf.models.low_rank import stacked
from realhf.models.peft_folder import load_peft, merged_parameter, peft_slices, save_peft
from realhf.models.transformer import Transformer
from tests.models.test_transformer import LENGTHS, loss_and_gradient, their_logits, their_logprobs, tokens
from tests.models.tiny_models import MODELS, ONE_OF_EACH, WITH_EXPERTS, hf_model, whole_params

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

RANK, ALPHA = 4, 6.0
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTED = (*(name for name in WITH_EXPERTS if name != "gpt_oss"), "qwen3_moe_some")


def with_adapters(folder: Path, scalar: bool = False, targets: tuple[str, ...] = ()) -> Transformer:
    """Return a model of a folder with new adapters, and random matrices B."""
    config = replace(read_hf_config(folder, scalar), lora=Lora(RANK, ALPHA, targets))
    own, base = (
        FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, torch.float32, "cpu")
        for specs in (own_specs(config), base_specs(config))
    )
    load_hf(folder, config, base, 0, frozenset({"head.weight"}) if scalar else frozenset())
    randomise(config, own)
    return Transformer(config, own, base=base)


def randomise(config: ModelConfig, own: FlatParams) -> None:
    """Initialise adapters, with random matrices B."""
    init_random(config, own, 0)
    generator = torch.Generator().manual_seed(1)
    for name in own.names:
        if name.endswith(".lora_b"):
            own.view(name).normal_(0.0, 0.1, generator=generator)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_slices_are_those_of_saved_files(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path / "model")
    ours = with_adapters(tmp_path / "model")
    save_peft(tmp_path / "adapter", ours.config, ours.params.view, "base", None)
    saved, found = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), set[str]()
    for weight, parts in peft_slices(ours.config).items():
        for part in parts:
            found.add(part.name)
            assert torch.equal(saved[part.name][part.stored(part.at)], ours.params.read(weight, part.at))
    assert found == saved.keys()


def theirs_with(ours: Transformer, name: str, folder: Path) -> torch.nn.Module:
    """Return peft's model with our adapters, loaded from the folder that we write."""
    save_peft(folder, ours.config, ours.params.view, "base", None)
    model = peft.PeftModel.from_pretrained(hf_model(name), folder, is_trainable=True)
    model.eval()
    return model


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_peft(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    ours = with_adapters(tmp_path)
    theirs = theirs_with(ours, name, tmp_path / "adapter")
    with torch.no_grad():
        hidden = ours.hidden(tokens(), LENGTHS)
        assert torch.allclose(ours.logits(hidden), their_logits(theirs), atol=1e-5)
        plain = base_of(ours).logits(base_of(ours).hidden(tokens(), LENGTHS))
        with theirs.disable_adapter():
            assert torch.allclose(plain, their_logits(theirs), atol=1e-5)
        assert not torch.allclose(plain, ours.logits(hidden), atol=1e-2)


def base_of(model: Transformer) -> Transformer:
    own = FlatParams((), {}, torch.float32, "cpu")
    return Transformer(replace(model.config, lora=Lora(0)), own, base=model.base)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_peft(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    ours = with_adapters(tmp_path)
    theirs = theirs_with(ours, name, tmp_path / "adapter")
    loss_and_gradient(ours)
    logprobs = their_logprobs(theirs, 1.0)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    grads = {key: p.grad for key, p in theirs.named_parameters() if p.grad is not None}
    for key, grad in grads.items():
        assert "lora" in key and grad.abs().max() > 0, key
    mine = gradients_as_files(ours, tmp_path)
    assert set(mine) == {key.replace(".default", "") for key in grads}
    for key, grad in grads.items():
        assert torch.allclose(mine[key.replace(".default", "")], grad, atol=1e-5, rtol=1e-5), key


@pytest.mark.parametrize("name", MODELS)
def test_gradients_after_a_pass_without_gradients(name: str, tmp_path: Path) -> None:
    """Generation reads the weights first, in RL: what it keeps of them must not lack gradients."""
    hf_model(name).save_pretrained(tmp_path)
    expected, ours = with_adapters(tmp_path), with_adapters(tmp_path)
    loss_and_gradient(expected)
    ours.params.enable_grad()
    with torch.no_grad():
        ours.hidden(tokens(), LENGTHS)
        ours.params.data.mul_(1.0)  # as another call may write weights
    loss_and_gradient(ours)
    assert torch.equal(ours.params.grad, expected.params.grad) and ours.params.grad.abs().max() > 0


def gradients_as_files(model: Transformer, folder: Path) -> dict[str, torch.Tensor]:
    """Return the gradients by peft's names: saving is linear."""
    save_peft(folder / "gradient", model.config, model.params.grad_view, "base", None)
    return load_file(folder / "gradient" / "adapter_model.safetensors")


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_an_adapter_of_peft_is_read_and_merged(name: str, tmp_path: Path) -> None:
    model = hf_model(name)
    model.save_pretrained(tmp_path)
    options = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=names_of(tmp_path), init_lora_weights=False,
        target_parameters=EXPERTS if name in ROUTED else None,
        fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(model, options)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = with_adapters(tmp_path)
    load_peft(tmp_path / "adapter", ours.config, ours.params)
    with torch.no_grad():
        logits = their_logits(theirs)
        assert torch.allclose(ours.logits(ours.hidden(tokens(), LENGTHS)), logits, atol=1e-5)

        def read(weight: str) -> torch.Tensor:
            return (ours.params if weight in ours.params.names else ours.base).view(weight)

        save_hf(tmp_path / "merged", ours.config, lambda weight: merged_parameter(ours.config, read, weight), None)
        config = read_hf_config(tmp_path / "merged", False)
        params = whole_params(config)
        load_hf(tmp_path / "merged", config, params, 0)
        merged = Transformer(config, params)
        assert torch.allclose(merged.logits(merged.hidden(tokens(), LENGTHS)), logits, atol=1e-5)


def names_of(folder: Path) -> list[str]:
    config = replace(read_hf_config(folder, False), lora=Lora(RANK))
    return sorted({module.name for module in lora_modules(config) if ".experts." not in module.path})


@pytest.mark.parametrize("name", ("llama", "qwen3", "gpt2", "gemma2", "mixtral", "olmo2"))
def test_decoding_merges_or_adds_adapters(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    ours = with_adapters(tmp_path)
    with torch.no_grad():
        row = tokens()[:8]
        full = ours.hidden(row, [8])
        for context in (False, True):
            cache = ours.new_cache(1, 16)
            ours.hidden(row[:3], [3], cache, [0])
            with ours.decoding():
                for at in range(3, 8):
                    hidden = ours.decode(row[at : at + 1], torch.tensor([at]), cache)
                    assert torch.allclose(hidden[0], full[at], atol=1e-5), context
            ours.params.data.mul_(1.5)  # the next context must read the weights again
            full = ours.hidden(row, [8])


def test_new_adapters_have_no_effect(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    ours = with_adapters(tmp_path)
    for name in ours.params.names:
        if name.endswith(".lora_b"):
            ours.params.view(name).zero_()
    with torch.no_grad():
        assert torch.equal(ours.hidden(tokens(), LENGTHS), base_of(ours).hidden(tokens(), LENGTHS))


def test_a_scalar_head_is_trained_and_saved(tmp_path: Path) -> None:
    hf_model("qwen2").save_pretrained(tmp_path)
    ours = with_adapters(tmp_path, scalar=True)
    ours.params.view("head.weight").fill_(0.5)
    save_peft(tmp_path / "adapter", ours.config, ours.params.view, str(tmp_path), None)
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        row = tokens()[:9]
        values = ours.values(ours.states(row, [9]), 9)
        assert torch.allclose(values[-1:], theirs(row[None]).logits[0], atol=1e-5)
    again = with_adapters(tmp_path, scalar=True)
    again.params.data.zero_()
    load_peft(tmp_path / "adapter", again.config, again.params)
    assert torch.equal(again.params.data, ours.params.data)


def test_some_targets(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    ours = with_adapters(tmp_path, targets=("q_proj", "v_proj", "up_proj"))
    theirs = theirs_with(ours, "llama", tmp_path / "adapter")
    with torch.no_grad():
        assert torch.allclose(ours.logits(ours.hidden(tokens(), LENGTHS)), their_logits(theirs), atol=1e-5)
    with pytest.raises(ValueError, match="c_attn is no module of a llama model, which has down_proj, gate_proj"):
        with_adapters(tmp_path, targets=("c_attn",))


@pytest.mark.parametrize(
    "edit, problem",
    [
        ({"r": 8}, "lora.rank=8 lora.alpha=6"),
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": True}, "use_rslora"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ],
)
def test_other_adapters_are_refused(edit: dict, problem: str, tmp_path: Path) -> None:
    import json

    hf_model("llama").save_pretrained(tmp_path)
    ours = with_adapters(tmp_path)
    save_peft(tmp_path / "adapter", ours.config, ours.params.view, "base", None)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **edit}))
    with pytest.raises(ValueError, match=problem):
        load_peft(tmp_path / "adapter", ours.config, ours.params)


KINDS: dict[str, dict] = {
    "pissa": {"init_lora_weights": "pissa"}, "pissa_niter_2": {"init_lora_weights": "pissa_niter_2"},
    "olora": {"init_lora_weights": "olora"}, "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"q_proj": 2}}, "alphas": {"alpha_pattern": {"q_proj": 2}}, "biases": {"bias": "all"},
    "some layers": {"layers_to_transform": [0]}, "without q": {"exclude_modules": ["q_proj"]},
    "all": {"target_modules": "all-linear"}, "expression": {"target_modules": r".*layers\.0.*proj"},
    "with head": {"modules_to_save": ["lm_head"]}, "transposed": {"fan_in_fan_out": True},
}  # fmt: skip
"""Options of PEFT; those that are not read as PEFT reads them have to be refused."""
READ = {"gaussian", "orthogonal", "all", "transposed"}
PATTERNS: dict[str, dict] = {
    "none": {},
    "both": {"rank_pattern": {r".*\.gate_up_proj": 2 * RANK}, "alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA}},
    "ranks": {"rank_pattern": {r".*\.gate_up_proj": 2 * RANK}},
    "alphas": {"alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA}},
    "others": {"rank_pattern": {r".*\.down_proj": 2}},
    "reversed": {"target_parameters": EXPERTS[::-1]},
}
CASES = {f"llama {name}": ("llama", own, name in READ) for name, own in KINDS.items()} | {
    f"{model} {name}": (model, {"target_parameters": EXPERTS} | own, name in ("none", "both", "reversed"))
    for model in ("qwen3_moe", "mixtral") for name, own in PATTERNS.items()
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_peft_is_read_as_by_peft_or_refused(case: str, tmp_path: Path) -> None:
    """No option of PEFT changes what an adapter does without notice."""
    name, own, is_read = CASES[case]
    hf_model(name).save_pretrained(tmp_path)
    ours = with_adapters(tmp_path)
    options = {"target_modules": names_of(tmp_path), "init_lora_weights": False, "task_type": "CAUSAL_LM"} | own
    torch.manual_seed(0)
    model = peft.get_peft_model(hf_model(name), peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **options))
    for param in model.parameters():
        if param.requires_grad:
            param.data.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(hf_model(name), tmp_path / "adapter").eval()
    if not is_read:
        with pytest.raises(ValueError, match=str(tmp_path / "adapter")):
            check_adapter(tmp_path / "adapter", ours.config)
        return
    load_peft(tmp_path / "adapter", ours.config, ours.params)
    with torch.no_grad():
        assert torch.allclose(ours.logits(ours.hidden(tokens(), LENGTHS)), their_logits(theirs), atol=1e-4)


@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_one_parameter_of_the_experts(name: str, target: str, tmp_path: Path) -> None:
    """PEFT nests its adapters otherwise than those of two."""
    hf_model(name).save_pretrained(tmp_path)
    ours = with_adapters(tmp_path, targets=("q_proj", target))
    theirs = theirs_with(ours, name, tmp_path / "adapter")
    with torch.no_grad():
        logits = ours.logits(ours.hidden(tokens(), LENGTHS))
        assert torch.allclose(logits, their_logits(theirs), atol=1e-5)
        ours.params.data.zero_()
        load_peft(tmp_path / "adapter", ours.config, ours.params)
        assert torch.equal(ours.logits(ours.hidden(tokens(), LENGTHS)), logits)


@pytest.mark.parametrize("text", ["{", "", "[]", "null", "3", '"r"', "[1]"])
def test_a_config_of_another_form_is_damaged(text: str, tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    ours = with_adapters(tmp_path)
    save_peft(tmp_path / "adapter", ours.config, ours.params.view, "base", None)
    (tmp_path / "adapter" / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match="adapter_config.json is damaged"):
        check_adapter(tmp_path / "adapter", ours.config)


def test_damaged_and_foreign_adapters_are_refused(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    ours, folder = with_adapters(tmp_path), tmp_path / "adapter"
    save_peft(folder, ours.config, ours.params.view, "base", None)
    file = folder / "adapter_model.safetensors"
    whole_file, tensors = file.read_bytes(), load_file(file)
    first = min(tensors)
    edits = {
        "has shape": {**tensors, first: tensors[first][:, 1:].contiguous()},
        "lacks 1 tensors": {name: tensor for name, tensor in tensors.items() if name != first},
        "has 1 tensors without a module": {**tensors, "base_model.model.x.lora_A.weight": torch.zeros(1)},
    }
    for problem, edited in edits.items():
        save_file(edited, file)
        with pytest.raises(ValueError, match=problem):
            check_adapter(folder, ours.config)
    for damaged in (b"", whole_file[:3000], b"x" * 100):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="is missing or damaged"):
            check_adapter(folder, ours.config)
    file.unlink()
    with pytest.raises(ValueError, match="is missing or damaged"):
        check_adapter(folder, ours.config)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="adapter_config.json"):
        check_adapter(folder, ours.config)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_a_product_of_several_matrices(parts: list[tuple[int, bool]], rank: int, shares_a: bool) -> None:
    """Each matrix gets its own B @ A; rows without an adapter get nothing."""
    generator = torch.Generator().manual_seed(0)
    adapted = [rows for rows, has_adapter in parts if has_adapter]
    if not adapted:
        return
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    as_ = [random(rank, 7)] * len(adapted) if shares_a else [random(rank, 7) for _ in adapted]
    bs = [random(rows, rank) for rows in adapted]
    pairs = iter(zip(as_, bs, strict=True))
    expected = torch.cat([(lambda a, b: b @ a)(*next(pairs)) if has else torch.zeros(rows, 7) for rows, has in parts])
    rest = iter(bs)
    numbers = itertools.count()
    firsts = [next(numbers) if has and not shares_a else 0 for _, has in parts]
    matrices = [next(rest) if has else rows for rows, has in parts]
    adapter = stacked(as_[0] if shares_a else torch.cat(as_), matrices, firsts, 0.5)
    x, y = random(3, 7), random(3, sum(rows for rows, _ in parts))
    assert torch.allclose(adapter.add_to(y, x), y + 0.5 * x @ expected.t())
    assert torch.allclose(adapter.merged(torch.zeros_like(expected)), 0.5 * expected.to(expected.dtype), atol=1e-6)
