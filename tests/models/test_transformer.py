"""The packed transformer against Hugging Face: logits, gradients, decoding, recomputation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from realhf.api.model import ModelConfig
from realhf.api.params import relative, whole
from realhf.models.cache import KVCache
from realhf.models.families import FAMILIES
from realhf.models.flat import FlatParams
from realhf.models.hf import init_random, load_hf
from realhf.models.specs import param_specs, read_hf_config
from realhf.models.transformer import Transformer

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 67, "max_position_embeddings": 64, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
GPT2_SIZES = {"vocab_size": 67, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True)),
    "llama_scaled": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
}
LENGTHS = [9, 9, 4, 1]


def whole_params(config: ModelConfig, dtype: torch.dtype = torch.float32) -> FlatParams:
    specs = param_specs(config)
    return FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, dtype, "cpu")


def twins(name: str, folder: Path) -> tuple[torch.nn.Module, Transformer]:
    """A random Hugging Face model, biases and norms included, and ours with the same weights."""
    torch.manual_seed(0)
    theirs = MODELS[name]().eval()
    with torch.no_grad():
        for param in theirs.parameters():
            if param.ndim == 1:
                param.add_(0.1 * torch.randn_like(param))
    theirs.save_pretrained(folder)
    config = read_hf_config(folder, False)
    params = whole_params(config)
    load_hf(folder, config, params, seed=0)
    return theirs, Transformer(config, params)


def tokens() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(67, (sum(LENGTHS),))


def their_logits(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([model(row[None]).logits[0] for row in tokens().split(LENGTHS)])


def their_logprobs(model: torch.nn.Module, temperature: float) -> torch.Tensor:
    rows = []
    for logits, row in zip(their_logits(model).split(LENGTHS), tokens().split(LENGTHS), strict=True):
        logp = torch.log_softmax(logits[:-1] / temperature, -1).gather(1, row[1:, None])[:, 0]
        rows.append(torch.cat((torch.zeros(1), logp)))
    return torch.cat(rows)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_logprobs_equal_hugging_face(name: str, tmp_path: Path) -> None:
    theirs, ours = twins(name, tmp_path)
    with torch.no_grad():
        hidden = ours.hidden(tokens(), LENGTHS)
        assert torch.allclose(ours.logits(hidden), their_logits(theirs), atol=1e-4)
        logprobs = ours.logprobs(hidden, tokens(), LENGTHS, temperature=0.7)
        assert torch.allclose(logprobs, their_logprobs(theirs, 0.7), atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding_equal_the_full_forward(name: str, tmp_path: Path) -> None:
    ours = twins(name, tmp_path)[1]
    lengths, prompts, slots = [9, 9, 5], [3, 5, 1], [2, 0, 1]
    rows = tokens()[: sum(lengths)].split(lengths)
    with torch.no_grad():
        full = ours.hidden(torch.cat(rows), lengths).split(lengths)
        cache = KVCache(ours.config, 4, 16, torch.float32, "cpu")
        prefixes = torch.cat([row[:n] for row, n in zip(rows, prompts, strict=True)])
        ours.hidden(prefixes, prompts, cache, slots)
        by_slot = [(rows[slots.index(slot)], full[slots.index(slot)], prompts[slots.index(slot)]) for slot in range(3)]
        for step in range(4):
            positions = [prompt + step for _, _, prompt in by_slot]
            new = torch.stack([row[at] for (row, _, _), at in zip(by_slot, positions, strict=True)])
            hidden = ours.decode(new, torch.tensor(positions), cache)
            expected = torch.stack([full_row[at] for (_, full_row, _), at in zip(by_slot, positions, strict=True)])
            assert torch.allclose(hidden, expected, atol=1e-4)


def loss_and_gradient(model: Transformer) -> torch.Tensor:
    """Differentiate a weighted sum of log-probabilities and return the flat gradient."""
    model.params.enable_grad()
    model.params.zero_grad()
    logprobs = model.logprobs(model.hidden(tokens(), LENGTHS), tokens(), LENGTHS)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    assert model.params.grad is not None
    return model.params.grad.clone()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_hugging_face(name: str, tmp_path: Path) -> None:
    theirs, ours = twins(name, tmp_path)
    loss_and_gradient(ours)
    logprobs = their_logprobs(theirs, 1.0)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    gradients = {key: param.grad for key, param in theirs.named_parameters()}
    collected = FlatParams(
        param_specs(ours.config), {n: ours.params.box(n) for n in ours.params.names}, torch.float32, "cpu"
    )
    collected.data.copy_(ours.params.grad)
    for our_name, tensor in FAMILIES[ours.config.family].hf_tensors(ours.config).items():
        gradient = gradients[tensor.name]
        if tensor.box is not None:
            gradient = gradient[relative(tensor.box, whole(gradient.shape))]
        gradient = gradient.t() if tensor.transpose else gradient
        assert torch.allclose(collected.view(our_name), gradient, atol=1e-4), our_name


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputed_activations_give_the_same_gradient(name: str, tmp_path: Path) -> None:
    ours = twins(name, tmp_path)[1]
    saving = Transformer(ours.config, ours.params, checkpoint_activations=True)
    assert torch.equal(loss_and_gradient(ours), loss_and_gradient(saving))


def test_sixteen_bit_training_collects_a_float32_gradient(tmp_path: Path) -> None:
    exact = twins("llama", tmp_path)[1]
    params = whole_params(exact.config, torch.bfloat16)
    load_hf(tmp_path, exact.config, params, seed=0)
    rough, fine = loss_and_gradient(Transformer(exact.config, params)), loss_and_gradient(exact)
    assert rough.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(rough, fine, dim=0) > 0.999


def test_a_bound_model_follows_its_parameters(tmp_path: Path) -> None:
    ours = twins("llama", tmp_path)[1]
    first = ours.hidden(tokens(), LENGTHS)
    backup = ours.params.data.clone()
    ours.params.free()
    with pytest.raises(AssertionError, match="released"):
        ours.hidden(tokens(), LENGTHS)
    ours.params.allocate()
    ours.params.data.copy_(backup)
    assert torch.equal(ours.hidden(tokens(), LENGTHS), first)
    ours.params.enable_grad()
    assert ours.hidden(tokens(), LENGTHS).requires_grad


def test_training_follows_generation_in_inference_mode(tmp_path: Path) -> None:
    ours = twins("llama", tmp_path)[1]
    expected = loss_and_gradient(ours)
    fresh = Transformer(ours.config, ours.params)
    with torch.inference_mode():
        fresh.hidden(tokens(), LENGTHS)
    assert torch.equal(loss_and_gradient(fresh), expected)


def test_an_empty_batch_runs_both_ways(tmp_path: Path) -> None:
    ours = twins("gpt2", tmp_path)[1]
    ours.params.enable_grad()
    nothing = torch.empty(0, dtype=torch.int64)
    hidden = ours.hidden(nothing, [])
    (ours.logprobs(hidden, nothing, []).sum() + hidden.sum()).backward()
    assert ours.params.grad is not None
    assert not ours.params.grad.any()


def test_rows_beyond_learned_positions_are_refused(tmp_path: Path) -> None:
    ours = twins("gpt2", tmp_path)[1]
    with pytest.raises(ValueError, match="a row of 65 tokens; this model has 64 positions"):
        ours.hidden(torch.zeros(65, dtype=torch.int64), [65])


def test_values_are_the_scalar_head(tmp_path: Path) -> None:
    twins("qwen2", tmp_path)
    config = read_hf_config(tmp_path, True)
    params = whole_params(config)
    init_random(config, params, 3)
    model = Transformer(config, params)
    hidden = model.hidden(tokens(), LENGTHS)
    values = model.values(hidden)
    assert values.shape == (sum(LENGTHS),)
    assert torch.allclose(values, hidden @ params.view("head.weight")[0], atol=1e-6)
