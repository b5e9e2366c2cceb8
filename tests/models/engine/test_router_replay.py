"""Router replay: generation records the experts of tokens, and other passes use them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from realhf.api.batch_meta import SCALAR_BYTES
from realhf.api.config import GenerationConfig
from realhf.api.execution_plan import MicroBatching
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.decode import cuda_graphs
from realhf.models.engine.native import NativeEngine
from realhf.models.engine.packing import pack
from realhf.ops.moe import expert_dtype
from tests.models.engine.tiny_engine import by_row, counted, engine_on, nll, prompts_of, rows_of
from tests.models.tiny_models import hf_model

NAMES = ("mixtral", "qwen3_moe", "qwen3_moe_some")
LENGTHS = (3, 1, 7, 7, 12, 2, 5)
SEED = 11
HfModels = dict[str, tuple[Path, nn.Module]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> HfModels:
    found = {}
    for name in NAMES:
        folder, model = tmp_path_factory.mktemp(name), hf_model(name)
        model.save_pretrained(folder)
        found[name] = (folder, model)
    return found


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]


def chosen_by(model: nn.Module, row: Tensor) -> Tensor:
    """Return the experts that a model of transformers chooses, ``[T, L, k]``."""
    chosen = []
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for router in routers_of(model)]
    with torch.no_grad():
        model(row[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)


def with_imposed(model: nn.Module, row: Tensor, experts: Tensor) -> Tensor:
    """Return log-probabilities of a model of transformers whose routers choose ``experts`` ``[T, L, k]``."""
    layers = iter(range(experts.shape[1]))

    def impose(router: nn.Module, inputs: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, indices = out[0], experts[:, next(layers)].long()
        weights = logits.softmax(-1, dtype=torch.float32).gather(1, indices)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return (logits, weights.to(logits.dtype), indices)

    hooks = [router.register_forward_hook(impose) for router in routers_of(model)]
    logits = model(row[None]).logits[0, :-1]
    for hook in hooks:
        hook.remove()
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]


def made_by(engine: NativeEngine, n: int = 3, **options: Any) -> SequenceBatch:
    config = GenerationConfig(**{"max_new_tokens": 9, "max_num_seqs": 4, **options})
    return engine.generate(prompts_of(LENGTHS), config, n, SEED, record_experts=True)


def experts_of(batch: SequenceBatch, engine: NativeEngine) -> list[Tensor]:
    """Return the recorded experts of every row, ``[T, L, k]``."""
    routed, k = len(engine.config.routed_layers), engine.config.experts_per_token
    return [row.view(-1, routed, k) for row in batch.columns["routed_experts"].rows()]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_experts_are_those_of_transformers(name: str, models: HfModels) -> None:
    folder, model = models[name]
    engine = engine_on(folder, trained=False)
    made = made_by(engine)
    assert (
        "routed_experts" not in engine.generate(prompts_of(LENGTHS), GenerationConfig(max_new_tokens=2), 1, 1).columns
    )
    for row, experts in zip(made.columns["tokens"].rows(), experts_of(made, engine), strict=True):
        assert experts[-1].eq(engine.config.n_experts).all()  # it was sampled, not computed
        expected = chosen_by(model, row)[:-1]
        assert torch.equal(experts[:-1].long().sort(-1)[0], expected.sort(-1)[0])


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_seqs": 21}, {"temperature": 0.7, "top_k": 3}], ids=str
)
def test_recorded_experts_do_not_depend_on_slots(options: dict, models: HfModels) -> None:
    engine = engine_on(models["qwen3_moe"][0], trained=False)
    made = made_by(engine, **{key: value for key, value in options.items() if key != "max_num_seqs"})
    other = made_by(engine, **options)
    assert torch.equal(made["tokens"], other["tokens"]) and torch.equal(made["routed_experts"], other["routed_experts"])


def test_decoding_in_several_steps_per_turn_records_the_same(models: HfModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where the host reads tokens after several steps."""
    engine = engine_on(models["qwen3_moe_some"][0], trained=False)
    expected = made_by(engine)
    monkeypatch.setattr("realhf.models.engine.decode.group.decodes_on_device", lambda model: True)
    taken = list[bool]()
    run = cuda_graphs.DeviceDecoder.run
    monkeypatch.setattr(cuda_graphs.DeviceDecoder, "run", lambda *args: (taken.append(True), run(*args))[1])
    made = made_by(engine)
    assert taken and torch.equal(made["tokens"], expected["tokens"])
    assert torch.equal(made["routed_experts"], expected["routed_experts"])


def imposed(
    batch: SequenceBatch, engine: NativeEngine, known: Callable[[int], bool] = lambda at: True
) -> SequenceBatch:
    """Return a batch with random distinct experts for every token; unknown ones where ``known`` is False."""
    config, generator = engine.config, torch.Generator().manual_seed(5)
    shape = len(batch["tokens"]), len(config.routed_layers), config.n_experts
    experts = torch.rand(shape, generator=generator).argsort(-1)[..., : config.experts_per_token]
    index = torch.cat([torch.arange(length) for length in batch.lengths("tokens")])
    experts[[not known(at) for at in index.tolist()]] = config.n_experts
    width = shape[1] * config.experts_per_token
    column = Column(experts.to(torch.uint8).flatten(), tuple(width * n for n in batch.lengths("tokens")))
    return batch.with_columns(routed_experts=column)


@pytest.mark.parametrize("name", NAMES)
def test_replay_computes_what_transformers_does_with_these_experts(name: str, models: HfModels) -> None:
    folder, model = models[name]
    engine = engine_on(folder)
    batch = imposed(rows_of((9, 4, 6, 2), vocab=60), engine)
    found = engine.forward(batch, lambda outputs, _: outputs.logprobs())
    own = engine.forward(batch.only(("tokens",)), lambda outputs, _: outputs.logprobs())
    assert (found - own).abs().max() > 0.01
    rows = zip(
        batch.columns["tokens"].rows(), experts_of(batch, engine), found.split(batch.lengths("tokens")), strict=True
    )
    losses = []
    for (tokens, experts, logprobs), mask in zip(rows, batch.columns["mask"].rows(), strict=True):
        expected = with_imposed(model, tokens, experts)
        torch.testing.assert_close(logprobs[1:], expected.detach(), atol=1e-5, rtol=0)
        losses.append(-(expected * mask[1:]).sum())
    # gradients reach the router through the weights of the experts
    model.zero_grad()
    (sum(losses) / counted(batch)).backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    plain = replace(engine.config, balance_loss=0.0)
    object.__setattr__(engine, "config", plain)
    engine.model.config = plain
    assert engine.train(batch, nll, counted(batch))["grad_norm"][0] == pytest.approx(float(norm), rel=1e-4)


def test_tokens_with_unknown_experts_are_routed(models: HfModels) -> None:
    engine = engine_on(models["mixtral"][0])
    batch = rows_of((9, 4, 6), vocab=60)
    own = engine.forward(batch, lambda outputs, _: outputs.logprobs())
    unknown = imposed(batch, engine, known=lambda at: False)
    assert torch.equal(engine.forward(unknown, lambda outputs, _: outputs.logprobs()), own)
    some = engine.forward(imposed(batch, engine, known=lambda at: at > 2), lambda outputs, _: outputs.logprobs())
    kept = torch.cat([torch.arange(length) <= 2 for length in batch.lengths("tokens")])
    assert torch.equal(some[kept], own[kept]) and not torch.allclose(some[~kept], own[~kept], atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_replay_of_the_own_choice_changes_nothing(name: str, models: HfModels) -> None:
    engine = engine_on(models[name][0])
    made = made_by(engine, temperature=1.0)
    replayed = engine.forward(made.only(("tokens", "routed_experts")), lambda outputs, _: outputs.logprobs())
    is_response = made["prompt_mask"] == 0
    torch.testing.assert_close(replayed[is_response], made["logprobs"][is_response], atol=1e-4, rtol=0)


@pytest.mark.parametrize("limit", [1, 12, 1000])
def test_a_training_step_does_not_depend_on_micro_batches(limit: int, models: HfModels) -> None:
    def weights(micro_batching: MicroBatching) -> Tensor:
        engine = replace(engine_on(models["qwen3_moe"][0]), micro_batching=micro_batching)
        batch = imposed(rows_of((9, 4, 6, 2, 8), vocab=60), engine, known=lambda at: at % 3 > 0)
        engine.train(batch, nll, counted(batch))
        return engine.params.data.clone()

    expected = weights(MicroBatching())
    torch.testing.assert_close(weights(MicroBatching(max_tokens_per_mb=limit)), expected, atol=2e-6, rtol=0)


def test_shared_prefixes_are_packed_with_their_experts(models: HfModels) -> None:
    engine = engine_on(models["qwen3_moe"][0])
    made = made_by(engine)
    packing = pack(made, share=True)
    assert packing.gather_index is not None and packing.experts is not None
    own = made["routed_experts"].view(len(made["tokens"]), -1)
    same = packing.experts[packing.gather_index] == own
    # a row ends with unknown experts, where a longer row of the prompt has some
    assert same.all(1).sum() >= len(own) - len(made) and by_row(made, "tokens")


@pytest.mark.parametrize("n_experts", [2, 255, 256, 4096])
def test_numbers_of_experts_can_be_sent_and_represent_an_unknown_one(n_experts: int) -> None:
    dtype = expert_dtype(n_experts)
    assert str(dtype).removeprefix("torch.") in SCALAR_BYTES and torch.tensor(n_experts, dtype=dtype) == n_experts
