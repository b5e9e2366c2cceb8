"""Sampling: distributions, stop tokens, independence of slots and layout, log-probabilities as in training."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, ModelSpec
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import GatedDelta, ModelConfig
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.engine.pipeline_runner import Pipeline
from realhf.models.kv_cache import KVCache
from realhf.models.transformer import Transformer
from tests.models.engine.tiny_engine import FAMILIES, STOP, VOCAB, by_row, engine_on, prompts_of

LENGTHS = (3, 1, 7, 7, 12, 2, 5)
SEED = 11
HfModels = dict[str, tuple[Path, nn.Module]]


@pytest.fixture(scope="module")
def engine(llama: Path) -> NativeEngine:
    return engine_on(llama, trained=False)


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def some_engine(request: pytest.FixtureRequest, hf_models: HfModels) -> NativeEngine:
    """An engine with a KV cache, and one that has recurrent states too."""
    return engine_on(hf_models[request.param][0], trained=False)


def responses_of(batch: SequenceBatch) -> list[list[int]]:
    masks = batch.columns["prompt_mask"].rows()
    return [row[mask == 0].tolist() for row, mask in zip(batch.columns["tokens"].rows(), masks, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.8, "min_new_tokens": 3}], ids=["plain", "restricted"])
def test_logprobs_equal_a_training_forward(family: str, options: dict, hf_models: HfModels) -> None:
    engine = engine_on(hf_models[family][0], trained=False)
    config = GenerationConfig(max_new_tokens=14, temperature=0.7, max_num_seqs=4, **options)
    made = engine.generate(prompts_of(LENGTHS), config, 3, SEED)
    again = engine.forward(made.only(("tokens",)), lambda outputs, _: outputs.logprobs(0.7))
    is_response = made["prompt_mask"] == 0
    torch.testing.assert_close(made["logprobs"][is_response], again[is_response], atol=1e-4, rtol=0)
    assert made["logprobs"][~is_response].eq(0).all() and made["sampling_logprobs"][~is_response].eq(0).all()
    gain = (made["sampling_logprobs"] - made["logprobs"])[is_response]
    assert (gain > -1e-5).all() and (gain.max() > 0.1) == bool(options)  # a restricted choice has higher probabilities


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_sampling_equals_transformers(family: str, hf_models: HfModels) -> None:
    folder, model = hf_models[family]
    prompts = prompts_of(LENGTHS)
    made = engine_on(folder, trained=False).generate(prompts, GenerationConfig(max_new_tokens=12, greedy=True), 1, SEED)
    zero = engine_on(folder, trained=False).generate(
        prompts, GenerationConfig(max_new_tokens=12, temperature=0.0, max_num_seqs=2), 2, SEED + 1
    )
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": STOP, "pad_token_id": 0}
    for prompt, row in zip(prompts.columns["prompts"].rows(), made.columns["tokens"].rows(), strict=True):
        assert row.tolist() == model.generate(prompt[None], **options)[0].tolist()
    assert responses_of(zero) == [response for response in responses_of(made) for _ in range(2)]


class CountingTransformer(Transformer):
    """Counts the slots of its caches."""

    n_slots = 0

    def new_cache(self, n_slots: int, max_len: int, records_experts: bool = False, bf16: bool = False) -> KVCache:
        self.n_slots += n_slots
        return super().new_cache(n_slots, max_len, records_experts, bf16)


@pytest.mark.parametrize(("planned", "slots"), [(0, 8), (3, 3), (20, 8)])
def test_a_plan_can_reduce_the_number_of_slots(planned: int, slots: int, engine: NativeEngine) -> None:
    model = CountingTransformer(engine.config, engine.params)
    counting = replace(engine, model=model, pipeline=Pipeline(model, engine.context),
                       micro_batching=MicroBatching(max_num_seqs=planned))  # fmt: skip
    config, prompts = GenerationConfig(max_new_tokens=6, max_num_seqs=8), prompts_of(LENGTHS)
    made = counting.generate(prompts, config, 2, SEED)
    assert model.n_slots == slots
    assert responses_of(made) == responses_of(engine.generate(prompts, config, 2, SEED))


def test_columns_of_the_result(engine: NativeEngine) -> None:
    prompts = prompts_of((3, 1, 4), numbers=(8, 2, 5))
    made = engine.generate(prompts, GenerationConfig(max_new_tokens=6), 2, SEED)
    assert made.ids == tuple(RowId(p, s) for p in (8, 2, 5) for s in (0, 1))
    for key in ("prompt_mask", "logprobs", "sampling_logprobs"):
        assert made.lengths(key) == made.lengths("tokens")
    shared = [prompt for prompt in prompts.columns["prompts"].rows() for _ in range(2)]
    for row, mask, prompt in zip(
        made.columns["tokens"].rows(), made.columns["prompt_mask"].rows(), shared, strict=True
    ):
        assert torch.equal(row[mask == 1], prompt) and mask.tolist() == sorted(mask.tolist(), reverse=True)
        assert 1 <= len(row) - len(prompt) <= 6


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 256])
def test_a_row_does_not_depend_on_slots_other_rows_or_order(slots: int, some_engine: NativeEngine) -> None:
    engine = some_engine
    config = GenerationConfig(max_new_tokens=14, max_num_seqs=slots)
    reference = {}
    for number, length in enumerate(LENGTHS):
        single = engine.generate(prompts_of([length], [number]), GenerationConfig(max_new_tokens=14), 4, SEED)
        tokens, logprobs = by_row(single, "tokens"), by_row(single, "logprobs")
        reference |= {row: (tokens[row], logprobs[row]) for row in single.ids}
    whole = prompts_of(LENGTHS)
    for order in (range(7), (6, 3, 0, 5, 1, 4, 2), (4, 1)):
        made = engine.generate(whole.select(list(order)), config, 4, SEED)
        assert made.ids == tuple(RowId(p, s) for p in order for s in range(4))
        for row, tokens in by_row(made, "tokens").items():
            assert torch.equal(tokens, reference[row][0]), row
            torch.testing.assert_close(by_row(made, "logprobs")[row], reference[row][1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", [1, 8, 13])
def test_a_row_does_not_depend_on_the_prefill_budget(budget: int, some_engine: NativeEngine) -> None:
    engine = some_engine
    config, prompts = GenerationConfig(max_new_tokens=14, max_num_seqs=9), prompts_of(LENGTHS)
    whole = engine.generate(prompts, config, 3, SEED)
    parts = replace(engine, micro_batching=MicroBatching(1, budget)).generate(prompts, config, 3, SEED)
    assert torch.equal(parts["tokens"], whole["tokens"]) and parts.lengths("tokens") == whole.lengths("tokens")
    torch.testing.assert_close(parts["logprobs"], whole["logprobs"], atol=1e-4, rtol=0)


def test_prompts_that_begin_or_equal_others(some_engine: NativeEngine) -> None:
    config, texts = GenerationConfig(max_new_tokens=9), [[5, 6], [5, 6, 7, 8, 9], [5, 6, 7], [5, 6, 7], [9]]
    ids = tuple(RowId(number, PROMPT) for number in range(len(texts)))
    prompts = SequenceBatch(ids, {"prompts": Column.of([torch.tensor(text) for text in texts])})
    made = some_engine.generate(prompts, config, 2, SEED)
    for number in range(len(texts)):
        single = some_engine.generate(prompts.select([number]), config, 2, SEED)
        for row, tokens in by_row(single, "tokens").items():
            assert torch.equal(by_row(made, "tokens")[row], tokens)
            torch.testing.assert_close(
                by_row(made, "logprobs")[row], by_row(single, "logprobs")[row], atol=1e-4, rtol=0
            )


def test_a_row_depends_on_seed_prompt_and_sample(engine: NativeEngine) -> None:
    config = GenerationConfig(max_new_tokens=14)
    text = torch.arange(5, 9)
    twice = SequenceBatch((RowId(0, PROMPT), RowId(1, PROMPT)), {"prompts": Column.of([text, text])})
    responses = responses_of(engine.generate(twice, config, 2, SEED)) + responses_of(
        engine.generate(twice, config, 2, SEED + 1)
    )
    assert len(set(map(tuple, responses))) == 8


def test_truncation_is_distinguished_from_a_stop_token(engine: NativeEngine) -> None:
    made = engine.generate(prompts_of((4, 2)), GenerationConfig(max_new_tokens=10), 60, SEED)
    kinds = Counter()
    for response, truncated in zip(responses_of(made), made["truncated"].tolist(), strict=True):
        assert STOP not in response[:-1]
        assert truncated == (response[-1] != STOP)
        assert len(response) == 10 or not truncated
        kinds[truncated, len(response) == 10] += 1
    assert kinds[0, False] > 5 and kinds[1, True] > 5
    short = engine.generate(prompts_of((4, 2)), GenerationConfig(max_new_tokens=1), 200, SEED)
    ends = dict(zip(short["truncated"].tolist(), (a[-1] == STOP for a in responses_of(short)), strict=True))
    assert ends == {0: True, 1: False}  # a stop token at the last position is not a truncation


def test_stop_tokens_are_forbidden_before_min_new_tokens(engine: NativeEngine) -> None:
    config = GenerationConfig(max_new_tokens=9, min_new_tokens=6, stop_token_ids=[7, 9])
    responses = responses_of(engine.generate(prompts_of((4, 2)), config, 60, SEED))
    assert all(not {STOP, 7, 9} & set(response[:6]) for response in responses)
    assert Counter(map(len, responses)).keys() == {7, 8, 9}  # a stop token is allowed after six tokens


def test_additional_stop_tokens(engine: NativeEngine) -> None:
    made = engine.generate(prompts_of((4, 2)), GenerationConfig(max_new_tokens=30, stop_token_ids=[7, 9]), 60, SEED)
    responses = responses_of(made)
    truncated = made["truncated"].tolist()
    assert {response[-1] for response, cut in zip(responses, truncated, strict=True) if not cut} == {STOP, 7, 9}
    assert all(not {STOP, 7, 9} & set(response[:-1]) for response in responses)


def first_token_probabilities(engine: NativeEngine, prompt: Tensor, temperature: float) -> Tensor:
    with torch.no_grad():
        logits = engine.model.logits(engine.model.hidden(prompt, [len(prompt)])[-1:])
    return (logits[0] / temperature).softmax(-1)


def first_tokens(engine: NativeEngine, prompts: SequenceBatch, n: int, config: GenerationConfig) -> list[int]:
    return [response[0] for response in responses_of(engine.generate(prompts, config, n, SEED))]


@pytest.mark.parametrize("top_k, top_p", [(1, 1.0), (4, 1.0), (0, 0.6), (0, 0.05), (6, 0.7)])
def test_top_k_and_top_p_restrict_the_tokens(top_k: int, top_p: float, engine: NativeEngine) -> None:
    prompts = prompts_of((4,))
    probabilities = first_token_probabilities(engine, prompts["prompts"], 1.0)
    best = probabilities.argsort(descending=True)[: top_k or VOCAB]
    kept = probabilities[best] / probabilities[best].sum()
    allowed = best[(kept.cumsum(0) - kept) < top_p]
    config = GenerationConfig(max_new_tokens=1, top_k=top_k, top_p=top_p)
    made = engine.generate(prompts, config, 400, SEED)
    sampled = [response[0] for response in responses_of(made)]
    assert set(sampled) <= set(allowed.tolist())
    assert set(sampled) >= set(allowed[probabilities[allowed] > 0.05].tolist())
    shares = probabilities[allowed] / probabilities[allowed].sum()
    expected = torch.stack([shares[allowed == token][0] for token in sampled]).log()
    logprobs = made["sampling_logprobs"][made["prompt_mask"] == 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def chi_square(counts: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """Return the statistic, with rare outcomes merged, and its value at z = 4 (Wilson and Hilferty 1931)."""
    pairs = list(zip(counts, expected, strict=True))
    rare = [pair for pair in pairs if pair[1] < 5]
    cells = [pair for pair in pairs if pair[1] >= 5] + [(sum(c for c, _ in rare), sum(e for _, e in rare))] * bool(rare)
    k = len(cells) - 1
    return sum((c - e) ** 2 / e for c, e in cells), k * (1 - 2 / (9 * k) + 4 * math.sqrt(2 / (9 * k))) ** 3


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_token_frequencies_match_probabilities(temperature: float, engine: NativeEngine) -> None:
    n, prompts = 4000, prompts_of((5,))
    config = GenerationConfig(max_new_tokens=1, temperature=temperature, max_num_seqs=4096)
    counts = Counter(first_tokens(engine, prompts, n, config))
    expected = first_token_probabilities(engine, prompts["prompts"], temperature).double() * n
    statistic, limit = chi_square([counts[t] for t in range(VOCAB)], expected.tolist())
    assert statistic < limit


def test_the_second_token_is_independent_of_the_first(engine: NativeEngine) -> None:
    n, prompts = 4000, prompts_of((5,))
    config = GenerationConfig(max_new_tokens=2, min_new_tokens=1, temperature=1.5, max_num_seqs=4096)
    made = engine.generate(prompts, config, n, SEED)
    pairs = responses_of(made)
    first = Counter(a for a, _ in pairs).most_common(1)[0][0]
    seconds = Counter(b for a, b in pairs if a == first)
    after = torch.cat([prompts["prompts"], torch.tensor([first])])
    expected = first_token_probabilities(engine, after, 1.5).double() * seconds.total()
    statistic, limit = chi_square([seconds[t] for t in range(VOCAB)], expected.tolist())
    assert statistic < limit


@pytest.mark.parametrize("kept", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 3},
        {"max_num_seqs": 9, "prompt_lookup_num_tokens": 3},
        {"min_new_tokens": 4, "top_k": 9},
        {"greedy": True, "max_num_seqs": 6},
    ],
)
def test_the_responses_that_end_first_are_kept(kept: int, options: dict, some_engine: NativeEngine) -> None:
    prompts, config = prompts_of(LENGTHS), GenerationConfig(max_new_tokens=20, **options)
    whole = some_engine.generate(prompts, config, 5, SEED)
    made = some_engine.generate(prompts, replace(config, keep_first=kept), 5, SEED)
    lengths, rows = whole.lengths("tokens"), range(len(whole))
    ranking = sorted(rows, key=lambda row: (row // 5, lengths[row], row))
    expected = whole.select(sorted(row for place, row in enumerate(ranking) if place % 5 < kept))
    assert made.ids == expected.ids and made.lengths("tokens") == expected.lengths("tokens")
    for key in ("tokens", "prompt_mask", "truncated"):
        assert torch.equal(made[key], expected[key])
    for key in ("logprobs", "sampling_logprobs"):
        torch.testing.assert_close(made[key], expected[key], atol=1e-4, rtol=0)


def test_no_prompts_give_no_rows(engine: NativeEngine) -> None:
    made = engine.generate(prompts_of((3,)).select([]), GenerationConfig(), 4, SEED)
    full = engine.generate(prompts_of((3,)), GenerationConfig(max_new_tokens=2), 1, SEED)
    assert len(made) == 0 and made.columns.keys() == full.columns.keys()
    assert {k: c.dtype for k, c in made.meta.columns.items()} == {k: c.dtype for k, c in full.meta.columns.items()}


def test_rows_longer_than_the_model_supports_are_rejected(engine: NativeEngine) -> None:
    with pytest.raises(ValueError, match="74 tokens.*64.*max_new_tokens"):
        engine.generate(prompts_of((4, 10)), GenerationConfig(max_new_tokens=64), 1, SEED)


FOUR_LAYERS = ModelConfig("llama", 4, 32, 4, 2, 8, 48, VOCAB, 64, init_std=0.2)
HYBRID = replace(
    FOUR_LAYERS, family="qwen3_5_text", norm_offset=1.0, qk_norm="head", attention_gate=True,
    delta=GatedDelta(2, 4, 8, 8, 4), delta_layers=(0, 1, 2),
)  # fmt: skip
AXES = ("dp", "tp", "pp")
MESHES = {"d1": (0,), "p2": (3, 1), "p4": (2, 0, 3, 1), "t2p2": (1, 0, 2, 3)}
CONFIGS = [
    GenerationConfig(max_new_tokens=14),  # a slot for every row
    GenerationConfig(max_new_tokens=14, max_num_seqs=6, top_k=9, min_new_tokens=2),  # slots are reused
    GenerationConfig(max_new_tokens=5, max_num_seqs=2),  # fewer slots than some pipelines have stages
    GenerationConfig(max_new_tokens=14, max_num_seqs=6, keep_first=2),
]


def generate_everywhere(rank: int, world: int, model: ModelConfig) -> dict[tuple[str, int], SequenceBatch]:
    """Generate in every layout that includes this rank."""
    layouts = {name: Layout(DeviceMesh(mesh), ParallelStrategy.parse(name)) for name, mesh in MESHES.items()}
    axes = dict.fromkeys(
        layout.axis(axis, member) for layout in layouts.values() for member in layout.mesh.ranks for axis in AXES
    )
    groups = make_groups([ranks for ranks in axes if len(ranks) > 1], rank)
    made = {}
    for name, layout in layouts.items():
        if rank not in layout.mesh.ranks:
            continue
        context, role = ParallelContext(layout, rank, groups=groups), RoleSpec(ModelSpec(init_from_scratch=True))
        engine = build_engine(model, role, context, False, True, 3, 1, (STOP,), None)
        engine = replace(engine, micro_batching=MicroBatching(1, 20))
        for number, config in enumerate(CONFIGS):
            made[name, number] = engine.generate(prompts_of(LENGTHS), config, 3, SEED)
    return made


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("model", [FOUR_LAYERS, HYBRID], ids=["attention", "hybrid"])
def test_all_ranks_return_the_rows_of_one_worker(model: ModelConfig, on_ranks: Callable[..., list]) -> None:
    results = on_ranks(4, generate_everywhere, model)
    for number in range(len(CONFIGS)):
        expected = results[0]["d1", number]
        assert len({tuple(response) for response in responses_of(expected)}) > 0.7 * len(expected)
        for name, mesh in MESHES.items():
            for rank in mesh:
                made = results[rank][name, number]
                assert made.ids == expected.ids and made.lengths("tokens") == expected.lengths("tokens")
                for key in ("tokens", "prompt_mask", "truncated"):
                    assert torch.equal(made[key], expected[key]), (name, rank, key)
                for key in ("logprobs", "sampling_logprobs"):
                    torch.testing.assert_close(made[key], expected[key], atol=1e-4, rtol=0)
