"""VinePPO with scripted rollouts: states, values and advantages."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.config import PPOConfig, VineConfig
from realhf.algorithms.reward_model.step_splitter import token_starts
from realhf.algorithms.vineppo.vineppo import (
    RolloutConfig,
    ValuesConfig,
    VineAdvantages,
    VineRollouts,
    VineValues,
    spread_over_tokens,
    step_advantages,
)
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


class ScriptedEngine:
    """An engine that continues texts by a script and records their budgets."""

    def __init__(self, script: dict[str, list[str]]) -> None:
        self.script, self.budgets = script, dict[str, int]()

    def generate(
        self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int, record_experts: bool = False
    ) -> SequenceBatch:
        rows, ids = [], []
        assert len({row.prompt for row in prompts.ids}) == len(prompts)
        for row, tokens, budget in zip(prompts.ids, prompts.columns["prompts"].rows(), prompts["budget"], strict=True):
            text = Letters().decode(tokens.tolist())
            self.budgets[text] = int(budget)
            rows += [(text, response) for response in self.script[text][:n]]
            ids += [RowId(row.prompt, k) for k in range(n)]
        tokens = column(list(map(ord, text + response)) for text, response in rows)
        masks = column([1] * len(text) + [0] * len(response) for text, response in rows)
        truncated = torch.tensor([response.endswith("~") for _, response in rows]).to(torch.uint8)
        return SequenceBatch(tuple(ids), {"tokens": tokens, "prompt_mask": masks}).with_scalars("truncated", truncated)


def context(tmp_path: Path) -> InterfaceContext:
    return InterfaceContext(3, Letters(), tmp_path)


def responses(*texts: str) -> SequenceBatch:
    """Rows of one prompt ``P``."""
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


def test_values_and_advantages_of_a_tree(tmp_path: Path) -> None:
    # success rates: 3/4 from the root, 3/4 after "a", 0 after "b"
    engine = ScriptedEngine(
        {"P": ["a\nx!", "b\nx", "a\ny!", "b!"], "Pa": ["\nx!", "\ny!", "!", "?"], "Pb": ["\nx", "~", "!~", "?"]}
    )
    ppo = PPOConfig(gen=GenerationConfig(max_new_tokens=10), mask_no_eos_with_zero=True)
    vine, batch = VineConfig(n_rollouts=4), responses("a\nx!", "b\ny", "a\nz")
    sampled, stats = VineRollouts(RolloutConfig(ppo, vine), context(tmp_path)).generate(engine, batch, {})
    assert engine.budgets == {"P": 10, "Pa": 9, "Pb": 9}  # three distinct states of six
    assert stats["states"] == (6.0, 3.0) and stats["shared_states"] == (3.0, 6.0)
    assert [row.tolist() for row in sampled.columns["state_starts"].rows()] == [[1, 2]] * 3
    (tmp_path / "reward.py").write_text(REWARD)
    reward = RewardConfig(fn=f"{tmp_path}/reward.py:ends_well", wrong_reward=0.0)
    values = VineValues(ValuesConfig(reward, ppo, vine), context(tmp_path))
    estimates, _ = values.inference(None, SequenceBatch(batch.ids, {**batch.columns, **sampled.columns}), {})
    assert [row.tolist() for row in estimates.columns["state_values"].rows()] == [
        [0.75, 0.75],
        [0.75, 0.0],
        [0.75, 0.75],
    ]
    scored = SequenceBatch(batch.ids, {**batch.columns, **sampled.columns, **estimates.columns})
    scored = scored.with_scalars("rewards", torch.tensor([1.0, 0.0, 1.0]))
    scored = scored.with_scalars("truncated", torch.tensor([0, 0, 1], dtype=torch.uint8))
    advantages, _ = VineAdvantages(ppo, context(tmp_path)).inference(None, scored, {})
    assert [row.tolist() for row in advantages.columns["advantages"].rows()] == [
        [0, 0, 0.25, 0.25, 0.25],
        [0, -0.75, 0, 0],
        [0, 0, -0.75, -0.75],  # truncated: reward 0
    ]
    values.verifier.close()


@given(failed=st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_continuations_without_a_reward_are_left_out(tmp_path: Path, failed: list[bool]) -> None:
    """Two responses, the first with two states: three continuations of each distinct state."""
    marks = ["?" if fails else "!" for fails in failed]
    engine = ScriptedEngine({"P": [f"a{mark}" for mark in marks[:3]], "Pa": [f"\nx{mark}" for mark in marks[3:]]})
    ppo, vine, batch = (
        PPOConfig(gen=GenerationConfig(max_new_tokens=10)),
        VineConfig(n_rollouts=3),
        responses("a\nx", "b"),
    )
    sampled, _ = VineRollouts(RolloutConfig(ppo, vine), context(tmp_path)).generate(engine, batch, {})
    (tmp_path / "reward.py").write_text("def f(prompt, answer, row):\n    return len(answer) / ('?' not in answer)\n")
    values = VineValues(ValuesConfig(RewardConfig(fn=f"{tmp_path}/reward.py:f"), ppo, vine), context(tmp_path))
    found, stats = values.inference(None, SequenceBatch(batch.ids, {**batch.columns, **sampled.columns}), {})
    values.verifier.close()
    n_failed = 2 * sum(failed[:3]) + sum(failed[3:])
    assert stats["failed"] == (n_failed, 9.0)
    expected = [[2.0, 4.0]] * (not all(failed[:3]) and not all(failed[3:])) + [[2.0]] * (not all(failed[:3]))
    assert [row.tolist() for row in found.columns["state_values"].rows()] == expected


def test_max_states(tmp_path: Path) -> None:
    engine = ScriptedEngine({"P": ["!"]})
    config = RolloutConfig(PPOConfig(), VineConfig(n_rollouts=1, max_states=1))
    sampled, _ = VineRollouts(config, context(tmp_path)).generate(engine, responses("a\nb\nc"), {})
    assert sampled["state_starts"].tolist() == [1, 2, 4] and sampled.lengths("rollout_lengths") == (1,)
    empty, stats = VineRollouts(config, context(tmp_path)).generate(engine, responses("a").select([]), {})
    assert len(empty) == 0 and stats["states"] == (0.0, 1.0)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8), st.floats(-1, 1), st.integers(0, 8))
def test_advantages_add_up_to_reward_minus_initial_value(values: list[float], reward: float, more: int) -> None:
    n_steps = len(values) + more
    advantages = step_advantages(values, reward, n_steps)
    assert len(advantages) == n_steps and sum(advantages) == pytest.approx(reward - values[0], abs=1e-9)
    assert advantages[len(values) :] == [0.0] * more


def test_step_advantages_of_no_steps_and_of_nan() -> None:
    assert step_advantages([], 1.0, 0) == []
    with pytest.raises(ValueError, match="nan"):
        step_advantages([0.5, float("nan")], 1.0, 2)


def test_token_starts() -> None:
    assert token_starts(["ab", "c\n", "d", "\n", "#"], [0, 3, 5]) == [0, 2, 3]  # 3 is inside "c\n": the next token
    assert token_starts(["abc"], [0, 1, 2]) == [0]
    assert spread_over_tokens([1.0, 2.0], [1, 3], 6).tolist() == [0, 1, 1, 2, 2, 2]
