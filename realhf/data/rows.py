"""Reads a data file into rows with one form per task, and reports bad rows. Nothing is tokenised here.

| task | fields of a row |
|---|---|
| prompt | ``prompt``, and all other keys |
| episode | all keys; ``prompt`` is optional |
| math | ``query_id``, ``prompt``, ``solutions``, and all other keys |
| code | ``query_id``, ``prompt``, ``input_output`` or ``stub``, ``test``, ``entry_point``, and all other keys |
| answer | ``prompt``, ``answer``, and all other keys |
| sft | ``prompt``, ``answer`` |
| pairs | ``prompt``, ``pos_answers``, ``neg_answers`` |
| ranked | ``prompt``, ``answers`` from best to worst |
| outcome | ``prompt``, ``answer``, ``label`` |
| process | ``prompt``, ``steps``, ``labels`` |

A prompt is a text, or a list of chat messages for the tokenizer's chat template.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.api.code_tests import parse_code_tests
from realhf.api.config import DatasetConfig, OnBadRow
from realhf.api.experiment import Task
from realhf.base.child_process import SURROGATE
from realhf.base.errors import UserError, kind_of
from realhf.data.files import read_raw_rows

Prompt = str | list[dict[str, str]]

PLACEHOLDER = "{prompt}"
PROMPT_KEYS = ("prompt", "question", "messages")
CALCULATOR_SPAN = re.compile(r"<<[^<>\n]*>>")
MAX_SHOWN_PROBLEMS = 10
SYNONYMS = {
    "prompt": ("question", "problem", "query", "instruction", "input", "context", "text"),
    "answer": ("response", "output", "completion", "target", "solution", "chosen", "reply", "label"),
    "solutions": ("solution", "answer", "final_answer", "target", "ground_truth", "label"),
    "chosen": ("accepted", "preferred", "positive"),
    "rejected": ("negative", "dispreferred"),
    "input_output": ("tests", "test_cases"),
    "label": ("score", "rating", "correct"),
    "answers": ("responses", "outputs", "completions"),
    "steps": ("completions", "solution_steps"),
    "labels": ("ratings", "step_labels"),
}
"""Names that other datasets have for a column, which an error message suggests to rename."""


@dataclass(frozen=True)
class Row:
    """A valid row and the line on which it starts."""

    line: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class TaskRows:
    """The valid rows in file order, and one message with file and line for every bad row."""

    rows: tuple[Row, ...]
    problems: tuple[str, ...]


class BadRow(ValueError):
    """A row that does not fit its task."""


def read_rows(config: DatasetConfig, task: Task) -> TaskRows:
    """Return the rows of ``config.path``; UserError for an invalid file, invalid options or bad rows.

    With ``on_bad_row=skip`` bad rows are only listed, unless no valid row remains.
    """
    parsed = list(parse_rows(config, task))
    rows = tuple(row for row in parsed if isinstance(row, Row))
    problems = tuple(problem for problem in parsed if isinstance(problem, str))
    check_problems(config, problems, n_valid=len(rows))
    return TaskRows(rows, problems)


def parse_rows(config: DatasetConfig, task: Task) -> Iterator[Row | str]:
    """Yield every row, or a message for a bad row, while the file is read."""
    check_options(config, task)
    for raw in read_raw_rows(config.path, config.columns):
        try:
            if raw.problem:
                raise BadRow(raw.problem)
            if not isinstance(raw.value, dict):
                raise BadRow(f"the row is {kind_of(raw.value)}, it must be an object with keys")
            yield Row(raw.line, NORMALISE[task](raw.value, raw.line, config.prompt_template))
        except BadRow as problem:
            yield f"{config.path}:{raw.line}: {problem}"


def check_problems(config: DatasetConfig, problems: Sequence[str], n_valid: int) -> None:
    """Raise UserError with the first ``problems``, equal ones once, if bad rows are errors or no valid row remains."""
    if not problems and n_valid:
        return
    equal: dict[str, list[str]] = {}
    for problem in problems:
        equal.setdefault(problem.removeprefix(f"{config.path}:").partition(": ")[2], []).append(problem)
    lines = [f"{same[0]} (and in {len(same) - 1} more rows)" if same[1:] else same[0] for same in equal.values()]
    shown, rest = lines[:MAX_SHOWN_PROBLEMS], sum(map(len, list(equal.values())[MAX_SHOWN_PROBLEMS:]))
    more = [f"... and {rest} more bad rows in {config.path}"] if rest > 0 else []
    if not n_valid:
        raise UserError([*shown, *more, f"dataset.path={config.path} has no usable row"])
    if config.on_bad_row is OnBadRow.error:
        advice = f"{len(problems)} bad rows: fix them, or skip them with dataset.on_bad_row=skip"
        raise UserError([*shown, *more, advice])


def check_options(config: DatasetConfig, task: Task) -> None:
    problems = []
    if config.prompt_template.count(PLACEHOLDER) != 1:
        problems.append(f"dataset.prompt_template={config.prompt_template!r} must contain {PLACEHOLDER} exactly once")
    if twice := sorted({new for new in config.columns.values() if list(config.columns.values()).count(new) > 1}):
        problems.append(f"dataset.columns={config.columns} gives several columns the name {', '.join(twice)}")
    if config.label_noise and task is not Task.pairs:
        problems.append(f"dataset.label_noise={config.label_noise} requires a dataset of pairs")
    if config.eval_fraction and config.eval_path:
        problems.append("dataset.eval_fraction and dataset.eval_path are both set; use one of them")
    if problems:
        raise UserError(problems)


def prompt_row(raw: dict, line: int, template: str) -> dict:
    return {**without(raw, "messages"), "prompt": prompt_of(raw, template)}


def answer_row(raw: dict, line: int, template: str) -> dict:
    """Accept rows of generations/ too: a ``response``, and the original row as ``fields``."""
    original = raw["fields"] if isinstance(raw.get("fields"), dict) else raw
    key = "response" if "fields" in raw else "answer"
    answer = check_text(f"'{key}'", required(raw, key), may_be_empty=True)
    prompt = prompt_of(original, template)
    return {**without({**original, **raw}, "fields", "messages", "response"), "prompt": prompt, "answer": answer}


def math_row(raw: dict, line: int, template: str) -> dict:
    row = without(raw, "question", "messages") | {"query_id": str(raw.get("query_id", line))}
    row["prompt"] = prompt_of(raw, template)
    if "solutions" not in raw and "answer" in raw:
        return {**without(row, "answer"), "solutions": [text(raw, "answer")]}
    return {**row, "solutions": texts(raw, "solutions")}


def code_row(raw: dict, line: int, template: str) -> dict:
    row = without(raw, "question", "messages") | {"query_id": str(raw.get("query_id", raw.get("task_id", line)))}
    row["prompt"] = prompt_of(raw, template)
    if "input_output" in raw or "test" not in raw:
        return {**row, "input_output": input_output(required(raw, "input_output"))}
    stub, test, name = (text(raw, key) for key in ("prompt", "test", "entry_point"))
    for key, source, function in (("prompt", stub, name), ("test", test, "check")):
        if not re.search(rf"^def {re.escape(function)}\b", source, re.MULTILINE):
            raise BadRow(f"{key!r} does not define a function {function!r}, which 'test' and 'entry_point' require")
    return {**row, "stub": stub}


def input_output(value: object) -> str:
    """Return validated tests of a program as JSON text."""
    try:
        tests = parse_code_tests(value)
    except ValueError as problem:
        raise BadRow(str(problem)) from None
    for key, texts_of_key in (("inputs", tests.inputs), ("outputs", tests.outputs)):
        for i, part in enumerate(texts_of_key):
            check_text(f"{key!r}[{i}] of 'input_output'", part, may_be_empty=True)
    return tests.to_json()


def sft_row(raw: dict, line: int, template: str) -> dict:
    prompt = prompt_of(raw, template)
    if "prompt" in raw:
        return {"prompt": prompt, "answer": text(raw, "answer")}
    if "question" in raw:
        return {"prompt": prompt, "answer": CALCULATOR_SPAN.sub("", text(raw, "answer"))}
    last = raw["messages"][-1]
    if last["role"] != "assistant" or not last["content"]:
        raise BadRow("'messages' must end with a message of the assistant")
    return {"prompt": prompt, "answer": last["content"]}


def pairs_row(raw: dict, line: int, template: str) -> dict:
    prompt = prompt_of(raw, template)
    has_lists = "pos_answers" in raw or "neg_answers" in raw
    if not has_lists and ("chosen" in raw or "rejected" in raw):
        return {"prompt": prompt, "pos_answers": [text(raw, "chosen")], "neg_answers": [text(raw, "rejected")]}
    chosen, rejected = texts(raw, "pos_answers"), texts(raw, "neg_answers")
    if len(chosen) != len(rejected):
        raise BadRow(f"{len(chosen)} 'pos_answers' and {len(rejected)} 'neg_answers': the numbers must be equal")
    return {"prompt": prompt, "pos_answers": chosen, "neg_answers": rejected}


def ranked_row(raw: dict, line: int, template: str) -> dict:
    prompt = prompt_of(raw, template)
    if "answers" not in raw and "chosen" in raw:
        return {"prompt": prompt, "answers": [text(raw, "chosen"), text(raw, "rejected")]}
    if len(answers := texts(raw, "answers")) < 2:
        raise BadRow("'answers' has one answer, ranking needs two or more")
    return {"prompt": prompt, "answers": answers}


def episode_row(raw: dict, line: int, template: str) -> dict:
    return prompt_row(raw, line, template) if any(key in raw for key in PROMPT_KEYS) else dict(raw)


def outcome_row(raw: dict, line: int, template: str) -> dict:
    label = required(raw, "label")
    prompt = prompt_of(raw, template)
    return {"prompt": prompt, "answer": text(raw, "answer"), "label": unit_interval("'label'", label)}


def process_row(raw: dict, line: int, template: str) -> dict:
    """Steps are joined to the answer; a step that does not begin with white space starts a new line."""
    prompt = prompt_of(raw, template)
    steps = [step.rstrip() for step in texts(raw, "steps")]
    if "" in steps:
        raise BadRow(f"'steps'[{steps.index('')}] contains only white space")
    steps[1:] = [step if step[0].isspace() else f"\n{step}" for step in steps[1:]]
    labels = raw.get("labels")
    if not isinstance(labels, list):
        raise missing(raw, "labels") if labels is None else BadRow(f"'labels' is {kind_of(labels)}, it must be a list")
    if len(steps) != len(labels):
        raise BadRow(f"{len(steps)} 'steps' and {len(labels)} 'labels': the numbers must be equal")
    labels = [unit_interval(f"'labels'[{i}]", label) for i, label in enumerate(labels)]
    return {"prompt": prompt, "steps": steps, "labels": labels}


NORMALISE: dict[Task, Callable[[dict, int, str], dict]] = {
    Task.prompt: prompt_row,
    Task.answer: answer_row,
    Task.episode: episode_row,
    Task.math: math_row,
    Task.code: code_row,
    Task.sft: sft_row,
    Task.pairs: pairs_row,
    Task.ranked: ranked_row,
    Task.outcome: outcome_row,
    Task.process: process_row,
}


def prompt_of(raw: dict, template: str) -> Prompt:
    """Return the prompt under the first of ``PROMPT_KEYS`` in the row; the template is applied to its last message."""
    key = next((key for key in PROMPT_KEYS if key in raw), None)
    if key is None:
        raise missing(raw, PROMPT_KEYS[0])
    if not isinstance(raw[key], list):
        return template.replace(PLACEHOLDER, text(raw, key))
    messages = chat(raw, key)
    if key == "messages" and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # the answer
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRow(f"{key!r} must end with a message for the assistant to answer")
    last = messages[-1]
    return [*messages[:-1], {**last, "content": template.replace(PLACEHOLDER, last["content"])}]


def chat(raw: dict, key: str) -> list[dict[str, str]]:
    messages = raw[key]
    if not messages:
        raise BadRow(f"{key!r} is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRow(f"{key!r}[{i}] is {kind_of(message)}, it must be an object with 'role' and 'content'")
        for part in ("role", "content"):
            check_text(f"{key!r}[{i}][{part!r}]", message.get(part), may_be_empty=part == "content")
    return messages


def text(raw: dict, key: str) -> str:
    return check_text(repr(key), required(raw, key))


def texts(raw: dict, key: str) -> list[str]:
    values = required(raw, key)
    if not isinstance(values, list) or not values:
        raise BadRow(f"{key!r} is {kind_of(values)}, it must be a list of texts")
    return [check_text(f"{key!r}[{i}]", value) for i, value in enumerate(values)]


def unit_interval(name: str, value: object) -> float:
    """Return a label: a number in [0, 1] or a bool."""
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise BadRow(f"{name} is {kind_of(value)}, it must be between 0 and 1")
    return float(value)


def check_text(name: str, value: object, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {kind_of(value)}, it must be text")
    if not value and not may_be_empty:
        raise BadRow(f"{name} is empty")
    if SURROGATE.search(value):
        raise BadRow(f"{name} contains an unpaired surrogate")
    return value


def without(row: dict, *keys: str) -> dict:
    return {key: value for key, value in row.items() if key not in keys}


def required(raw: dict, key: str) -> Any:
    if key not in raw:
        raise missing(raw, key)
    return raw[key]


def missing(raw: dict, key: str) -> BadRow:
    near = [*(name for name in SYNONYMS.get(key, ()) if name in raw), *difflib.get_close_matches(key, map(str, raw))]
    hint = f"; dataset.columns={{{near[0]}: {key}}} renames" if near else ""
    return BadRow(f"{key!r} is missing (keys: {', '.join(map(str, raw)) or 'none'}){hint}")
