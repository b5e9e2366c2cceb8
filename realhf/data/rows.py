"""Reads a data file into rows of one form per task, and says what is wrong with the others. Nothing is tokenised here.

| task | fields of a row |
|---|---|
| prompt | ``prompt``, and whatever else the row holds |
| math | ``query_id``, ``prompt``, ``solutions``, and whatever else the row holds |
| sft | ``prompt``, ``answer`` |
| pairs | ``prompt``, ``pos_answers``, ``neg_answers`` |

A prompt is a text, or a list of chat messages that the tokenizer's chat template will turn into one.
"""

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
class Rows:
    """The usable rows in file order, and a line of text for every other."""

    rows: tuple[Row, ...]
    problems: tuple[str, ...]


class BadRow(ValueError):
    """What is wrong with one row."""


def read_rows(config: DatasetConfig, task: Task) -> Rows:
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
    return Rows(tuple(rows), tuple(problems))


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
    for name in ("max_prompt_len", "max_seqlen"):
        if (value := vars(config)[name]) < 1:
            problems.append(f"dataset.{name}={value} must be positive")
    if problems:
        raise UserError(problems)


def prompt_row(raw: dict, line: int, template: str) -> dict:
    others = {key: value for key, value in raw.items() if key != "messages"}
    return {**others, "prompt": prompt_of(raw, template, "prompt", "messages")}


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


NORMALISE: dict[Task, Callable[[dict, int, str], dict]] = {
    Task.prompt: prompt_row,
    Task.math: math_row,
    Task.sft: sft_row,
    Task.pairs: pairs_row,
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
