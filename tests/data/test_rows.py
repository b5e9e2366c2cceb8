"""Every accepted form of a row, and the message for every kind of bad row."""

import json
from pathlib import Path

import pytest

from realhf.api.config import DatasetConfig, OnBadRow
from realhf.api.experiment import Task
from realhf.base.errors import UserError
from realhf.data.rows import TaskRows, read_rows


def read(tmp_path: Path, text: str | bytes, task: Task, **options: object) -> TaskRows:
    file = tmp_path / "d.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_rows(DatasetConfig(path=str(file), **options), task)


def fields(tmp_path: Path, row: dict, task: Task, **options: object) -> dict:
    return read(tmp_path, json.dumps(row), task, **options).rows[0].fields


def problem(tmp_path: Path, row: object, task: Task) -> str:
    """Return the problem reported for ``row`` on line 2, after a valid row."""
    valid = {"prompt": "p", "answer": "a", "solutions": ["1"], "chosen": "c", "rejected": "r", "label": 1}
    valid |= {"steps": ["s"], "labels": [0]}
    text = json.dumps(valid) + "\n" + (row if isinstance(row, str) else json.dumps(row))
    rows = read(tmp_path, text, task, on_bad_row=OnBadRow.skip)
    assert [r.line for r in rows.rows] == [1]
    location, message = rows.problems[0].split(": ", 1)
    assert location == f"{tmp_path}/d.jsonl:2"
    return message


CHAT = [{"role": "user", "content": "hi"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        (Task.prompt, {"prompt": "p", "lang": "en"}, {"prompt": "p", "lang": "en"}),
        (Task.prompt, {"prompt": CHAT}, {"prompt": CHAT}),
        (Task.prompt, {"messages": ANSWERED}, {"prompt": CHAT}),
        (
            Task.math,
            {"query_id": 7, "prompt": "p", "solutions": ["\\boxed{1}", "2"], "level": 3},
            {"query_id": "7", "prompt": "p", "solutions": ["\\boxed{1}", "2"], "level": 3},
        ),
        (
            Task.math,
            {"question": "q", "answer": "<<1=1>>1\n#### 1"},
            {"query_id": "1", "prompt": "q", "solutions": ["<<1=1>>1\n#### 1"]},
        ),
        (Task.answer, {"id": 3, "prompt": "p", "answer": ""}, {"id": 3, "prompt": "p", "answer": ""}),
        (
            Task.answer,
            {
                "prompt": "u:hi;>",
                "response": "ho",
                "rewards": 1.5,
                "fields": {"messages": CHAT, "answer": "4", "id": 3},
            },
            {"prompt": CHAT, "answer": "ho", "rewards": 1.5, "id": 3},
        ),
        (Task.sft, {"id": 3, "prompt": "p", "answer": "<<a>>"}, {"prompt": "p", "answer": "<<a>>"}),
        (Task.sft, {"question": "q", "answer": "4/2 = <<4/2=2>>2"}, {"prompt": "q", "answer": "4/2 = 2"}),
        (Task.sft, {"messages": ANSWERED}, {"prompt": CHAT, "answer": "ho"}),
        (
            Task.pairs,
            {"prompt": "p", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]},
            {"prompt": "p", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]},
        ),
        (
            Task.pairs,
            {"prompt": "p", "chosen": "a", "rejected": "b"},
            {"prompt": "p", "pos_answers": ["a"], "neg_answers": ["b"]},
        ),
        (Task.ranked, {"prompt": "p", "answers": ["a", "b", "c"]}, {"prompt": "p", "answers": ["a", "b", "c"]}),
        (Task.ranked, {"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "answers": ["a", "b"]}),
        (Task.outcome, {"question": "p", "answer": "a", "label": True}, {"prompt": "p", "answer": "a", "label": 1.0}),
        (
            Task.process,
            {"messages": CHAT, "steps": ["a\n", "b "], "labels": [1, 0.25]},
            {"prompt": CHAT, "steps": ["a", "\nb"], "labels": [1.0, 0.25]},
        ),
    ],
)
def test_rows_are_normalised_per_task(tmp_path: Path, task: Task, row: dict, expected: dict) -> None:
    assert fields(tmp_path, row, task) == expected


def test_the_template_replaces_only_the_placeholder(tmp_path: Path) -> None:
    template = "{x} Q: {prompt}\nA:"
    assert fields(tmp_path, {"prompt": "{prompt}"}, Task.prompt, prompt_template=template)["prompt"] == (
        "{x} Q: {prompt}\nA:"
    )
    chat = fields(tmp_path, {"prompt": CHAT}, Task.prompt, prompt_template=template)["prompt"]
    assert chat == [{"role": "user", "content": "{x} Q: hi\nA:"}]


def test_all_json_layouts_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "x"}, {"prompt": "b\n", "answer": "y"}]
    jsonl = "\ufeff" + "\r\n".join(map(json.dumps, rows)) + "\n\n"
    texts = [jsonl, json.dumps(rows), json.dumps(rows, indent=2), json.dumps({"version": 1, "data": rows})]
    texts += [json.dumps({"data": rows, "meta": {"n": 2}}, indent=1)]
    read_all = [read(tmp_path, text, Task.sft).rows for text in texts]
    assert [[r.fields for r in rows_] for rows_ in read_all] == [rows] * len(texts)
    assert [r.line for r in read_all[0]] == [1, 2]
    assert [r.line for r in read_all[2]] == [2, 6]
    assert [r.line for r in read_all[4]] == [3, 7]


def test_a_single_object_with_a_list_is_a_row(tmp_path: Path) -> None:
    row = {"prompt": "p", "solutions": ["1"]}
    assert fields(tmp_path, row, Task.math)["solutions"] == ["1"]
    assert fields(tmp_path, {"messages": ANSWERED}, Task.sft)["answer"] == "ho"


@pytest.mark.parametrize(
    ("task", "row", "words"),
    [
        (
            Task.prompt,
            {"text": "t"},
            "'prompt' is missing (keys: text); dataset.columns={text: prompt} renames",
        ),
        (Task.prompt, {}, "'prompt' is missing (keys: none)"),
        (Task.prompt, {"prompt": 3}, "'prompt' is 3, it must be text"),
        (Task.prompt, {"prompt": None}, "'prompt' is null, it must be text"),
        (Task.prompt, {"prompt": ""}, "'prompt' is empty"),
        (Task.prompt, {"prompt": "\ud800"}, "'prompt' contains an unpaired surrogate"),
        (Task.prompt, ["p"], "the row is a list, it must be an object with keys"),
        (Task.prompt, "{oops}", "not JSON: Expecting property name enclosed in double quotes (column 2)"),
        (Task.prompt, {"prompt": []}, "'prompt' is empty"),
        (Task.prompt, {"prompt": ["hi"]}, "'prompt'[0] is a text, it must be an object with 'role' and 'content'"),
        (Task.prompt, {"prompt": [{"role": "user"}]}, "'prompt'[0]['content'] is null, it must be text"),
        (Task.prompt, {"prompt": ANSWERED}, "'prompt' must end with a message for the assistant to answer"),
        (Task.prompt, {"messages": ANSWERED[1:]}, "'messages' must end with a message for the assistant to answer"),
        (Task.math, {"prompt": "p"}, "'solutions' is missing (keys: prompt)"),
        (Task.math, {"prompt": "p", "solutions": "1"}, "'solutions' is a text, it must be a list of texts"),
        (Task.math, {"prompt": "p", "solutions": []}, "'solutions' is an empty list, it must be a list of texts"),
        (Task.math, {"prompt": "p", "solutions": ["1", ""]}, "'solutions'[1] is empty"),
        (Task.math, {"prompt": "p", "solutions": [1]}, "'solutions'[0] is 1, it must be text"),
        (Task.answer, {"prompt": "p", "fields": None}, "'response' is missing (keys: prompt, fields)"),
        (Task.sft, {"prompt": "p"}, "'answer' is missing (keys: prompt)"),
        (Task.sft, {"prompt": "p", "answer": ""}, "'answer' is empty"),
        (Task.sft, {"messages": CHAT}, "'messages' must end with a message of the assistant"),
        (Task.pairs, {"prompt": "p"}, "'pos_answers' is missing (keys: prompt)"),
        (Task.pairs, {"prompt": "p", "chosen": "c"}, "'rejected' is missing (keys: prompt, chosen)"),
        (
            Task.pairs,
            {"prompt": "p", "pos_answers": ["a"], "neg_answers": ["b", "c"]},
            "1 'pos_answers' and 2 'neg_answers': the numbers must be equal",
        ),
        (
            Task.pairs,
            {"prompt": "p", "pos_answers": [], "neg_answers": []},
            "'pos_answers' is an empty list, it must be a list of texts",
        ),
        (
            Task.ranked,
            {"prompt": "p", "answers": ["a"]},
            "'answers' has one answer, ranking needs two or more",
        ),
        (Task.ranked, {"prompt": "p"}, "'answers' is missing (keys: prompt)"),
        (Task.outcome, {"prompt": "p", "answer": "a"}, "'label' is missing (keys: prompt, answer)"),
        (Task.outcome, {"prompt": "p", "answer": "a", "label": 2}, "'label' is 2, it must be between 0 and 1"),
        (Task.outcome, {"prompt": "p", "answer": "a", "label": "1"}, "'label' is a text, it must be between 0 and 1"),
        (
            Task.process,
            {"prompt": "p", "steps": [], "labels": []},
            "'steps' is an empty list, it must be a list of texts",
        ),
        (Task.process, {"prompt": "p", "steps": ["a"]}, "'labels' is missing (keys: prompt, steps)"),
        (Task.process, {"prompt": "p", "steps": ["a"], "labels": 1}, "'labels' is 1, it must be a list"),
        (
            Task.process,
            {"prompt": "p", "steps": ["a", "b"], "labels": [1]},
            "2 'steps' and 1 'labels': the numbers must be equal",
        ),
        (
            Task.process,
            {"prompt": "p", "steps": ["a", " \n"], "labels": [1, 1]},
            "'steps'[1] contains only white space",
        ),
        (
            Task.process,
            {"prompt": "p", "steps": ["a"], "labels": [-1]},
            "'labels'[0] is -1, it must be between 0 and 1",
        ),
    ],
)
def test_a_bad_row_is_reported(tmp_path: Path, task: Task, row: object, words: str) -> None:
    assert problem(tmp_path, row, task) == words


def test_invalid_utf8_is_a_bad_row(tmp_path: Path) -> None:
    text = b'{"prompt": "a"}\n{"prompt": "\xff"}\n'
    rows = read(tmp_path, text, Task.prompt, on_bad_row=OnBadRow.skip)
    assert rows.problems == (f"{tmp_path}/d.jsonl:2: not UTF-8 at byte 13",)


def test_ten_bad_rows_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        bad = "".join(json.dumps({f"key{i}": 0}) + "\n" for i in range(13))
        read(tmp_path, '{"prompt": "p"}\n' + bad, Task.prompt)
    assert len(caught.value.problems) == 12
    assert caught.value.problems[0].endswith("d.jsonl:2: 'prompt' is missing (keys: key0)")
    assert caught.value.problems[10] == f"... and 3 more bad rows in {tmp_path}/d.jsonl"
    assert "dataset.on_bad_row=skip" in caught.value.problems[11]


def test_skipping_every_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable row"):
        read(tmp_path, "{}\n{}\n", Task.prompt, on_bad_row=OnBadRow.skip)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("[]", "no usable row"),
        ('[{"prompt": "a"},\n {"prompt" "b"}]', r"d.jsonl:2: not JSON: Expecting ':' delimiter \(column 12\)"),
        ('[{"prompt": "a"}\n {"prompt": "b"}]', r"d.jsonl:2: not JSON: Expecting ',' delimiter \(column 2\)"),
        ('[{"prompt": "a"}]\n[{"prompt": "b"}]', r"d.jsonl:1: not JSON: Extra data \(column 18\)"),
        ('[{"prompt": "a"}', "d.jsonl:1: not JSON"),
        (b'[\n"\xff"]', "d.jsonl:2: not UTF-8"),
    ],
)
def test_a_file_without_rows_is_an_error(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(tmp_path, text, Task.prompt, on_bad_row=OnBadRow.skip)


def test_an_invalid_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    for path, words in [
        ("", "not set"),
        (f"{tmp_path}::test", "it contains train.jsonl"),
        ("no/such.jsonl", "no such file"),
    ]:
        with pytest.raises(UserError, match=words):
            read_rows(DatasetConfig(path=path), Task.prompt)


def test_invalid_options_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, "{}", Task.pairs, prompt_template="Q:", eval_fraction=0.5, eval_path="f")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        (Task.sft, {"label_noise": 0.1}, "dataset.label_noise=0.1 requires a dataset of pairs"),
        (
            Task.pairs,
            {"eval_fraction": 0.1, "eval_path": "f"},
            "dataset.eval_fraction and dataset.eval_path are both set",
        ),
    ],
)
def test_options_of_preferences_and_held_out_rows(tmp_path: Path, task: Task, options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path, "{}", task, **options)
    assert len(caught.value.problems) == 1
