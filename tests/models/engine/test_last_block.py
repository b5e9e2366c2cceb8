"""States of some tokens, whose last MLP is computed alone, are those of all tokens; so are gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from realhf.api.config import Recompute
from realhf.models import blocks
from realhf.models.engine.packing import ForwardOutputs, pack
from realhf.models.transformer import Transformer
from tests.models.engine.tiny_engine import engine_on, rows_of
from tests.models.tiny_models import MODELS, VOCAB, both_models

LENGTHS = [9, 9, 4, 1]
INDICES = {
    "some": [3, 4, 8, 22],
    "in any order, some twice": [22, 0, 5, 5, 17],
    "none": [],
    "all": list(range(23)),
}
RECOMPUTE = (None, Recompute.full, Recompute.selective)


def states_and_gradient(model: Transformer, index: Tensor, alone: bool) -> tuple[Tensor, Tensor]:
    """Return the states at an index, computed alone or selected from all, and gradients of a sum over them."""
    tokens = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    states = model.states(tokens, LENGTHS)
    found = states.at(index) if alone else states.all().index_select(0, index)
    model.params.grad.zero_()
    (found * torch.arange(found.numel()).view(found.shape).cos()).sum().backward()
    return found.detach(), model.params.grad.clone()


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", MODELS)
def test_states_of_some_tokens_are_those_of_all(name: str, recompute: Recompute | None, tmp_path: Path) -> None:
    model = both_models(name, tmp_path)[1]
    model.params.enable_grad()
    model.recompute = recompute
    for index in map(torch.tensor, INDICES.values()):
        alone, grad = states_and_gradient(model, index.long(), alone=True)
        expected, whole_grad = states_and_gradient(model, index.long(), alone=False)
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)
        assert (grad - whole_grad).norm() <= 1e-5 * whole_grad.norm()
        assert bool(grad.any()) == bool(len(index))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Layer and number of tokens of every MLP that is computed."""
    found: list[tuple[int, int]] = []
    run = blocks.run_mlp

    def run_mlp(block, index, x, mlp_input, context):
        found.append((index, len(x)))
        return run(block, index, x, mlp_input, context)

    monkeypatch.setattr(blocks, "run_mlp", run_mlp)
    return found


def test_the_last_mlp_computes_the_tokens_that_are_read(llama: Path, computed: list[tuple[int, int]]) -> None:
    """Log-probs need the states before their tokens; scores those of last tokens; values their own."""
    batch, engines = rows_of(LENGTHS), [engine_on(llama, trained=False, scalar=scalar) for scalar in (False, True)]
    layers = engines[0].config.n_layers
    mask = torch.zeros(sum(LENGTHS))
    mask[[0, 3, 5]] = 1  # the first token of a row has no log-prob
    reads = {
        2: (0, lambda outputs: outputs.logprobs(1.0, mask)),
        3: (1, lambda outputs: outputs.values(mask)),
        4: (1, lambda outputs: outputs.last_values()),
        sum(LENGTHS): (1, lambda outputs: outputs.values()),
    }
    for n_read, (number, read) in reads.items():
        engine = engines[number]
        computed.clear()
        packing = pack(batch)
        with torch.no_grad():
            states = engine.model.states(packing.tokens, packing.lengths)
            read(ForwardOutputs(engine.model, states, batch, packing))
        assert computed == [*((layer, sum(LENGTHS)) for layer in range(layers - 1)), (layers - 1, n_read)]


def test_states_are_computed_once_for_several_heads(llama: Path, computed: list[tuple[int, int]]) -> None:
    engine, batch = engine_on(llama, trained=False), rows_of(LENGTHS)
    mask, ids = batch["mask"], batch["tokens"][:, None]
    packing = pack(batch)
    with torch.no_grad():
        states = engine.model.states(packing.tokens, packing.lengths)
        outputs = ForwardOutputs(engine.model, states, batch, packing)
        outputs.logprobs(1.0, mask), outputs.distribution(ids, 1.0, mask)
    assert len(computed) == engine.config.n_layers


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("shape", [(1,), (22,), (24,), (23, 1), ()])
def test_values_refuse_a_mask_of_another_size(llama: Path, shape: tuple[int, ...], share: bool) -> None:
    engine, batch = engine_on(llama, trained=False, scalar=True), rows_of(LENGTHS, per_prompt=2)
    packing = pack(batch, share)
    states = engine.model.states(packing.tokens, packing.lengths, prefixes=packing.prefixes)
    with pytest.raises(ValueError, match=r"the mask has the shape .*, the tokens have \[23\]"):
        ForwardOutputs(engine.model, states, batch, packing).values(torch.ones(shape))
