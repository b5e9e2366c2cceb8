"""Prompt lookup changes the number of steps, and no bit of the result, for all proposals."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.decode import lookup
from realhf.models.engine.decode.cuda_graphs import SKIPPED
from realhf.models.engine.decode.lookup import PromptLookup, Proposal, RowText
from realhf.models.fused.fused_steps import FusedSteps
from realhf.models.transformer import Transformer
from realhf.ops import extension
from tests.models.engine.decode.test_generate import HfModels, responses_of
from tests.models.engine.tiny_engine import FAMILIES, STOP, VOCAB, engine_on

SEED = 5
OPTIONS = {
    "sampled": {"temperature": 0.8},
    "greedy": {"greedy": True},
    "restricted": {"temperature": 0.5, "top_k": 6, "top_p": 0.9, "min_new_tokens": 4},
}


def repeating_prompts(n: int) -> SequenceBatch:
    """Prompts that repeat a few tokens, of different lengths."""
    rows = [torch.tensor(([3, 4, 5, 6 + i] * 5)[: 9 + i]) for i in range(n)]
    return SequenceBatch(tuple(RowId(i, PROMPT) for i in range(n)), {"prompts": Column.of(rows)})


class Oracle(RowText):
    """Proposes the tokens of a result, with random errors and lengths."""

    responses: dict[tuple[int, ...], list[list[int]]]
    chance: random.Random

    def __init__(self, prompt: Sequence[int]) -> None:
        super().__init__(prompt)
        self.n_prompt = len(prompt)
        self.known = self.responses[tuple(prompt)]

    def propose(self, most: int) -> list[int]:
        done = self._tokens[self.n_prompt :]
        rest = next((r[len(done) :] for r in self.known if r[: len(done)] == done), [])
        rest = (rest + [STOP, 1, 2])[: self.chance.randint(0, most)]
        return [token if self.chance.random() < 0.8 else self.chance.randrange(VOCAB) for token in rest]


@pytest.fixture
def n_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tokens of each decoding step."""
    found, decode, several = list[int](), Transformer.decode, FusedSteps.run

    def counted(self: Transformer, tokens: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        found.append(len(tokens))
        return decode(self, tokens, *args, **kwargs)

    def each(*args: Any) -> torch.Tensor:
        steps = several(*args)
        found.extend((steps[:, 0] != SKIPPED).sum(1).tolist())
        return steps

    monkeypatch.setattr(Transformer, "decode", counted)
    monkeypatch.setattr(FusedSteps, "run", each)
    yield found


@pytest.mark.skipif(extension.kernel("decode_blocks", "cpu") is None, reason="the decoding kernel is not built")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_proposals_give_the_same_bits(
    family: str, options: str, hf_models: HfModels, monkeypatch: pytest.MonkeyPatch, n_steps: list[int]
) -> None:
    engine = engine_on(hf_models[family][0], trained=False)
    for max_num_seqs in (2, 5, 16):
        kinds = {"max_new_tokens": 20, "max_num_seqs": max_num_seqs, **OPTIONS[options]}
        prompts = repeating_prompts(5)
        plain = engine.generate(prompts, GenerationConfig(**kinds), 3, SEED)
        n_plain, texts = len(n_steps), responses_of(plain)
        tokens = [tuple(row.tolist()) for row in prompts.columns["prompts"].rows()]
        Oracle.responses = {prompt: texts[3 * i : 3 * i + 3] for i, prompt in enumerate(tokens)}
        Oracle.chance = random.Random(max_num_seqs)
        for text in (RowText, Oracle):
            n_steps.clear()
            monkeypatch.setattr(lookup, "RowText", text)
            found = engine.generate(prompts, GenerationConfig(**kinds, prompt_lookup_num_tokens=4), 3, SEED)
            for name, column in plain.columns.items():
                assert torch.equal(found[name], column.data) and found.lengths(name) == column.lengths, (name, text)
        if engine.model.decodes_tokens_together and not engine.model.config.delta_layers:
            assert len(n_steps) < n_plain
        n_steps.clear()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9))
def test_proposals_follow_the_last_occurrence(tokens: list[int], most: int) -> None:
    text = RowText(tokens[:1])
    for token in tokens[1:]:
        text.propose(most)  # at any time
        text.append(token)
    text._hits = 1.0
    found, expected = text.propose(most), list[int]()
    for size in lookup.SIZES:
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        if ends and len(tokens) >= size:
            after = tokens[ends[-1] :]
            expected = [after[i % len(after)] for i in range(most)]
            break
    assert found == expected


def test_a_row_that_is_not_repeated_stops_proposing() -> None:
    text = RowText([1, 2, 3])
    for number in range(20):  # 1 2 is always followed by another token
        for token in (1, 2, 100 + number):
            text.propose(4)
            text.append(token)
    text.append(1)
    text.append(2)
    assert text.propose(4) == []
    for _ in range(8):
        for token in (1, 2, 7):
            text.propose(4)
            text.append(token)
    assert text.propose(2) == [1, 2]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=5)), min_size=1, max_size=6), st.data()
)
def test_rows_keep_tokens_up_to_the_first_that_was_not_proposed(rows: list, data: st.DataObject) -> None:
    counts = np.array([1 + len(proposed) for _, proposed in rows])
    tokens = np.array([token for first, proposed in rows for token in (first, *proposed)])
    offsets = np.concatenate([np.arange(count) for count in counts])
    proposal = Proposal(tokens, np.repeat(np.arange(len(rows)), counts), offsets, counts)
    sampled = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens))))
    stop = data.draw(st.integers(0, 3))
    place, expected = 0, []
    for _, proposed in rows:
        kept = 1
        while kept <= len(proposed) and sampled[place + kept - 1] == proposed[kept - 1] != stop:
            kept += 1
        expected.append(kept)
        place += 1 + len(proposed)
    assert proposal.n_kept(sampled, [stop]).tolist() == expected


def test_no_proposals_for_many_rows_and_beyond_the_limit() -> None:
    found = PromptLookup(8)
    for row in range(40):
        found.begin(row, [1, 2, 3, 1, 2, 3])
    assert found.propose(range(17), [3] * 17, [9] * 17) is None
    assert found.propose([0, 1], [3, 3], [0, 0]) is None
    proposal = found.propose([0, 1, 2], [3, 3, 3], [1, 0, 9])
    assert proposal is not None and proposal.counts.tolist() == [2, 1, 9]
    assert proposal.tokens.tolist() == [3, 1, 3, 3, 1, 2, 3, 1, 2, 3, 1, 2]
    found.end(range(40))


def test_a_proposed_token_without_finite_logits_harms_only_rows_that_sample_it(
    hf_models: HfModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding of one token is NaN; it is proposed again and again, and no row samples it."""
    engine = engine_on(hf_models["llama"][0], trained=False)
    prompts, options = repeating_prompts(5), {"max_new_tokens": 20, "top_k": 1, "max_num_seqs": 3}
    plain = engine.generate(prompts, GenerationConfig(**options), 2, SEED)
    bad = next(token for token in range(2, VOCAB) if token not in plain["tokens"])
    engine.model.weights.embed[bad] = torch.nan
    monkeypatch.setattr(RowText, "propose", lambda self, most: [bad] * most)
    found = engine.generate(prompts, GenerationConfig(**options, prompt_lookup_num_tokens=4), 2, SEED)
    assert all(torch.equal(found[name], column.data) for name, column in plain.columns.items())
    engine.model.weights.embed[3] = torch.nan  # of all prompts
    for n_proposed in (0, 4):
        with pytest.raises(ValueError, match="finite"):
            engine.generate(prompts, GenerationConfig(**options, prompt_lookup_num_tokens=n_proposed), 2, SEED)
