"""What runs in the sandbox to call functions: the text of this file is the program, `code` speaks to it line by line.

The first line says what to load. With ``call``, every further line is arguments and is answered by the result. With
``check``, the harness runs a test and writes the arguments of every call that the test makes; the result is the next
line it reads: the function itself runs in another process, which never sees the test. Only plain values pass.
"""

import json
import numbers
import os
import sys
from collections.abc import Callable
from typing import IO, Any

NAMES = dict(globals())  # in the sandbox: with the imports that programs need not make themselves


def main() -> None:
    """Do what the first line says."""
    if sys.version_info >= (3, 11):
        sys.set_int_max_str_digits(0)
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    order = json.loads(requests.readline())
    names = {**NAMES, "__name__": "program"}
    names.pop(order["name"], None)  # the program's own, not ours
    exec(compile(order["source"], "program.py", "exec"), names)
    if order["do"] == "call":
        function = find(names, order["name"])
        for line in requests:
            arguments, keywords = decode(json.loads(line))
            send(replies, encode(function(*arguments, **keywords)))
    else:
        check(names, order, requests, replies)


def check(names: dict[str, Any], order: dict, requests: IO[str], replies: IO[str]) -> None:
    """Run ``test`` and its ``check(candidate)``; say "passed" at the end, an exception says that it was not."""

    def candidate(*arguments: object, **keywords: object) -> object:
        send(replies, encode((arguments, keywords)))
        return decode(json.loads(requests.readline()))

    names[order["name"]] = candidate
    exec(compile(order["test"], "test.py", "exec"), names)
    names["check"](candidate)
    send(replies, "passed")


def find(names: dict[str, Any], name: str) -> Callable[..., object]:
    """Return the function ``name`` of a program, or that method of its ``class Solution``."""
    if name in names:
        return names[name]
    if "Solution" in names and name in dir(names["Solution"]):
        return eval(f"Solution().{name}", names)
    raise NameError(f"the program does not define '{name}'")


def send(replies: IO[str], message: object) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def encode(value: object) -> object:
    """Return a plain Python value in a form that JSON keeps apart; TypeError for any other."""
    match value:
        case None | bool() | str():
            return value
        case list() | tuple() | set() | frozenset():
            kind = next(k for k in (list, tuple, set, frozenset) if isinstance(value, k))
            return [kind.__name__, [encode(part) for part in value]]
        case dict():
            return ["dict", [[encode(key), encode(part)] for key, part in value.items()]]
        case bytes():
            return ["bytes", value.hex()]
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case numbers.Complex():
            return ["complex", [complex(value).real, complex(value).imag]]
    raise TypeError(f"a result of type {type(value).__name__} cannot be compared")


def decode(form: Any) -> Any:
    """Return the value that `encode` put in this form; ValueError or TypeError where it is none."""
    if not isinstance(form, list):
        return form
    kind, content = form
    match kind:
        case "list":
            return [decode(part) for part in content]
        case "tuple" | "set" | "frozenset":
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(part) for part in content)
        case "dict":
            return {decode(key): decode(part) for key, part in content}
        case "bytes":
            return bytes.fromhex(content)
        case "complex":
            return complex(*content)
    raise ValueError(f"{kind!r} is no kind of value")


if __name__ == "__main__":
    main()
