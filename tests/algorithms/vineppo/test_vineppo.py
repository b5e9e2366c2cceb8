"""VinePPO on an engine that is played by hand: states, their sharing, values against a tree, advantages."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.config import PPOConfig, VineConfig
from realhf.algorithms.vineppo.vineppo import RolloutConfig, ValuesConfig, VineAdvantages, VineRollouts, VineValues
from realhf.algorithms.vineppo.vineppo_formulas import spread_over_tokens, step_advantages, token_starts
from realhf.api.batch_meta import RowId
from realhf.api.config import GenerationConfig, RewardConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import InterfaceContext


def column(rows: Iterable[Sequence[int]]) -> Column:
    parts = list(rows)
    return Column(torch.tensor([x for part in parts for x in part], dtype=torch.int64), tuple(map(len, parts)))


class Letters:
    """A tokenizer whose tokens are single characters."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def batch_decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(row) for row in rows]


class Scripted:
    """An engine that continues a text with what a script says, sample by sample, and remembers what it was asked."""

    def __init__(self, script: dict[str, list[str]]) -> None:
        self.script, self.asked = script, dict[str, int]()

    def generate(self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int) -> SequenceBatch:
        rows, ids = [], []
        assert len({row.prompt for row in prompts.ids}) == len(prompts)
        for row, tokens, budget in zip(prompts.ids, prompts.columns["prompts"].rows(), prompts["budget"], strict=True):
            text = Letters().decode(tokens.tolist())
            self.asked[text] = int(budget)
            rows += [(text, answer) for answer in self.script[text][:n]]
            ids += [RowId(row.prompt, k) for k in range(n)]
        tokens = column(list(map(ord, text + answer)) for text, answer in rows)
        masks = column([1] * len(text) + [0] * len(answer) for text, answer in rows)
        truncated = torch.tensor([answer.endswith("~") for _, answer in rows]).to(torch.uint8)
        return SequenceBatch(tuple(ids), {"tokens": tokens, "prompt_mask": masks}).with_scalars("truncated", truncated)


def context(tmp_path: Path) -> InterfaceContext:
    return InterfaceContext(3, Letters(), tmp_path)


def answers(*texts: str) -> SequenceBatch:
    """Rows of one prompt ``P`` with these answers."""
    tokens = Column.of([torch.tensor([ord("P"), *map(ord, text)]) for text in texts])
    masks = Column.of([torch.tensor([1] + [0] * len(text), dtype=torch.uint8) for text in texts])
    row = Column.of([torch.tensor(list(b"{}"), dtype=torch.uint8) for _ in texts])
    return SequenceBatch(tuple(RowId(5, k) for k in range(len(texts))),
                         {"tokens": tokens, "prompt_mask": masks, "row": row})  # fmt: skip


REWARD = """
def ends_well(prompt, answer, row):
    assert prompt == "P"
    return float(answer.endswith("!"))
"""


def test_values_of_a_tree_and_the_advantages_of_its_steps(tmp_path: Path) -> None:
    # after "a" three of four rollouts succeed, after "b" none does; the root is known from rollouts of its own
    engine = Scripted(
        {"P": ["a\nx!", "b\nx", "a\ny!", "b!"], "Pa": ["\nx!", "\ny!", "!", "?"], "Pb": ["\nx", "~", "!~", "?"]}
    )
    ppo = PPOConfig(gen=GenerationConfig(max_new_tokens=10), mask_no_eos_with_zero=True)
    vine, batch = VineConfig(n_rollouts=4), answers("a\nx!", "b\ny", "a\nz")
    drawn, stats = VineRollouts(RolloutConfig(ppo, vine), context(tmp_path)).generate(engine, batch, {})
    assert engine.asked == {"P": 10, "Pa": 9, "Pb": 9}  # three states of six, with what is left of the answer
    assert stats["states"] == (6.0, 3.0) and stats["shared_states"] == (3.0, 6.0)
    assert [row.tolist() for row in drawn.columns["state_starts"].rows()] == [[1, 2]] * 3
    (tmp_path / "reward.py").write_text(REWARD)
    reward = RewardConfig(fn=f"{tmp_path}/reward.py:ends_well", wrong_reward=0.0)
    values = VineValues(ValuesConfig(reward, ppo, vine), context(tmp_path))
    found, _ = values.inference(None, SequenceBatch(batch.ids, {**batch.columns, **drawn.columns}), {})
    assert [row.tolist() for row in found.columns["state_values"].rows()] == [[0.75, 0.75], [0.75, 0.0], [0.75, 0.75]]
    scored = SequenceBatch(batch.ids, {**batch.columns, **drawn.columns, **found.columns})
    scored = scored.with_scalars("rewards", torch.tensor([1.0, 0.0, 1.0]))
    scored = scored.with_scalars("truncated", torch.tensor([0, 0, 1], dtype=torch.uint8))
    advantages, _ = VineAdvantages(ppo, context(tmp_path)).inference(None, scored, {})
    assert [row.tolist() for row in advantages.columns["advantages"].rows()] == [
        [0, 0, 0.25, 0.25, 0.25],
        [0, -0.75, 0, 0],
        [0, 0, -0.75, -0.75],  # truncated: worth nothing
    ]
    values.verifier.close()


def test_states_beyond_the_cap_are_not_asked_for(tmp_path: Path) -> None:
    engine = Scripted({"P": ["!"]})
    config = RolloutConfig(PPOConfig(), VineConfig(n_rollouts=1, max_states=1))
    drawn, _ = VineRollouts(config, context(tmp_path)).generate(engine, answers("a\nb\nc"), {})
    assert drawn["state_starts"].tolist() == [1, 2, 4] and drawn.lengths("rollout_lengths") == (1,)
    nothing, stats = VineRollouts(config, context(tmp_path)).generate(engine, answers("a").select([]), {})
    assert len(nothing) == 0 and stats["states"] == (0.0, 1.0)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8), st.floats(-1, 1), st.integers(0, 8))
def test_advantages_add_up_to_what_the_answer_came_to(values: list[float], reward: float, more: int) -> None:
    n_steps = len(values) + more
    found = step_advantages(values, reward, n_steps)
    assert len(found) == n_steps and sum(found) == pytest.approx(reward - values[0], abs=1e-9)
    assert found[len(values) :] == [0.0] * more


def test_what_advantages_refuse() -> None:
    assert step_advantages([], 1.0, 0) == []
    with pytest.raises(ValueError, match="nan"):
        step_advantages([0.5, float("nan")], 1.0, 2)


def test_tokens_of_steps() -> None:
    assert token_starts(["ab", "c\n", "d", "\n", "#"], [0, 3, 5]) == [0, 2, 3]  # 3 is inside "c\n": the next token
    assert token_starts(["abc"], [0, 1, 2]) == [0]
    assert spread_over_tokens([1.0, 2.0], [1, 3], 4, 6).tolist() == [0, 1, 1, 2, 0, 0]
