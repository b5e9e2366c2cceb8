"""Program that calls functions inside the sandbox; `judge_code` runs the source of this file and exchanges JSON lines.

The first line of input is the request. With ``call``, each further line holds arguments and gets a line with the
result. With ``check``, the harness runs a test, writes the arguments of each call that the test makes, and reads the
result: the tested function runs in another process that has no access to the test. Only plain values are supported.
"""

import json
import numbers
import os
import sys
from collections.abc import Callable
from typing import IO, Any

NAMES = dict(globals())  # in the sandbox these include the imports that are made for programs
COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def main() -> None:
    if sys.version_info >= (3, 11):
        sys.set_int_max_str_digits(0)
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    request = json.loads(requests.readline())
    names = {**NAMES, "__name__": "program"}
    names.pop(request["name"], None)  # the program must define it
    exec(compile(request["source"], "program.py", "exec"), names)
    if request["do"] == "call":
        function = find(names, request["name"])
        for line in requests:
            arguments, keywords = decode(json.loads(line))
            send(replies, encode(function(*arguments, **keywords)))
    else:
        check(names, request, requests, replies)


def check(names: dict[str, Any], request: dict, requests: IO[str], replies: IO[str]) -> None:
    """Run a test and its ``check(candidate)``; write "passed" at the end unless it raises."""

    def candidate(*arguments: object, **keywords: object) -> object:
        send(replies, encode((arguments, keywords)))
        return decode(json.loads(requests.readline()))

    names[request["name"]] = candidate
    exec(compile(request["test"], "test.py", "exec"), names)
    names["check"](candidate)
    send(replies, "passed")


def find(names: dict[str, Any], name: str) -> Callable[..., object]:
    """Return the function ``name`` of a program, or the method of its ``class Solution``."""
    if name in names:
        return names[name]
    if "Solution" in names and name in dir(names["Solution"]):
        return eval(f"Solution().{name}", names)
    raise NameError(f"the program does not define '{name}'")


def send(replies: IO[str], message: object) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def encode(value: object) -> object:
    """Return a plain Python value as JSON that keeps its types; TypeError for any other value."""
    match value:
        case None | bool() | str():
            return value
        case list() | tuple() | set() | frozenset():
            kind = next(name for name, collection in COLLECTIONS.items() if isinstance(value, collection))
            return [kind, [encode(element) for element in value]]
        case dict():
            return ["dict", [[encode(key), encode(content)] for key, content in value.items()]]
        case bytes():
            return ["bytes", value.hex()]
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case numbers.Complex():
            return ["complex", [complex(value).real, complex(value).imag]]
    raise TypeError(f"a result of type {type(value).__name__} cannot be compared")


def decode(encoded: Any) -> Any:
    """Invert `encode`; ValueError or TypeError for invalid input."""
    if not isinstance(encoded, list):
        return encoded
    kind, content = encoded
    match kind:
        case "list" | "tuple" | "set" | "frozenset":
            return COLLECTIONS[kind](map(decode, content))
        case "dict":
            return {decode(key): decode(value) for key, value in content}
        case "bytes":
            return bytes.fromhex(content)
        case "complex":
            return complex(*content)
    raise ValueError(f"{kind!r} is not a type of value")


if __name__ == "__main__":
    main()
