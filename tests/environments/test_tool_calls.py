"""Tool calls of every format: parsed back, with text around, malformed, cut, and hostile."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from realhf.environments import ToolCall
from realhf.environments.tool_calls import MAX_DEPTH, TOOL_CALL_PARSERS

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True).filter(lambda name: name not in PYTHON_WORDS)
PYTHON_WORDS = ("true", "false", "null")
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30) | st.sampled_from(
    ['"', "'", "\\", "{", "}]", "; {", "\n", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "'''", "<think>"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=4)
XML_TEXTS = TEXTS.filter(lambda text: "</parameter>" not in text)
XML_CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, XML_TEXTS, max_size=3)), min_size=1, max_size=4)
PROSE = st.text(st.characters(categories=("L", "N", "Zs"), include_characters=",.\n"), max_size=40)


def hermes(calls: list[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{as_json(call, 'arguments')}\n</tool_call>" for call in calls)


def llama3(calls: list[ToolCall]) -> str:
    return "; ".join(as_json(call, "parameters") for call in calls)


def mistral(calls: list[ToolCall]) -> str:
    return f"[TOOL_CALLS] [{', '.join(as_json(call, 'arguments') for call in calls)}]"


def new_mistral(calls: list[ToolCall]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(call.arguments)}" for call in calls)


def qwen3_coder(calls: list[ToolCall]) -> str:
    parts = []
    for call in calls:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items())
        parts.append(f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>")
    return "\n".join(parts)


def pythonic(calls: list[ToolCall]) -> str:
    each = (f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls)
    return f"[{', '.join(each)}]"


def as_json(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: call.arguments})


Writer = Callable[[list[ToolCall]], str]
WRITERS: list[tuple[str, Writer]] = [
    ("hermes", hermes),
    ("llama3", llama3),
    ("llama3", lambda calls: f"<|python_tag|>{llama3(calls)}"),
    ("mistral", mistral),
    ("mistral", new_mistral),
    ("mistral", lambda calls: mistral(calls).replace("[TOOL_CALLS] ", "", 1)),
    ("pythonic", pythonic),
    ("pythonic", lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>"),
]


@pytest.mark.parametrize(("format", "write"), WRITERS)
@given(calls=CALLS, before=PROSE, after=PROSE)
@example(calls=[ToolCall("_", {"_": "<|python_start|>"})], before="", after="")
@example(calls=[ToolCall("_", {"_": "<|python_end|>"})], before="", after="")
def test_calls_are_parsed_back_whatever_is_around(
    format: str, write: Writer, calls: list[ToolCall], before: str, after: str
) -> None:
    text = write(calls)
    parse = TOOL_CALL_PARSERS[format]
    assert parse(text) == calls
    assert parse(f"{before}\n{text}\n{after}") == calls
    assert parse(f"<think>\n{text}</think>\n") == [] or "</think>" in text


@given(calls=XML_CALLS, before=PROSE, after=PROSE)
def test_xml_calls_are_parsed_back_as_texts(calls: list[ToolCall], before: str, after: str) -> None:
    text = qwen3_coder(calls)
    assert TOOL_CALL_PARSERS["qwen3_coder"](f"{before}{text}{after}") == calls


@given(text=PROSE)
def test_prose_has_no_calls(text: str) -> None:
    assert [parse(text) for parse in TOOL_CALL_PARSERS.values()] == [[]] * len(TOOL_CALL_PARSERS)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("llama3", '{"answer": 4}'),
        ("llama3", 'The person is {"name": "Ada", "age": 36}.'),
        ("mistral", "The set [1, 2] and f{x}"),
        ("pythonic", "The value f(x) is in [0, 1], see [f(x)]."),
        ("hermes", "</tool_call>"),
        ("qwen3_coder", "</function> <parameter=a>1</parameter>"),
    ],
)
def test_answers_that_resemble_calls_are_none(format: str, text: str) -> None:
    assert TOOL_CALL_PARSERS[format](text) == []


F = ToolCall("f", {"a": 1})
SPECIAL = [
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "g"}', [F, ToolCall("g", {})]),
    ("hermes", 'thoughts</think><tool_call>{"name": "g"}</tool_call>', [ToolCall("g", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', [ToolCall("f", {"a": "1\n2"})]),
    ("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [F]),
    ("mistral", 'f[ARGS]{"a": 1}', [F]),
    ("mistral", 'f{"a": 1}f{"a": 1}', [F, F]),
    ("mistral", 'text[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', [F]),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>", [ToolCall("f", {"a": "1"})]),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n</function>\n</parameter>\n</function>",
     [ToolCall("f", {"a": "</function>"})]),
    ("pythonic", "[f(a=1,), x.g(b=(1,), c=(2), d=-0x1F, e='x' \"y\")]",
     [F, ToolCall("x.g", {"b": [1], "c": 2, "d": -31, "e": "xy"})]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "calls"), SPECIAL)
def test_variants_of_models(format: str, text: str, calls: list[ToolCall]) -> None:
    assert TOOL_CALL_PARSERS[format](text) == calls


DEEP = MAX_DEPTH + 10
MALFORMED = [
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "", "not valid JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", 'no "name"'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "must be a JSON object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", "NaN is not a JSON value"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "", "not valid JSON"),
    ("hermes", "<tool_call>[1]</tool_call>", "", "must be a JSON object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * DEEP + "]" * DEEP + "}}</tool_call>", "",
     "nested levels"),
    ("llama3", '{"name": "f", "parameters": {"a": 1}', "", "not valid JSON"),
    ("llama3", "<|python_tag|>print(1)", "", "must be JSON"),
    ("llama3", '<|python_tag|>{"a": 1}', "", 'no "name"'),
    ("mistral", '[TOOL_CALLS] [{"name": "f"', "", "not valid JSON"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{a}", "f", "not valid JSON"),
    ("mistral", "[TOOL_CALLS]f", "", "not valid JSON"),
    ("qwen3_coder", "<function=f><parameter=a>1", "f", "</parameter> is missing"),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter>", "f", "</function> is missing"),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "f", "given twice"),
    ("qwen3_coder", "<function=></function>", "", "no name"),
    ("pythonic", "[f(1)]", "f", "name=value"),
    ("pythonic", "[f(a=g())]", "f", "literal value"),
    ("pythonic", "[f(a=1+1)]", "f", "',' is expected instead of +"),
    ("pythonic", "[f(a=1, a=2)]", "f", "given twice"),
    ("pythonic", "[f(a='x]", "f", "literal value"),
    ("pythonic", "[f(a=- - 1)]", "f", "a number is expected"),
    ("pythonic", "[f(a={1: 2})]", "f", "is not a text"),
    ("pythonic", "[f(a=007)]", "f", "not a valid literal"),
    ("pythonic", "[f(a=" + "9" * 5000 + ")]", "f", "not a valid literal"),
    ("pythonic", "[f(a=" + "[" * DEEP + "]" * DEEP + ")]", "f", "nested levels"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "name", "problem"), MALFORMED)
def test_a_malformed_call_has_an_error(format: str, text: str, name: str, problem: str) -> None:
    (call,) = TOOL_CALL_PARSERS[format](text)
    assert call.name == name and call.arguments == {} and problem in call.error and call.error.endswith(".")


@pytest.mark.parametrize("format", ["hermes", "mistral", "qwen3_coder"])
def test_calls_after_a_malformed_one_are_parsed(format: str) -> None:
    bad = {
        "hermes": '<tool_call>{"name": "g", "arguments": {"a": 1}</tool_call>',
        "mistral": '[TOOL_CALLS]g[ARGS]{"a": ',
        "qwen3_coder": "<function=g>",
    }
    write = {"hermes": hermes, "mistral": new_mistral, "qwen3_coder": qwen3_coder}[format]
    good = ToolCall("f", {"a": "1"})
    first, second = TOOL_CALL_PARSERS[format](bad[format] + write([good]))
    assert first.error and second == good


@pytest.mark.parametrize(("format", "write"), [*WRITERS, ("qwen3_coder", qwen3_coder)])
@given(data=st.data(), calls=XML_CALLS)
def test_a_cut_reply_has_the_calls_before_the_cut(
    format: str, write: Writer, data: st.DataObject, calls: list[ToolCall]
) -> None:
    text = write(calls)
    assume(not any("[TOOL_CALLS]" in str(call) for call in calls))  # a mark in a text that is cut begins another call
    cut = TOOL_CALL_PARSERS[format](text[: data.draw(st.integers(0, len(text)))])
    good = [call for call in cut if not call.error]
    assert good == calls[: len(good)] and len(cut) <= len(calls)
    assert [call.error != "" for call in cut] == [False] * len(good) + [True] * (len(cut) - len(good))


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        '{"name": "f"',
        '"arguments":',
        "[TOOL_CALLS]",
    ),
    *(
        "[ARGS]",
        "f",
        "(",
        ")",
        "=",
        "-",
        ",",
        ":",
        "1",
        ";",
        "<|python_tag|>",
        "<function=f>",
        "</function>",
        " ",
        "\n",
    ),
    *("<parameter=a>", "</parameter>", "'''", "<think>", "</think>", "<|python_start|>", "\ud800", "\0", "é"),
]


@pytest.mark.parametrize("format", TOOL_CALL_PARSERS)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30), text=st.text())
def test_garbage_never_raises(format: str, pieces: list[str], text: str) -> None:
    for one in ("".join(pieces), text):
        for call in TOOL_CALL_PARSERS[format](one):
            assert is_valid(call)


def is_valid(call: ToolCall) -> bool:
    json.dumps(call.arguments)
    return isinstance(call.name, str) and (bool(call.name) or bool(call.error)) and not (call.error and call.arguments)


HOSTILE = {  # the start, and what is repeated
    "hermes": [("", "<tool_call>"), ("", "<tool_call>{"), ("<tool_call>", '{"a":'), ('<tool_call>{"', "</tool_call>"),
               ("<tool_call>", "["), ('<tool_call>{"', '\\"'), ("", "<tool_call>{}}</tool_call>")],
    "llama3": [("<|python_tag|>", "{"), ("", '{"name":'), ('{"name": "', '{"name":'), ("", '{"name": "f"}'),
               ("", '{"name": {}'), ("", "{ "), ("<|python_tag|>", '"\\"')],
    "mistral": [("", "[TOOL_CALLS]"), ("", "[TOOL_CALLS]x{"), ("", "[TOOL_CALLS]["), ("", "a{}"), ("", 'a{"'),
                ("", '[{"name":'), ("", "[ "), ("[TOOL_CALLS]", "a"), ("[TOOL_CALLS]", "[CALL_ID]a")],
    "qwen3_coder": [("", "<function=f>"), ("", "<function="), ("<function=f>", "<parameter=a>"), ("<function=f>", "<"),
                    ("<function=f><parameter=a>", "</function>"), ("<function=f>", "<parameter=a></parameter>")],
    "pythonic": [("[f(a=", "-"), ("[f(a=", "["), ("[f(a=", "'"), ("[f(a='", "\\'"), ("", "[f("), ("", "\n[f("),
                 ("[f(a=", "9"), ("[f(a=", "'''"), ("[f(a='''", "x"), ("[", "a."), ("", "[ "), ("[f(a=", "''"),
                 ("[f(a='", "x"), ("[f(a=1),", "f(a=1),")],
}  # fmt: skip


@pytest.mark.parametrize("format", TOOL_CALL_PARSERS)
@pytest.mark.timeout(300)
def test_a_long_reply_of_anything_is_parsed(format: str) -> None:
    """A time that grows with the square of the length would be an hour."""
    for start, piece in [*HOSTILE[format], ("", "\n"), ("", "<think>"), ("", "</think>"), ("", "\\")]:
        calls: list[Any] = TOOL_CALL_PARSERS[format](start + piece * (200_000 // len(piece)))
        assert all(map(is_valid, calls[:100]))
