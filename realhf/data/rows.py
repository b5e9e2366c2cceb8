"""Reads a data file into rows of one form per task, and says what is wrong with the others. Nothing is tokenised here.

| task | fields of a row |
|---|---|
| prompt | ``prompt``, and whatever else the row holds |
| math | ``query_id``, ``prompt``, ``solutions``, and whatever else the row holds |
| code | ``query_id``, ``prompt``, and ``input_output`` or ``stub``, ``test``, ``entry_point``; and what else there is |
| answer | ``prompt``, ``answer``, and whatever else the row holds |
| sft | ``prompt``, ``answer`` |
| pairs | ``prompt``, ``pos_answers``, ``neg_answers`` |
| ranked | ``prompt``, ``answers``, the best one first |
| outcome | ``prompt``, ``answer``, ``label`` |
| process | ``prompt``, ``steps``, ``labels`` |

A prompt is a text, or a list of chat messages that the tokenizer's chat template will turn into one.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.api.config import DatasetConfig, OnBadRow
from realhf.api.experiment import Task
from realhf.base.errors import UserError
from realhf.data.files import read_raw_rows

Prompt = str | list[dict[str, str]]

PLACEHOLDER = "{prompt}"
CALCULATOR_SPAN = re.compile(r"<<[^<>\n]*>>")
SURROGATE = re.compile("[\ud800-\udfff]")
SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Row:
    """A usable row and the line of the file on which it starts."""

    line: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class TaskRows:
    """The usable rows in file order, and a line of text for every other."""

    rows: tuple[Row, ...]
    problems: tuple[str, ...]


class BadRow(ValueError):
    """What is wrong with one row."""


def read_rows(config: DatasetConfig, task: Task) -> TaskRows:
    """Return the rows of ``config.path``; UserError for a file or options that cannot work, and for bad rows.

    With ``on_bad_row=skip`` bad rows are only listed, unless no other is left.
    """
    check_options(config, task)
    rows: list[Row] = []
    problems: list[str] = []
    for raw in read_raw_rows(config.path):
        try:
            if raw.problem:
                raise BadRow(raw.problem)
            if not isinstance(raw.value, dict):
                raise BadRow(f"the row is {kind_of(raw.value)}, it must be an object with keys")
            rows.append(Row(raw.line, NORMALISE[task](raw.value, raw.line, config.prompt_template)))
        except BadRow as problem:
            problems.append(f"{config.path}:{raw.line}: {problem}")
    settle(config, problems, n_good=len(rows))
    return TaskRows(tuple(rows), tuple(problems))


def settle(config: DatasetConfig, problems: Sequence[str], n_good: int) -> None:
    """Raise UserError with the first ``problems`` if bad rows are errors, or if no good row is left."""
    if not problems and n_good:
        return
    shown, rest = list(problems[:SHOWN_PROBLEMS]), len(problems) - SHOWN_PROBLEMS
    more = [f"... and {rest} more bad rows in {config.path}"] if rest > 0 else []
    if not n_good:
        raise UserError([*shown, *more, f"dataset.path={config.path} holds no usable row"])
    if config.on_bad_row is OnBadRow.error:
        advice = f"{len(problems)} bad rows: mend them, or leave them out with dataset.on_bad_row=skip"
        raise UserError([*shown, *more, advice])


def check_options(config: DatasetConfig, task: Task) -> None:
    problems = []
    if config.prompt_template.count(PLACEHOLDER) != 1:
        problems.append(f"dataset.prompt_template={config.prompt_template!r} must hold {PLACEHOLDER} exactly once")
    if task is Task.pairs and config.max_pairs_per_prompt < 1:
        problems.append(f"dataset.max_pairs_per_prompt={config.max_pairs_per_prompt} must be positive")
    if task is Task.ranked and config.max_responses < 2:
        problems.append(f"dataset.max_responses={config.max_responses} must be at least 2")
    if not 0.0 <= config.label_noise <= 1.0:
        problems.append(f"dataset.label_noise={config.label_noise} must be within 0 and 1")
    if config.label_noise and task is not Task.pairs:
        problems.append(f"dataset.label_noise={config.label_noise} is for pairs, there is nothing to swap here")
    if not 0.0 <= config.eval_fraction < 1.0:
        problems.append(f"dataset.eval_fraction={config.eval_fraction} must be at least 0 and below 1")
    if config.eval_fraction and config.eval_path:
        problems.append("dataset.eval_fraction and dataset.eval_path are both set; held-out rows are from one of them")
    for name in ("max_prompt_len", "max_seqlen"):
        if (value := vars(config)[name]) < 1:
            problems.append(f"dataset.{name}={value} must be positive")
    if problems:
        raise UserError(problems)


def prompt_row(raw: dict, line: int, template: str) -> dict:
    others = {key: value for key, value in raw.items() if key != "messages"}
    return {**others, "prompt": prompt_of(raw, template, "prompt", "messages")}


def answer_row(raw: dict, line: int, template: str) -> dict:
    """Return a row of the data set, or one of generations/: a ``response`` and the ``fields`` of the data set's row."""
    asked = raw["fields"] if isinstance(raw.get("fields"), dict) else raw
    key = "response" if "fields" in raw else "answer"
    others = {name: value for name, value in {**asked, **raw}.items() if name not in ("fields", "messages", "response")}
    if key not in raw:
        raise missing(raw, key)
    answer = check_text(f"'{key}'", raw[key], may_be_empty=True)
    return {**others, "prompt": prompt_of(asked, template, "prompt", "messages"), "answer": answer}


def math_row(raw: dict, line: int, template: str) -> dict:
    prompt = prompt_of(raw, template, "prompt", "question", "messages")
    others = {key: value for key, value in raw.items() if key not in ("question", "messages")}
    if "solutions" in raw:
        solutions = texts(raw, "solutions")
    elif "answer" in raw:
        solutions = [text(raw, "answer")]
        del others["answer"]
    else:
        raise missing(raw, "solutions")
    return {**others, "query_id": str(raw.get("query_id", line)), "prompt": prompt, "solutions": solutions}


def code_row(raw: dict, line: int, template: str) -> dict:
    prompt = prompt_of(raw, template, "prompt", "question", "messages")
    others = {key: value for key, value in raw.items() if key not in ("question", "messages")}
    row = {**others, "query_id": str(raw.get("query_id", raw.get("task_id", line))), "prompt": prompt}
    if "input_output" in raw:
        return {**row, "input_output": input_output(raw["input_output"])}
    if "test" not in raw:
        raise missing(raw, "input_output")
    stub, test, name = (text(raw, key) for key in ("prompt", "test", "entry_point"))
    for key, source, function in (("prompt", stub, name), ("test", test, "check")):
        if not re.search(rf"^def {re.escape(function)}\b", source, re.MULTILINE):
            raise BadRow(f"{key!r} does not define a function {function!r}, as one with 'test' and 'entry_point' must")
    return {**row, "stub": stub}


def input_output(value: object) -> str:
    """Return the tests of a program as JSON text, found to be usable."""
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadRow(f"'input_output' is not JSON: {error}") from None
    if not isinstance(tests, dict):
        raise BadRow(f"'input_output' is {kind_of(tests)}, it must be an object with 'inputs' and 'outputs'")
    for key in ("inputs", "outputs"):
        if not isinstance(tests.get(key), list):
            raise BadRow(f"{key!r} of 'input_output' is {kind_of(tests.get(key))}, it must be a list of texts")
        for i, part in enumerate(tests[key]):
            check_text(f"{key!r}[{i}] of 'input_output'", part, may_be_empty=True)
    inputs, outputs = tests["inputs"], tests["outputs"]
    if len(inputs) != len(outputs) or not inputs:
        raise BadRow(f"{len(inputs)} 'inputs' and {len(outputs)} 'outputs' in 'input_output': they must be one to one")
    if (name := tests.get("fn_name")) is None:
        return json.dumps({"inputs": inputs, "outputs": outputs})
    if not isinstance(name, str) or not name.isidentifier():
        raise BadRow(f"'fn_name' of 'input_output' is {kind_of(name)}, it must be the name of a function")
    for i, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        check_json(f"'outputs'[{i}]", wanted)
        for argument in filter(str.strip, given.splitlines()):
            check_json(f"'inputs'[{i}]", argument)
    return json.dumps({"inputs": inputs, "outputs": outputs, "fn_name": name})


def check_json(name: str, value: str) -> None:
    try:
        json.loads(value)
    except ValueError:
        raise BadRow(f"{name} holds {value!r:.40}, with 'fn_name' every argument and result is JSON") from None


def sft_row(raw: dict, line: int, template: str) -> dict:
    prompt = prompt_of(raw, template, "prompt", "question", "messages")
    if "prompt" in raw:
        return {"prompt": prompt, "answer": text(raw, "answer")}
    if "question" in raw:
        return {"prompt": prompt, "answer": CALCULATOR_SPAN.sub("", text(raw, "answer"))}
    last = raw["messages"][-1]
    if last["role"] != "assistant" or not last["content"]:
        raise BadRow("'messages' must end with what the assistant says")
    return {"prompt": prompt, "answer": last["content"]}


def pairs_row(raw: dict, line: int, template: str) -> dict:
    prompt = prompt_of(raw, template, "prompt", "question", "messages")
    if "pos_answers" in raw or "neg_answers" in raw:
        chosen, rejected = texts(raw, "pos_answers"), texts(raw, "neg_answers")
        if len(chosen) != len(rejected):
            raise BadRow(f"{len(chosen)} 'pos_answers' and {len(rejected)} 'neg_answers': they must be one to one")
    elif "chosen" in raw or "rejected" in raw:
        chosen, rejected = [text(raw, "chosen")], [text(raw, "rejected")]
    else:
        raise missing(raw, "pos_answers")
    return {"prompt": prompt, "pos_answers": chosen, "neg_answers": rejected}


def ranked_row(raw: dict, line: int, template: str) -> dict:
    prompt = prompt_of(raw, template, "prompt", "question", "messages")
    if "answers" not in raw and "chosen" in raw:
        return {"prompt": prompt, "answers": [text(raw, "chosen"), text(raw, "rejected")]}
    if len(answers := texts(raw, "answers")) < 2:
        raise BadRow("'answers' holds one answer, there is nothing to compare it with")
    return {"prompt": prompt, "answers": answers}


def outcome_row(raw: dict, line: int, template: str) -> dict:
    if "label" not in raw:
        raise missing(raw, "label")
    prompt = prompt_of(raw, template, "prompt", "question", "messages")
    return {"prompt": prompt, "answer": text(raw, "answer"), "label": share("'label'", raw["label"])}


def process_row(raw: dict, line: int, template: str) -> dict:
    """Steps make up the answer as they stand; one that does not begin with white space begins a line."""
    prompt = prompt_of(raw, template, "prompt", "question", "messages")
    steps = [step.rstrip() for step in texts(raw, "steps")]
    if "" in steps:
        raise BadRow(f"'steps'[{steps.index('')}] is nothing but white space")
    steps[1:] = [step if step[0].isspace() else f"\n{step}" for step in steps[1:]]
    labels = raw.get("labels")
    if not isinstance(labels, list):
        raise missing(raw, "labels") if labels is None else BadRow(f"'labels' is {kind_of(labels)}, it must be a list")
    if len(steps) != len(labels):
        raise BadRow(f"{len(steps)} 'steps' and {len(labels)} 'labels': they must be one to one")
    return {"prompt": prompt, "steps": steps, "labels": [share(f"'labels'[{i}]", x) for i, x in enumerate(labels)]}


NORMALISE: dict[Task, Callable[[dict, int, str], dict]] = {
    Task.prompt: prompt_row,
    Task.answer: answer_row,
    Task.math: math_row,
    Task.code: code_row,
    Task.sft: sft_row,
    Task.pairs: pairs_row,
    Task.ranked: ranked_row,
    Task.outcome: outcome_row,
    Task.process: process_row,
}


def prompt_of(raw: dict, template: str, *keys: str) -> Prompt:
    """Return the prompt under the first of ``keys`` that the row has, with the template around its last words."""
    key = next((key for key in keys if key in raw), None)
    if key is None:
        raise missing(raw, keys[0])
    if not isinstance(raw[key], list):
        return template.replace(PLACEHOLDER, text(raw, key))
    messages = chat(raw, key)
    if key == "messages" and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # an answer, which is not part of the prompt
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRow(f"{key!r} must hold something for the assistant to answer")
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
    if key not in raw:
        raise missing(raw, key)
    return check_text(repr(key), raw[key])


def texts(raw: dict, key: str) -> list[str]:
    if key not in raw:
        raise missing(raw, key)
    values = raw[key]
    if not isinstance(values, list) or not values:
        raise BadRow(f"{key!r} is {kind_of(values)}, it must be a list of texts")
    return [check_text(f"{key!r}[{i}]", value) for i, value in enumerate(values)]


def share(name: str, value: object) -> float:
    """Return a label: a number within [0, 1], or a truth value."""
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise BadRow(f"{name} is {kind_of(value)}, it must be within 0 and 1")
    return float(value)


def check_text(name: str, value: object, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {kind_of(value)}, it must be text")
    if not value and not may_be_empty:
        raise BadRow(f"{name} is empty")
    if SURROGATE.search(value):
        raise BadRow(f"{name} holds half of a surrogate pair, which is no text")
    return value


def missing(raw: dict, key: str) -> BadRow:
    return BadRow(f"{key!r} is missing (keys: {', '.join(map(str, raw)) or 'none'})")


def kind_of(value: object) -> str:
    """Return what a JSON value is, in words."""
    match value:
        case None:
            return "null"
        case []:
            return "an empty list"
        case list():
            return "a list"
        case dict():
            return "an object"
        case str():
            return "a text"
        case _:
            return f"{value!r:.40}"
