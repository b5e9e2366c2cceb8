"""Parsers of the tool calls in a reply, by the format of the model. Imports no torch.

A parser takes the text of a reply and returns its calls in order, and none for a reply without calls. A malformed call
has ``error``, a sentence for the model. No text raises, the time is linear in its length, and nothing is evaluated.
Special tokens may be missing: a decoded reply does not have them. Calls within ``<think>`` do not count.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from realhf.environments.types import ToolCall

MAX_DEPTH = 50
"""Levels of nested lists and objects in the arguments of a call."""
JSON_TOKEN = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
SPACE = re.compile(r"\s*")
HERMES_TAG = re.compile(r"</?tool_call>")
LLAMA_MARK, MISTRAL_MARK = "<|python_tag|>", "[TOOL_CALLS]"
ANY_OBJECT = re.compile(r"\{")
LLAMA_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"')
LLAMA_START = re.compile(r'\{\s*"(?:name|type|parameters|arguments)"\s*:')
MISTRAL_NAME = re.compile(r"([\w.:/-]{1,128})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s*(?=\{)")
MISTRAL_BARE = re.compile(r'\s*(?:\[\s*\{\s*"|[\w.:/-]{1,128}(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s*\{\s*["}])')
MISTRAL_LIST = re.compile(r'\[\s*\{\s*"(?:name|arguments)"\s*:')
XML_TAG = re.compile(r"<(function|parameter)=([^<>\n]*)>|</(function|parameter)>")
PYTHON_MARKS = ("<|python_start|>", "<|python_end|>")
PYTHON_START = re.compile(r"^[ \t]*\[\s*[^\W\d][\w.]*\(", re.MULTILINE)
PYTHON_TOKEN = re.compile(
    r"""(?P<string>[rRuU]?(?:'''(?:[^\\']|\\.|'(?!''))*'''|\"\"\"(?:[^\\"]|\\.|"(?!""))*\"\"\"
       |'(?!'')[^'\\\n]*(?:\\.[^'\\\n]*)*'|"(?!"")[^"\\\n]*(?:\\.[^"\\\n]*)*"))
      |(?P<number>0[xXoObB][\da-fA-F_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?)
      |(?P<name>[^\W\d][\w.]*)|(?P<sign>[()\[\]{},:=+-])|(?P<other>\S)""",
    re.DOTALL | re.VERBOSE,
)
CONSTANTS: dict[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class MalformedCall(ValueError):
    """A tool call that cannot be parsed; the message is for the model."""


def answer_part(text: str) -> str:
    """Return what follows the model's thoughts, empty if they do not end."""
    thoughts, end, answer = text.partition("</think>")
    if thoughts.lstrip().startswith("<think>"):
        return answer
    return answer if end and "<think>" not in thoughts else text


def parse_hermes(text: str) -> list[ToolCall]:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Qwen2.5 and Qwen3."""
    text, calls, position = answer_part(text), list[ToolCall](), 0
    tags = list(HERMES_TAG.finditer(text))
    may_contain_tags = True  # until it fails once, so that the time stays linear
    for number, tag in enumerate(tags):
        if tag.start() < position or tag.group() != "<tool_call>":
            continue
        is_last = number + 1 == len(tags)
        end = len(text) if is_last else tags[number + 1].start()
        call = _json_call(text[tag.end() : end])
        if call.error and may_contain_tags and not is_last:
            start = _after_space(text, tag.end())
            value_end = _json_end(text, start, len(text)) or len(text) + 1
            if value_end > end:
                longer = _json_call(text[start:value_end])
                may_contain_tags = not longer.error
                call, end = (call, end) if longer.error else (longer, value_end)
        calls.append(call)
        position = end
    return calls


def parse_llama3(text: str) -> list[ToolCall]:
    """Parse ``{"name": ..., "parameters": {...}}``, several separated by ``;``, after ``<|python_tag|>`` or not."""
    text, calls = answer_part(text), list[ToolCall]()
    start = text.find(LLAMA_MARK)
    position = start + len(LLAMA_MARK) if start >= 0 else 0
    is_marked = start >= 0  # its first object is a call in any case
    if is_marked and "{" not in text[position:]:
        return [ToolCall("", {}, 'The tool call must be JSON such as {"name": "...", "parameters": {...}}.')]
    while found := (ANY_OBJECT if is_marked else LLAMA_START).search(text, position):
        end = _json_end(text, found.start(), len(text))
        position = len(text) if end is None else end
        call = _json_call(text[found.start() : position])
        if is_marked or call.error or call.arguments or LLAMA_ARGUMENTS.search(text, found.start(), position):
            calls.append(call)
        is_marked = False
    return calls


def parse_mistral(text: str) -> list[ToolCall]:
    """Parse ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`` and ``[TOOL_CALLS]name[ARGS]{...}``."""
    text, calls = answer_part(text), list[ToolCall]()
    starts = [found.start() for found in (MISTRAL_BARE.match(text), MISTRAL_LIST.search(text)) if found]
    starts += [mark] if (mark := text.find(MISTRAL_MARK)) >= 0 else []
    position = min(starts, default=-1)
    may_contain_marks = True  # until it fails once, so that the time stays linear
    while position >= 0:
        position += len(MISTRAL_MARK) if text.startswith(MISTRAL_MARK, position) else 0
        position = _after_space(text, position)
        name = MISTRAL_NAME.match(text, position)
        start = name.end() if name else position
        end = _json_end(text, start, len(text)) if may_contain_marks else None
        if end is None:
            may_contain_marks = False
            mark = text.find(MISTRAL_MARK, start)
            end = mark if mark >= 0 else len(text)
        calls += [_arguments_call(name[1], text[start:end])] if name else _json_calls(text[start:end])
        following = _after_space(text, end)
        is_call = text.startswith(MISTRAL_MARK, following) or (name and MISTRAL_BARE.match(text, following))
        position = following if is_call else text.find(MISTRAL_MARK, following)
    return calls


def parse_qwen3_coder(text: str) -> list[ToolCall]:
    """Parse ``<function=name><parameter=p>value</parameter></function>``; all values are texts."""
    text, calls = answer_part(text), list[ToolCall]()
    name, parameter, start = "", "", 0
    arguments: dict[str, Any] | None = None
    in_parameter, error = False, ""
    for tag in XML_TAG.finditer(text):
        opens, label, closes = tag.groups()
        if in_parameter:  # other tags are part of the value
            if closes == "parameter":
                assert arguments is not None
                error = error or (f"The parameter {parameter!r} is given twice." if parameter in arguments else "")
                arguments[parameter] = _without_newlines(text[start : tag.start()])
                in_parameter = False
        elif opens == "function":
            if arguments is not None:
                calls.append(ToolCall(name, {}, "The tool call is incomplete: </function> is missing."))
            name, arguments, error = label.strip(), {}, "" if label.strip() else "The tool call has no name."
        elif arguments is not None and opens == "parameter":
            in_parameter, parameter, start = True, label.strip(), tag.end()
            error = error or ("" if parameter else "A parameter has no name.")
        elif arguments is not None and closes == "function":
            calls.append(ToolCall(name, {} if error else arguments, error))
            arguments = None
    if arguments is not None:
        missing = "</parameter>" if in_parameter else "</function>"
        calls.append(ToolCall(name, {}, f"The tool call is incomplete: {missing} is missing."))
    return calls


def parse_pythonic(text: str) -> list[ToolCall]:
    """Parse ``[name(a=1, b="x"), ...]``, the format of Llama 4; arguments are literals and have names."""
    text = answer_part(text)
    before, mark, after = text.partition(PYTHON_MARKS[0])
    if bare := PYTHON_START.search(before):  # a mark after it is in an argument
        start = bare.start()
    elif mark:
        text = after.rpartition(PYTHON_MARKS[1])[0] or after
        start = _after_space(text, 0)
    else:
        return []
    calls, parser = list[ToolCall](), _Literals(text, start)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            parser.take("[")
            while not parser.accept("]"):
                calls.append(parser.call())
                if not parser.text:  # all calls are complete
                    break
                if parser.text != "]":
                    parser.take(",")
    except MalformedCall as problem:
        calls.append(ToolCall(parser.function, {}, f"The tool call is not valid: {problem}."))
    return calls


TOOL_CALL_PARSERS: dict[str, Callable[[str], list[ToolCall]]] = {
    "hermes": parse_hermes,
    "llama3": parse_llama3,
    "mistral": parse_mistral,
    "qwen3_coder": parse_qwen3_coder,
    "pythonic": parse_pythonic,
}


def _after_space(text: str, position: int) -> int:
    found = SPACE.match(text, position)
    return found.end() if found else position


def _json_end(text: str, start: int, stop: int) -> int | None:
    """Return the end of the object or list that starts at ``start``, or None if it does not end."""
    depth, in_text = 0, False
    if text[start : start + 1] not in ("{", "["):
        return None
    for token in JSON_TOKEN.finditer(text, start, stop):
        match token.group():
            case '"':
                in_text = not in_text
            case "{" | "[" if not in_text:
                depth += 1
            case "}" | "]" if not in_text:
                depth -= 1
                if depth == 0:
                    return token.end()
    return None


def _load_json(text: str) -> Any:
    """Return a JSON value; MalformedCall for an invalid one, or one that is nested too deeply."""
    depth, in_text = 0, False
    for token in JSON_TOKEN.finditer(text):
        match token.group():
            case '"':
                in_text = not in_text
            case "{" | "[" if not in_text:
                depth += 1
                if depth > MAX_DEPTH:
                    raise MalformedCall(f"The tool call has more than {MAX_DEPTH} nested levels.")
            case "}" | "]" if not in_text:
                depth -= 1
    try:
        return json.loads(text, parse_constant=_not_json, strict=False)
    except json.JSONDecodeError as error:
        raise MalformedCall(f"The tool call is not valid JSON: {error.msg} at character {error.pos}.") from None
    except ValueError as error:  # an integer with too many digits
        raise MalformedCall(f"The tool call is not valid JSON: {error}.") from None


def _not_json(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON value")


def _json_call(text: str) -> ToolCall:
    """Return the call of a JSON object."""
    try:
        return _call_of(_load_json(text))
    except MalformedCall as problem:
        return ToolCall("", {}, str(problem))


def _json_calls(text: str) -> list[ToolCall]:
    """Return the calls of a JSON list of objects."""
    try:
        values = _load_json(text)
    except MalformedCall as problem:
        return [ToolCall("", {}, str(problem))]
    return [_call_of(value) for value in values] if isinstance(values, list) else [_call_of(values)]


def _arguments_call(name: str, text: str) -> ToolCall:
    try:
        return _call_of({"name": name, "arguments": _load_json(text)})
    except MalformedCall as problem:
        return ToolCall(name, {}, str(problem))


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall("", {}, 'The tool call must be a JSON object with "name" and "arguments".')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ToolCall("", {}, 'The tool call has no "name".')
    arguments = value.get("arguments", value.get("parameters"))
    try:
        if isinstance(arguments, str):  # some models encode them twice
            arguments = _load_json(arguments)
    except MalformedCall as problem:
        return ToolCall(name, {}, str(problem))
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"The arguments of {name} must be a JSON object.")
    return ToolCall(name, arguments)


def _without_newlines(value: str) -> str:
    """Return the value of a parameter without the newlines next to its tags."""
    return value.removeprefix("\n").removesuffix("\n")


class _Literals:
    """Recursive descent over the tokens of a list of Python calls, up to ``MAX_DEPTH`` levels."""

    def __init__(self, text: str, start: int) -> None:
        self._tokens = PYTHON_TOKEN.finditer(text, start)
        self.kind, self.text, self.function = "", "", ""
        self.next()

    def next(self) -> str:
        """Return the current token and go to the next one; an empty text is the end."""
        text, token = self.text, next(self._tokens, None)
        self.kind, self.text = (token.lastgroup or "", token.group()) if token else ("", "")
        return text

    def accept(self, sign: str) -> bool:
        is_next = self.kind == "sign" and self.text == sign
        if is_next:
            self.next()
        return is_next

    def take(self, sign: str) -> None:
        if not self.accept(sign):
            raise MalformedCall(f"'{sign}' is expected instead of {self._found}")

    @property
    def _found(self) -> str:
        return f"{self.text:.40}" if self.text else "its end"

    def name(self, what: str) -> str:
        if self.kind != "name":
            raise MalformedCall(f"{what} is expected instead of {self._found}")
        return self.next()

    def call(self) -> ToolCall:
        self.function = ""
        self.function = self.name("the name of a tool")
        self.take("(")
        arguments: dict[str, Any] = {}
        while not self.accept(")"):
            name = self.name("an argument such as name=value")
            self.take("=")
            if name in arguments:
                raise MalformedCall(f"the argument {name} is given twice")
            arguments[name] = self.value(1)
            if self.text != ")":
                self.take(",")
        name, self.function = self.function, ""
        return ToolCall(name, arguments)

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MalformedCall(f"it has more than {MAX_DEPTH} nested levels")
        if self.kind == "string":
            parts = list[str]()
            while self.kind == "string":
                parts.append(self._leaf())
            return "".join(parts)
        if self.accept("-"):
            return -self._number()
        if self.kind == "number" or self.accept("+"):
            return self._number()
        if self.kind == "name" and self.text in CONSTANTS:
            return CONSTANTS[self.next()]
        if self.accept("["):
            return self._items("]", depth)[0]
        if self.accept("("):
            items, has_comma = self._items(")", depth)
            return items[0] if len(items) == 1 and not has_comma else items
        if self.accept("{"):
            return self._object(depth)
        raise MalformedCall(f"a literal value is expected instead of {self._found}")

    def _number(self) -> Any:
        if self.kind != "number":
            raise MalformedCall(f"a number is expected instead of {self._found}")
        return self._leaf()

    def _leaf(self) -> Any:
        try:
            return ast.literal_eval(self.text)
        except (SyntaxError, ValueError) as error:
            raise MalformedCall(f"{self.text:.40} is not a valid literal ({error!s:.80})") from None
        finally:
            self.next()

    def _items(self, closing: str, depth: int) -> tuple[list[Any], bool]:
        """Return the values up to a bracket, and whether one of them is followed by a comma."""
        values, has_comma = list[Any](), False
        while not self.accept(closing):
            values.append(self.value(depth + 1))
            if self.text != closing:
                self.take(",")
                has_comma = True
        return values, has_comma

    def _object(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self.accept("}"):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise MalformedCall(f"the key {key!r:.40} is not a text")
            self.take(":")
            values[key] = self.value(depth + 1)
            if self.text != "}":
                self.take(",")
        return values
