"""Rows with programming problems: accepted forms, and the message for every kind of bad row."""

import gzip
import json
from pathlib import Path

import pytest

from realhf.api.config import DatasetConfig, OnBadRow
from realhf.api.experiment import Task
from realhf.data.rows import TaskRows, read_rows

HUMAN_EVAL = Path(__file__).parents[2] / "../shared/data/HumanEval.jsonl.gz"
TESTS = {"inputs": ["1\n", ""], "outputs": ["2", "0\n"]}
CALLS = {"inputs": ['1\n"a"', "[2]\n\nnull\n"], "outputs": ['"b"', "{}"], "fn_name": "f"}
STUB = {"prompt": "def f(x):\n", "test": "def check(candidate):\n    pass", "entry_point": "f"}


def read(tmp_path: Path, *rows: object, **options: object) -> TaskRows:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_rows(DatasetConfig(path=str(file), on_bad_row=OnBadRow.skip, **options), Task.code)


@pytest.mark.parametrize("tests", [TESTS, CALLS])
def test_tests_may_be_text_or_an_object(tmp_path: Path, tests: dict) -> None:
    rows = read(
        tmp_path,
        {"query_id": 7, "task": "code", "prompt": "p", "input_output": json.dumps(tests)},
        {"question": "p", "input_output": {**tests, "origin": "here"}},
    )
    first, second = (row.fields for row in rows.rows)
    assert first == {"query_id": "7", "task": "code", "prompt": "p", "input_output": json.dumps(tests)}
    assert second == {"query_id": "2", "prompt": "p", "input_output": json.dumps(tests)}


def test_no_fn_name_is_the_same_as_null(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"prompt": "p", "input_output": {**TESTS, "fn_name": None}}).rows
    assert json.loads(row.fields["input_output"]) == TESTS


def test_the_template_does_not_change_the_stub(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"task_id": "T/1", **STUB}, prompt_template="Complete:\n{prompt}").rows
    assert row.fields["prompt"] == "Complete:\ndef f(x):\n" and row.fields["stub"] == "def f(x):\n"
    assert row.fields["query_id"] == "T/1" and row.fields["test"] == STUB["test"]


def test_human_eval_is_read_unchanged(tmp_path: Path) -> None:
    if not HUMAN_EVAL.is_file():
        pytest.skip(f"third-party data {HUMAN_EVAL.name} is missing")
    file = tmp_path / "HumanEval.jsonl"
    file.write_bytes(gzip.decompress(HUMAN_EVAL.read_bytes()))
    rows = read_rows(DatasetConfig(path=str(file)), Task.code).rows
    assert len(rows) == 164 and {row.fields["stub"] == row.fields["prompt"] for row in rows} == {True}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p"}, "'input_output' is missing (keys: prompt)"),
        ({"prompt": "p", "input_output": "{"}, "'input_output' is not JSON: Expecting property name"),
        ({"prompt": "p", "input_output": "[" * 100_000}, "'input_output' is not JSON: maximum recursion depth"),
        ({"prompt": "p", "input_output": "[1]"}, "'input_output' is a list, it must be an object with 'inputs'"),
        ({"prompt": "p", "input_output": None}, "'input_output' is null, it must be an object"),
        ({"prompt": "p", "input_output": {"inputs": ["1"]}}, "'outputs' of 'input_output' is null, it must be a list"),
        ({"prompt": "p", "input_output": {**TESTS, "inputs": "1"}}, "'inputs' of 'input_output' is a text, it must be"),
        ({"prompt": "p", "input_output": {**TESTS, "inputs": [1, 2]}}, "'inputs'[0] of 'input_output' is 1, it must"),
        ({"prompt": "p", "input_output": {**TESTS, "inputs": ["1"]}}, "1 'inputs' and 2 'outputs' in 'input_output':"),
        ({"prompt": "p", "input_output": {"inputs": [], "outputs": []}}, "0 'inputs' and 0 'outputs'"),
        ({"prompt": "p", "input_output": {**CALLS, "fn_name": 3}}, "'fn_name' of 'input_output' is 3, it must be the"),
        ({"prompt": "p", "input_output": {**CALLS, "fn_name": "a b"}}, "'fn_name' of 'input_output' is a text, it"),
        ({"prompt": "p", "input_output": {**CALLS, "inputs": ["x", "1"]}}, "'inputs'[0] is 'x'; with 'fn_name'"),
        ({"prompt": "p", "input_output": {**CALLS, "outputs": ["1", ""]}}, "'outputs'[1] is ''; with 'fn_name'"),
        ({**STUB, "entry_point": "g"}, "'prompt' does not define a function 'g', which 'test' and"),
        ({**STUB, "test": "assert f(1)"}, "'test' does not define a function 'check', which"),
        ({**STUB, "entry_point": None}, "'entry_point' is null, it must be text"),
        ({**STUB, "prompt": [{"role": "user", "content": "c"}]}, "'prompt' is a list, it must be text"),
    ],
)
def test_a_bad_row_is_reported(tmp_path: Path, row: dict, words: str) -> None:
    rows = read(tmp_path, STUB, row)
    assert [r.line for r in rows.rows] == [1]
    assert rows.problems[0].startswith(f"{tmp_path}/d.jsonl:2: {words}")
