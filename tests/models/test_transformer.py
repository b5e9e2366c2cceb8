"""The packed transformer against transformers: logits, gradients, decoding, recomputation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from realhf.api.config import Recompute
from realhf.arch.hf_config import read_hf_config
from realhf.models.hf_folder import init_random, load_hf
from realhf.models.transformer import Transformer
from realhf.ops.moe import RoutingRule, balance_loss, route
from tests.models.tiny_models import MODELS, VOCAB, both_models, whole_params
from tests.models.tiny_models import hf_model as hugging_face

LENGTHS = [9, 9, 4, 1]  # windows are 4


def tokens() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(VOCAB, (sum(LENGTHS),))


def their_logits(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([model(row[None]).logits[0] for row in tokens().split(LENGTHS)])


def their_logprobs(model: torch.nn.Module, temperature: float) -> torch.Tensor:
    rows = []
    for logits, row in zip(their_logits(model).split(LENGTHS), tokens().split(LENGTHS), strict=True):
        logp = torch.log_softmax(logits[:-1] / temperature, -1).gather(1, row[1:, None])[:, 0]
        rows.append(torch.cat((torch.zeros(1), logp)))
    return torch.cat(rows)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs, ours = both_models(name, tmp_path)
    with torch.no_grad():
        hidden = ours.hidden(tokens(), LENGTHS)
        assert torch.allclose(ours.logits(hidden), their_logits(theirs), atol=1e-4)
        logprobs = ours.logprobs(hidden, tokens(), LENGTHS, temperature=0.7)
        assert torch.allclose(logprobs, their_logprobs(theirs, 0.7), atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding_equal_a_full_forward(name: str, tmp_path: Path) -> None:
    ours = both_models(name, tmp_path)[1]
    lengths, prompts, slots = [9, 9, 5], [3, 5, 1], [2, 0, 1]
    rows = tokens()[: sum(lengths)].split(lengths)
    with torch.no_grad():
        full = ours.hidden(torch.cat(rows), lengths).split(lengths)
        cache = ours.new_cache(4, 16)
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
    """Return the flat gradient of a weighted sum of log-probabilities."""
    model.params.enable_grad()
    model.params.zero_grad()
    logprobs = model.logprobs(model.hidden(tokens(), LENGTHS), tokens(), LENGTHS)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    assert model.params.grad is not None
    return model.params.grad.clone()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs, ours = both_models(name, tmp_path)
    loss_and_gradient(ours)
    logprobs = their_logprobs(theirs, 1.0)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    compare_gradients(theirs, ours, tmp_path / "gradients")


def compare_gradients(theirs: torch.nn.Module, ours: Transformer, folder: Path) -> None:
    """Save their gradients as weights and load them, which translates names and shapes."""
    with torch.no_grad():
        for param in theirs.parameters():
            param.copy_(param.grad)
    theirs.save_pretrained(folder)
    gradients = whole_params(ours.config)
    load_hf(folder, ours.config, gradients, seed=0)
    for name in gradients.names:
        assert torch.allclose(ours.params.grad_view(name), gradients.view(name), atol=1e-5), name


def router_losses(theirs: torch.nn.Module, balance: float, z: float) -> torch.Tensor:
    """Return both losses by definition: means over routed layers and tokens, balance within each row and layer."""
    total, per_token = torch.zeros(()), theirs.config.num_experts_per_tok
    for row in tokens().split(LENGTHS):
        for logits in theirs(row[None], output_router_logits=True).router_logits:
            probs = logits.softmax(-1)
            chosen = torch.nn.functional.one_hot(probs.topk(per_token).indices, probs.shape[1]).sum(1).float()
            total = total + balance * len(row) * probs.shape[1] * (chosen.mean(0) * probs.mean(0)).sum()
            total = total + z * logits.logsumexp(-1).square().sum()
    n_layers = len(theirs(row[None], output_router_logits=True).router_logits)
    return total / sum(LENGTHS) / n_layers


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe_some"])
@pytest.mark.parametrize("saving", [False, True])
def test_router_losses_are_added_to_the_gradient(name: str, saving: bool, tmp_path: Path) -> None:
    theirs, ours = both_models(name, tmp_path)
    assert ours.config.balance_loss == 0.5
    ours = Transformer(replace(ours.config, z_loss=0.3), ours.params, recompute=Recompute.full if saving else None)
    ours.params.enable_grad()
    hidden = ours.states(tokens(), LENGTHS, token_weight=1 / sum(LENGTHS)).all()
    ours.logprobs(hidden, tokens(), LENGTHS).sum().backward()
    (their_logprobs(theirs, 1.0).sum() + router_losses(theirs, 0.5, 0.3)).backward()
    sums = ours.pop_router_sums()  # counted once if recomputed
    losses, n_layers = sums[:, :2].mean(0) / sum(LENGTHS), len(ours.config.routed_layers)
    assert sums[:, 2:].sum() == sum(LENGTHS) * ours.config.experts_per_token * n_layers
    with torch.no_grad():
        expected = [float(router_losses(theirs, balance, 1.0 - balance)) for balance in (1.0, 0.0)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-4) and not ours.pop_router_sums().any()
    compare_gradients(theirs, ours, tmp_path / "gradients")


def test_the_balance_loss_of_one_row_and_layer_equals_transformers() -> None:
    theirs = hugging_face("mixtral")
    row = tokens()[: LENGTHS[0]]
    result = theirs(row[None], output_router_logits=True)
    logits = result.router_logits[0]
    probs, _, experts = route(logits, RoutingRule(2, True))
    rows = torch.zeros(len(row), dtype=torch.int64)
    ours = balance_loss(probs, experts, rows, 1, rows)
    expected = load_balancing_loss_func((logits,), 5, 2)
    assert torch.allclose(ours / len(row), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "qwen3_next"])
def test_recomputed_activations_give_the_same_gradient(name: str, tmp_path: Path) -> None:
    ours = both_models(name, tmp_path)[1]
    saving = Transformer(ours.config, ours.params, recompute=Recompute.full)
    assert torch.equal(loss_and_gradient(ours), loss_and_gradient(saving))


def test_bfloat16_training_accumulates_a_float32_gradient(tmp_path: Path) -> None:
    exact = both_models("llama", tmp_path)[1]
    params = whole_params(exact.config, torch.bfloat16)
    load_hf(tmp_path, exact.config, params, seed=0)
    bf16, fp32 = loss_and_gradient(Transformer(exact.config, params)), loss_and_gradient(exact)
    assert bf16.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(bf16, fp32, dim=0) > 0.999


def test_bound_weights_follow_their_parameters(tmp_path: Path) -> None:
    ours = both_models("llama", tmp_path)[1]
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


def test_training_after_inference_mode(tmp_path: Path) -> None:
    ours = both_models("llama", tmp_path)[1]
    expected = loss_and_gradient(ours)
    fresh = Transformer(ours.config, ours.params)
    with torch.inference_mode():
        fresh.hidden(tokens(), LENGTHS)
    assert torch.equal(loss_and_gradient(fresh), expected)


def test_an_empty_batch_has_a_zero_gradient(tmp_path: Path) -> None:
    ours = both_models("gpt2", tmp_path)[1]
    ours.params.enable_grad()
    empty = torch.empty(0, dtype=torch.int64)
    hidden = ours.hidden(empty, [])
    (ours.logprobs(hidden, empty, []).sum() + hidden.sum()).backward()
    assert ours.params.grad is not None
    assert not ours.params.grad.any()


def test_rows_longer_than_learned_positions_are_rejected(tmp_path: Path) -> None:
    ours = both_models("gpt2", tmp_path)[1]
    with pytest.raises(ValueError, match="a row has 65 tokens; this model has 64 positions"):
        ours.hidden(torch.zeros(65, dtype=torch.int64), [65])


def test_values_are_the_scalar_head(tmp_path: Path) -> None:
    both_models("qwen2", tmp_path)
    config = read_hf_config(tmp_path, True)
    params = whole_params(config)
    init_random(config, params, 3)
    model = Transformer(config, params)
    states = model.states(tokens(), LENGTHS)
    values = model.values(states, sum(LENGTHS))
    assert values.shape == (sum(LENGTHS),)
    assert torch.allclose(values, states.all() @ params.view("head.weight")[0], atol=1e-6)
