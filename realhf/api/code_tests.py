"""Tests of a program, in the format of APPS (arXiv 2105.09938)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from realhf.base.errors import kind_of


@dataclass(frozen=True)
class CodeTests:
    """``inputs[i]`` must give ``outputs[i]``.

    Without ``fn_name``, both are texts of standard streams. With it, a line of an input is the JSON of an argument, and
    an output is the JSON of the result.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fn_name: str = ""

    def to_json(self) -> str:
        name = {"fn_name": self.fn_name} if self.fn_name else {}
        return json.dumps({"inputs": self.inputs, "outputs": self.outputs, **name})


def parse_code_tests(value: object) -> CodeTests:
    """Return the tests in an object or its JSON text; ``ValueError`` for invalid ones, and if there are none."""
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'input_output' is not JSON: {error}") from None
    if not isinstance(tests, Mapping):
        raise ValueError(f"'input_output' is {kind_of(tests)}, it must be an object with 'inputs' and 'outputs'")
    inputs, outputs = _texts(tests, "inputs"), _texts(tests, "outputs")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{len(inputs)} 'inputs' and {len(outputs)} 'outputs' in 'input_output': need as many of both")
    name = tests.get("fn_name") or ""
    if not isinstance(name, str) or (name and not name.isidentifier()):
        raise ValueError(f"'fn_name' of 'input_output' is {kind_of(name)}, it must be the name of a function")
    for i, (arguments, result) in enumerate(zip(inputs, outputs, strict=True) if name else ()):
        _check_json(f"'outputs'[{i}]", result)
        for argument in filter(str.strip, arguments.splitlines()):
            _check_json(f"'inputs'[{i}]", argument)
    return CodeTests(inputs, outputs, name)


def _texts(tests: Mapping[str, object], key: str) -> tuple[str, ...]:
    parts = tests.get(key)
    if not isinstance(parts, list | tuple):
        raise ValueError(f"{key!r} of 'input_output' is {kind_of(parts)}, it must be a list of texts")
    for i, part in enumerate(parts):
        if not isinstance(part, str):
            raise ValueError(f"{key!r}[{i}] of 'input_output' is {kind_of(part)}, it must be text")
    return tuple(parts)


def _check_json(name: str, value: str) -> None:
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is {value!r:.40}; with 'fn_name', arguments and results must be JSON") from None
