"""Environments of classes with tools: schemas, arguments, answers, rewards, and episodes in a child process."""

import inspect
import json
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from realhf.environments import Reply, Turn
from realhf.environments.env_process import EnvOptions
from realhf.environments.pool import EnvFailure, EnvPool
from realhf.environments.tool_calls import TOOL_CALL_PARSERS
from realhf.environments.tool_env import AsyncToolEnvironment, ToolEnvironment, as_environment, tools_of
from realhf.environments.tool_schema import InvalidArgument, convert, parse_docstring, schema_of, tool_function
from realhf.environments.types import turn_to_json
from tests.environments.tool_classes import AsyncShop, Colour, Shop

FILE = Path(__file__).with_name("tool_classes.py")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(text: str, tool_format: str = "hermes") -> Reply:
    return Reply(text, [1], TOOL_CALL_PARSERS[tool_format](text))


class Level(Enum):
    LOW = 1
    HIGH = 2


def scalars(a: str, b: int, c: float, d: bool, e: Any) -> str:
    """Do this.

    And that: for
    example.

    Args:
        a: The first
        b: The second
            on two lines
        c: The third: with a colon
        d: The fourth

        e: The fifth

    Returns:
        A text
    """
    return ""


def nothing() -> int:
    """Return one."""
    return 1


def containers(
    a: list[int], b: list, c: dict[str, float], d: dict, e: list[list[str]], f: tuple[int, str], g: list[Literal["x"]]
) -> None:
    """Take containers.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G
    """


def unions(
    a: Optional[int],  # noqa: UP045
    b: int | None = None,
    c: Union[int, str] = 1,  # noqa: UP007
    d: list[int] | dict[str, int] = {},  # noqa: B006
    e: Literal["x", "y"] = "x",
    f: Literal[1, "y", None] | None = None,
    g: Level = Level.LOW,
    h: int | float | None = None,
    i: list[Colour] | None = None,
) -> None:
    """Take unions.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G
        h: H
        i: I
    """


SHOP = Shop()


@pytest.mark.parametrize("function", [scalars, nothing, containers, unions, SHOP.add, SHOP.describe, SHOP.long])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)
    bare = getattr(function, "__func__", function)
    assert tool_function(bare, is_method=inspect.ismethod(function)).schema == theirs


def test_types_in_a_docstring_are_no_part_of_a_description() -> None:
    doc, parameters = parse_docstring("Do.\n\nArgs:\n    a (int, optional): The a\n    b: The b\n        (old): c")
    assert doc == "Do." and parameters == {"a": "The a", "b": "The b (old): c"}


def no_docstring(a: int) -> None: ...


def no_hint(a) -> None:  # type: ignore[no-untyped-def]
    """Do."""


def odd_hint(a: bytes) -> None:
    """Do."""


def many(*a: int) -> None:
    """Do."""


def positional(a: int, /) -> None:
    """Do."""


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "no docstring"),
        (no_hint, "'a' has no type hint"),
        (odd_hint, "parameter 'a': the type <class 'bytes'>"),
        (many, "must have a name"),
        (positional, "must have a name"),
    ],
)
def test_a_function_that_is_no_tool_is_an_error(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        tool_function(function)


CONVERTED = [
    (str, 5, "5"), (int, "5", 5), (int, 5.0, 5), (float, 5, 5.0), (float, "1e3", 1000.0), (bool, "True", True),
    (list[int], "[1, 2]", [1, 2]), (list[int], ["1"], [1]), (dict[str, int], '{"a": 1}', {"a": 1}),
    (int | None, "null", None), (int | None, None, None), (int | str, "5", "5"), (int | str, 5, 5),
    (str | None, "null", "null"), (float | None, "2", 2.0), (tuple[int, str], [1, 2], (1, "2")),
    (Literal[1, 2], "2", 2), (Literal["a", None], None, None), (Colour, "red", Colour.RED), (Colour, "RED", Colour.RED),
    (Level, "2", Level.HIGH), (Any, b"x", b"x"), (dict, {"a": [1]}, {"a": [1]}), (list, (1, 2), [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "value", "result"), CONVERTED)
def test_arguments_are_converted(hint: Any, value: Any, result: Any) -> None:
    found = convert(value, hint, "argument 'a'")
    assert found == result and type(found) is type(result)


REJECTED = [
    (int, "five", "argument 'a' must be an integer, not \"five\""), (int, True, "an integer, not True"),
    (int, 1.5, "an integer, not 1.5"), (int, "9" * 5000, "an integer"), (float, "nan", "a number"),
    (float, float("inf"), "a number, not inf"), (float, 10**400, "a number"), (bool, 1, "true or false, not 1"),
    (str, [1], "a text, not [1]"), (list[int], [1, "x"], "argument 'a', value 2 must be an integer"),
    (dict[str, int], {"b": "x"}, "argument 'a', key 'b' must be an integer"), (dict, "[1]", "an object"),
    (list, "[" * 100_000, "a list"), (int | None, "x", "must be an integer"), (int | bool, "x", "integer or true or"),
    (Literal["a", "b"], "c", 'must be one of "a", "b", not "c"'), (Literal[1], True, "must be one of 1"),
    (Colour, "green", 'one of "red", "blue"'), (tuple[int, int], [1], "must have 2 values, not 1"),
    (float, True, "a number, not True"), (str, False, "a text, not False"),
    (type(None), 1, "must be null"), (str, None, "a text, not None"),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "value", "problem"), REJECTED)
def test_a_wrong_argument_is_named(hint: Any, value: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        convert(value, hint, "argument 'a'")
    assert problem in str(error.value) and len(str(error.value)) < 200


HINTS = [int, float, bool, str, list[int], dict[str, str], list[list[float]], Literal["a", 3], Colour, list[bool]]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(hint=st.sampled_from(HINTS), value=VALUES | st.sampled_from(["a", 3, "red", [1], {"a": "b"}, [[1.5]], [True]]))
def test_a_value_of_the_schema_is_accepted_unchanged(hint: Any, value: Any) -> None:
    """The judge of the schema is jsonschema, for which 1.0 is an integer."""
    is_valid = jsonschema.Draft202012Validator(schema_of(hint)).is_valid(value)
    try:
        found = convert(value, hint, "a")
    except InvalidArgument:
        assert not is_valid
        return
    if is_valid:
        assert (found.value if isinstance(found, Enum) else found) == value


def environment(**options: Any) -> ToolEnvironment:
    made = ToolEnvironment(Shop(), **options)
    made.reset({"what": "bread"}, 0)
    return made


def test_an_episode_calls_tools_and_ends_with_the_reward() -> None:
    made = ToolEnvironment(Shop(start=100))
    first = made.reset({"what": "bread"}, 0)
    assert first == Turn(messages=[{"role": "user", "content": "Buy bread."}], tools=made.schemas)
    assert [tool["function"]["name"] for tool in made.schemas] == ["add", "describe", "fail", "long", "crash"]
    turn = made.step(said(f"I try. {call('add', price='5', count=2)} and {call('describe', colour='red')}"))
    assert turn == Turn(
        messages=[
            {"role": "tool", "name": "add", "content": "110"},
            {"role": "tool", "name": "describe", "content": '{"colour": "red", "size": null}'},
        ]
    )
    last = made.step(said("Done."))
    assert last == Turn(reward=110.0, done=True, info={"tool_calls": 2.0, "tool_errors": 0.0})
    assert all(turn_to_json(one) for one in (first, turn, last))


ERRORS = {
    call("add"): "Error: add needs the argument 'price'",
    call("add", price="x"): "Error: argument 'price' must be an integer, not \"x\"",
    call("add", prices=1): "Error: add has no argument 'prices'  did you mean price ?; its arguments are: price, count",
    call("ad", price=1): "Error: there is no tool 'ad'  did you mean add ?; the tools are: add, describe, fail, long, ",
    call("_private"): "Error: there is no tool '_private'",
    call("reset", row={}, seed=1): "Error: there is no tool 'reset'",
    call("__init__"): "Error: there is no tool '__init__'",
    call("fail"): "Error: KeyError: 'no such thing'",
    "<tool_call>{": "Error: The tool call is not valid JSON",
}


@pytest.mark.parametrize("text", ERRORS)
def test_a_wrong_call_is_answered(text: str) -> None:
    made = environment()
    (answer,) = made.step(said(text)).messages
    assert answer["role"] == "tool" and answer["content"].startswith(ERRORS[text])
    assert made.step(said("End.")).info == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_fatal_errors_end_the_episode() -> None:
    with pytest.raises(KeyError, match="no such thing"):
        environment(fatal=True).step(said(call("fail")))


def test_answers_and_calls_are_limited() -> None:
    made = environment(max_output=10, max_calls=2)
    (answer,) = made.step(said(call("long", n=25))).messages
    assert answer["content"] == f"{'x' * 10}\n... (10 of 25 characters are shown)"
    answers = made.step(said(call("add", price=1) * 5)).messages
    assert [one["content"] for one in answers[:2]] == ["1", "2"] and "the last 3 calls" in answers[2]["content"]


def test_answers_as_text() -> None:
    made = environment(as_text=True)
    assert made.reset({"what": "tea"}, 0) == Turn(text="Buy tea.")
    assert made.step(said("[add(price=2), add(price=3)]", "pythonic")) == Turn(
        text='\n<tool_response name="add">\n2\n</tool_response>\n\n<tool_response name="add">\n5\n</tool_response>\n'
    )


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [("hermes", call("add", price=7)), ("llama3", '{"name": "add", "parameters": {"price": 7}}'),
     ("pythonic", "[add(price=7)]")],
)  # fmt: skip
def test_the_process_reads_calls_in_its_format(tool_format: str, text: str, pools: list[EnvPool]) -> None:
    """A rollout sends replies without calls: their text is what the model wrote."""
    pools.append(EnvPool(EnvOptions(f"{FILE}:Shop", tool_format=tool_format)))
    pools[-1].reset(0, {"what": "tea"}, 0)
    pools[-1].poll(30.0)
    pools[-1].step(0, Reply(text, [1]))
    (answer,) = pools[-1].poll(30.0)
    assert isinstance(answer.result, Turn) and answer.result.messages[0]["content"] == "7"


class Plain:
    """No method but a tool."""

    @staticmethod
    def one() -> int:
        """Return one."""
        return 1

    def step_size(self) -> None:
        """Return nothing."""


class Child(Plain):
    one = None  # type: ignore[assignment]


def test_optional_methods() -> None:
    assert list(tools_of(Plain)) == ["one", "step_size"] and list(tools_of(Child)) == ["step_size"]
    made = ToolEnvironment(Plain())
    assert made.reset({"prompt": "Hi"}, 0).messages == [{"role": "user", "content": "Hi"}]
    assert made.step(said(call("one") + call("step_size"))).messages[1]["content"] == "null"
    assert made.step(said("End")) == Turn(done=True, info={"tool_calls": 2.0, "tool_errors": 0.0})
    assert made.close() is None and ToolEnvironment(Plain(), as_text=True).reset({"prompt": "Hi"}, 0) == Turn()


def test_classes_become_environments() -> None:
    assert as_environment(ToolEnvironment) is ToolEnvironment and as_environment(environment) is environment
    cls = as_environment(Shop)
    made = cls(start=3, max_output=50)
    assert isinstance(made, ToolEnvironment) and cls.__doc__ == Shop.__doc__ and callable(cls.step)
    made.reset({"what": "x"}, 0)
    assert made.step(said("End")).reward == 3.0
    asynchronous = as_environment(AsyncShop)
    assert issubclass(asynchronous, AsyncToolEnvironment) and inspect.iscoroutinefunction(asynchronous.step)
    with pytest.raises(TypeError, match="has no method 'step', and no public method as a tool"):
        as_environment(type("Empty", (), {}))
    with pytest.raises(TypeError, match="use AsyncToolEnvironment"):
        ToolEnvironment(AsyncShop())


@pytest.fixture
def pools() -> Iterator[list[EnvPool]]:
    made: list[EnvPool] = []
    yield made
    for pool in made:
        pool.close()


def play(pool: EnvPool, rows: list[dict], replies: list[str]) -> list[list[Turn | EnvFailure]]:
    """Play the episodes of all rows at once, each with these replies."""
    results: list[list[Turn | EnvFailure]] = [[] for _ in rows]
    for number, row in enumerate(rows):
        pool.reset(number, row, 0)
    n_open, deadline = len(rows), time.monotonic() + 120
    while n_open:
        assert time.monotonic() < deadline, results
        for answer in pool.poll(5.0):
            turns = results[answer.episode]
            turns.append(answer.result)
            if isinstance(answer.result, EnvFailure) or answer.result.done:
                pool.end(answer.episode)
                n_open -= 1
            else:
                pool.step(answer.episode, said(replies[len(turns) - 1]))
    return results


def test_episodes_in_a_child_process(pools: list[EnvPool]) -> None:
    pools.append(EnvPool(EnvOptions(f"{FILE}:wrapped_shop", {"start": 1}, timeout=60.0, tool_format="llama3")))
    text = '{"name": "add", "parameters": {"price": 4}}'
    results = play(pools[-1], [{"what": f"thing {i}"} for i in range(3)], [text, text, "It is all."])
    for i, turns in enumerate(results):
        first, *answers, last = turns
        assert isinstance(first, Turn) and first.messages[0]["content"] == f"Buy thing {i}."
        assert list(first.tools) == [tool.schema for tool in tools_of(Shop).values()]
        contents = [turn.messages[0]["content"] for turn in answers if isinstance(turn, Turn)]
        assert contents == ["5", "9"] and isinstance(last, Turn) and last.reward == 9.0 and last.done


def test_a_crash_of_a_tool_ends_its_episode(pools: list[EnvPool]) -> None:
    pools.append(EnvPool(EnvOptions(f"{FILE}:wrapped_shop", timeout=60.0)))
    ((first, failure),) = play(pools[-1], [{"what": "x"}], [call("crash")])
    assert isinstance(first, Turn) and isinstance(failure, EnvFailure) and failure.kind == "died"


def test_async_tools_of_many_episodes(pools: list[EnvPool]) -> None:
    pools.append(EnvPool(EnvOptions(f"{FILE}:AsyncShopEnvironment", timeout=60.0)))
    results = play(pools[-1], [{"prompt": "Wait"}] * 20, [call("wait", seconds="0.01"), "12345"])
    for _, answer, last in results:
        assert isinstance(answer, Turn) and answer.messages[0]["content"] == "waited 0.01"
        assert isinstance(last, Turn) and last.reward == 5.0
