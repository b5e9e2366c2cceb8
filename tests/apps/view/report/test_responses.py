"""Which responses are on the page."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.apps.view.report.responses import (
    MAX_PROMPT,
    MAX_RESPONSE,
    MAX_ROWS,
    MAX_STEPS,
    RowCache,
    read_responses,
    response_row,
    select_rows,
    spread,
    step_files,
)
from tests.scaling import examples


def write(folder: Path, step: int, rows: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@settings(max_examples=examples(100))
@given(st.lists(st.integers(), max_size=100, unique=True).map(sorted), st.integers(2, 20))
def test_steps_are_spread_evenly_with_the_first_and_the_last(values: list[int], limit: int) -> None:
    chosen = spread(values, limit)
    assert len(chosen) == min(limit, len(values)) == len(set(chosen)) and chosen == sorted(chosen)
    assert not values or (chosen[0], chosen[-1]) == (values[0], values[-1])


def test_left_out_steps_rows_and_characters_are_named(tmp_path: Path) -> None:
    for step in range(1, MAX_STEPS + 11):
        write(tmp_path, step, [{"prompt": "p", "response": f"{i}"} for i in range(MAX_ROWS + 2 if step == 1 else 1)])
    write(tmp_path, 2, [{"prompt": "p" * (MAX_PROMPT + 5), "response": "r" * 1_000_000}])
    found = read_responses(tmp_path)
    assert len(found.steps) == MAX_STEPS and found.n_steps == MAX_STEPS + 10
    assert len(found.steps[0].rows) == MAX_ROWS and found.steps[0].n_omitted == 2
    note = found.note(tmp_path)
    assert "10 of 50 steps" in note and "2 further rows" in note and str(tmp_path) in note
    second = found.steps[1].rows[0]
    assert len(second.prompt) == MAX_PROMPT and len(second.response) == MAX_RESPONSE
    assert second.n_omitted == 5 + 1_000_000 - MAX_RESPONSE and f"{second.n_omitted:,} characters" in note


def test_the_budget_limits_all_steps(tmp_path: Path) -> None:
    for step in range(1, 11):
        write(tmp_path, step, [{"prompt": "p", "response": "r" * 1000} for _ in range(20)])
    found = read_responses(tmp_path, budget=50_000)
    assert 10 <= sum(len(step.rows) for step in found.steps) <= 50
    assert sum(row.size for step in found.steps for row in step.rows) <= 50_000


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    cache: RowCache = {}
    for step in (1, 2):
        write(tmp_path, step, [{"prompt": "p", "response": "old"}])
    read_responses(tmp_path, cache=cache)
    first = cache[1]
    write(tmp_path, 2, [{"prompt": "p", "response": "changed"}])
    found = read_responses(tmp_path, cache=cache)
    assert [step.rows[0].response for step in found.steps] == ["old", "changed"] and cache[1] is first
    (tmp_path / "step_1.jsonl").unlink()
    assert [step.step for step in read_responses(tmp_path, cache=cache).steps] == [2] == list(cache)


def test_prompts_of_several_steps_come_first_but_rows_keep_their_order() -> None:
    rows = [response_row({"prompt": prompt, "response": "x" * 9}) for prompt in ("a", "b", "c", "b")]
    kept = select_rows([row for row in rows if row], {"a": 1, "b": 2, "c": 1}, 30)
    assert [row.prompt for row in kept] == ["a", "b", "b"]


@pytest.mark.parametrize("record", [{}, {"prompt": "p"}, {"response": 3}, {"response": None}])
def test_rows_without_a_response(record: dict) -> None:
    assert response_row(record) is None


def test_values_of_other_types() -> None:
    row = response_row(
        {"prompt": 1, "response": "r", "rewards": "high", "answer_tokens": True, "sample": [], "truncated": 1}
    )
    assert row and (row.prompt, row.reward, row.n_tokens, row.sample, row.is_truncated) == ("", None, None, 0, True)


def test_other_files_and_damaged_rows_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, 3, [{"prompt": "p", "response": "r"}])
    with (tmp_path / "step_3.jsonl").open("a") as file:
        file.write('{"prompt": "cut')
    for name in ("step_x.jsonl", "step_.jsonl", f"step_{'9' * 30}.jsonl", "step_-1.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "step_4.jsonl").mkdir()
    assert list(step_files(tmp_path)) == [3, 4]
    assert [len(step.rows) for step in read_responses(tmp_path).steps] == [1, 0]
    assert read_responses(tmp_path / "none").steps == []
