"""Group-wise functions in real judge processes: order of responses, failures and deadlines."""

from pathlib import Path

import pytest

from realhf.api.batch_meta import RowId
from realhf.api.config import LLMJudgeConfig, RewardConfig
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.plan.compile.micro_batch import partition_rows
from realhf.rewards.group.scorer import GroupScorer
from realhf.rewards.verdict import Item, Status, Verdict
from tests.rewards.llm_judge.endpoint import Endpoint, served

FUNCTIONS = """
import asyncio, os, time
from fractions import Fraction

def position(prompt, responses, row):
    return [float(i) for i in range(len(responses))]

def length(prompt, responses, row):
    return [len(r) + row["plus"] for r in responses]

async def waiting(prompt, responses, row):
    await asyncio.sleep(0.01)
    return (len(r) for r in responses)

def consuming(prompt, responses, row):
    scores = []
    while responses:
        scores.append(len(responses.pop(0)))
    return scores

def by_prompt(prompt, responses, row):
    n = len(responses)
    if prompt == "emptied": return responses.clear() or []
    if prompt == "raise": raise RuntimeError("no such tool")
    if prompt == "hang": time.sleep(60)
    if prompt == "die": os._exit(7)
    return {"few": [1.0], "many": [1.0] * (n + 1), "endless": iter(int, 1), "none": None, "text": "1" * n,
            "nan": [float("nan")] * n, "inf": [1e999] * n, "one_bad": [1.0] * (n - 1) + ["1"],
            "mapping": dict.fromkeys(responses, 1.0), "good": [Fraction(1, 2)] * n}[prompt]
"""
FAILURES = {
    "raise": "RuntimeError: no such tool",
    "hang": "no verdict after 1 s (reward.timeout)",
    "die": "the judge process ended (exit code 7)",
    "few": "the result has 1 scores, it must have one for each of the 2 responses",
    "emptied": "the result has 0 scores, it must have one for each of the 2 responses",
    "many": "the result has more scores, it must have one for each of the 2 responses",
    "endless": "the result has more scores, it must have one for each of the 2 responses",
    "none": "the result is None, a NoneType; it must be a list of 2 numbers",
    "text": "the result is '11', a str; it must be a list of 2 numbers",
    "nan": "score 0: the reward is nan, it must be finite",
    "inf": "score 0: the reward is inf, it must be finite",
    "one_bad": "score 1: the reward is '1', a str; it must be a number",
    "mapping": "the result is {'p': 1.0, 'pp': 1.0}, a dict; it must be a list of 2 numbers",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def scored(reward: RewardConfig, ids: list[RowId], items: list[Item], seed: int = 1) -> list[Verdict]:
    scorer = GroupScorer(reward, seed, RunDir(Path("/nonexistent")))
    try:
        return scorer.score(ids, items)[0]
    finally:
        scorer.close()


def rows(*prompts: str, n: int = 5) -> tuple[list[RowId], list[Item]]:
    """Rows in mixed order: response ``p``, ``pp``, ... of each prompt."""
    ids = [RowId(p, s) for s in reversed(range(n)) for p in range(len(prompts))]
    return ids, [(prompts[row.prompt], "p" * (row.sample + 1), {"plus": row.prompt}) for row in ids]


@pytest.mark.parametrize("name", ["length", "waiting", "consuming"])
def test_each_response_gets_its_own_score(file: Path, name: str) -> None:
    ids, items = rows("one", "two", "three")
    verdicts = scored(RewardConfig(group_fn=f"{file}:{name}", processes=2), ids, items)
    assert {verdict.status for verdict in verdicts} == {Status.ok}
    plus = [row["plus"] if name == "length" else 0 for _, _, row in items]
    assert [v.score for v in verdicts] == [len(item[1]) + p for item, p in zip(items, plus, strict=True)]


def test_the_order_depends_on_seed_and_prompt_only(file: Path) -> None:
    """No sample has the same position in all prompts; the order of the batch and other prompts have no influence."""
    reward = RewardConfig(group_fn=f"{file}:position")
    ids, items = rows("one", "two", "three", "four")
    positions = dict(zip(ids, (v.score for v in scored(reward, ids, items)), strict=True))
    for prompt in range(4):
        assert sorted(positions[RowId(prompt, s)] for s in range(5)) == [0, 1, 2, 3, 4]
    assert any(len({positions[RowId(p, s)] for p in range(4)}) > 1 for s in range(5))
    part = [i for i in reversed(range(len(ids))) if ids[i].prompt in (1, 3)]
    again = scored(reward, [ids[i] for i in part], [items[i] for i in part])
    assert [v.score for v in again] == [positions[ids[i]] for i in part]
    other = scored(reward, ids, items, seed=2)
    assert [v.score for v in other] != [positions[row] for row in ids]


def test_failures_are_those_of_all_responses_of_the_prompt(file: Path) -> None:
    names = [*FAILURES, "good"]
    ids, items = rows(*names, n=2)
    verdicts = scored(RewardConfig(group_fn=f"{file}:by_prompt", timeout=1.0, processes=2), ids, items)
    for (prompt, *_), verdict in zip(items, verdicts, strict=True):
        if prompt == "good":
            assert verdict == Verdict(0.5, Status.ok)
            continue
        expected = FAILURES[prompt]
        expected = expected.replace("'p': 1.0, 'pp': 1.0", "'pp': 1.0, 'p': 1.0") if prompt == "mapping" else expected
        assert verdict.status is (Status.timeout if prompt == "hang" else Status.error)
        assert verdict.detail in (FAILURES[prompt], expected), prompt


def test_a_file_that_cannot_be_loaded_is_named_by_its_option(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nowhere_to_be_found\ndef f(prompt, responses, row): ...\n")
    scorer = GroupScorer(RewardConfig(group_fn=f"{tmp_path}/bad.py:f"), 1, RunDir(tmp_path))
    with pytest.raises(UserError, match=r"reward.group_fn='.*bad.py:f' cannot be loaded: ModuleNotFoundError"):
        scorer.self_test()


@pytest.mark.parametrize("preset", ["self_consistency", "diversity"])
def test_presets_run_in_judge_processes(preset: str) -> None:
    ids = [RowId(0, 0), RowId(0, 1), RowId(1, 0)]
    verdicts = scored(
        RewardConfig(group_fn=preset), ids, [("q", "#### 1", {}), ("q", "#### 1", {}), ("r", "#### 2", {})]
    )
    expected = [1.0, 1.0, 1.0] if preset == "self_consistency" else [0.0, 0.0, 0.0]
    assert [v.score for v in verdicts] == expected


def test_statistics_of_a_language_model(tmp_path: Path) -> None:
    ids, items = rows("one", "two", n=3)
    with served(Endpoint()) as endpoint:
        judge = LLMJudgeConfig(base_url=endpoint.url, model="m", price_in=1.0, price_out=10.0)
        scorer = GroupScorer(RewardConfig(group_fn="rubric", judge=judge), 1, RunDir(tmp_path))
        verdicts, stats = scorer.score(ids, items)
    assert [v.score for v in verdicts] == [min(10, len(answer) // 2) / 10 for _, answer, _ in items]
    usd = (endpoint.tokens_in + 10 * endpoint.tokens_out) / 1e6
    assert stats == {
        "judge_requests": (6.0, 0.0), "judge_retries": (0.0, 0.0), "judge_failures": (0.0, 0.0),
        "judge_tokens_in": (endpoint.tokens_in, 0.0), "judge_tokens_out": (endpoint.tokens_out, 0.0),
        "judge_usd": (pytest.approx(usd), 0.0), "judge_cached": (0.0, 6.0),
    }  # fmt: skip


def test_all_rows_of_a_prompt_are_on_one_rank() -> None:
    """A group-wise function of a data-parallel call sees whole groups."""
    ids = [RowId(prompt, sample) for sample in range(8) for prompt in range(5)]
    for dp in (2, 3, 7):
        parts, _ = partition_rows(ids, [1 + (7 * i) % 31 for i in range(len(ids))], dp)
        for prompt in range(5):
            assert len([part for part in parts if any(ids[i].prompt == prompt for i in part)]) == 1
