"""Reward functions by the name the user gives: built-in verifiers, regular expressions, Python files and services."""

import ast
import importlib.util
import json
import math
import re
import symtable
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from realhf.api.config import RewardConfig
from realhf.api.experiment import Task
from realhf.base.errors import did_you_mean

FORMAT = "format:"  # prefix of a regular expression as a reward: 1 if the whole response matches, else 0
NONE = "none"  # the `reward.fn` of runs without a verifier: the score is 0, and rows need a prompt only
RewardFn = Callable[[str, str, dict], float]  # fn(prompt, answer, row), where `answer` is the whole response


@dataclass(frozen=True)
class BuiltinVerifier:
    """A verifier that scores right responses 1 and wrong ones 0.

    ``load(seconds, test_seconds)`` returns the judging function for these limits. ``self_test`` holds responses, rows
    and expected scores; judges run it before their first use. ``task`` is the kind of dataset rows it needs.
    """

    load: Callable[[float, float], RewardFn]
    self_test: tuple[tuple[str, dict, float], ...]
    task: Task
    doc: str


def _load_math(seconds: float, test_seconds: float, strict: bool = False) -> RewardFn:
    from realhf.rewards.math.equality import judge_math

    return partial(judge_math, strict=strict)


def _load_code(seconds: float, test_seconds: float, unordered: bool = False) -> RewardFn:
    from realhf.rewards.code.judge_code import CodeJudge

    return CodeJudge(seconds, test_seconds, unordered)


MARKED_ANSWERS = (
    ("So it is 7.\n#### 1,234", {"solutions": ["... #### 1234"]}, 1.0),
    (r"Hence $\boxed{\frac{1}{2}}$.", {"solutions": [r"\boxed{0.5}"]}, 1.0),
    ("#### 73", {"solutions": ["#### 72"]}, 0.0),
    (r"\boxed{x^2}", {"solutions": [r"\boxed{x^3}"]}, 0.0),
    ("I do not know.", {"solutions": ["#### 72"]}, 0.0),
)
UNMARKED_ANSWER = ("The answer is 72.", {"solutions": ["#### 72"]})
SUMS = {"input_output": json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})}
CALLS = {"input_output": json.dumps({"inputs": ["1\n2"], "outputs": ["[1, 2]"], "fn_name": "pair"})}
CODE_SELF_TEST = (
    ("```python\nprint(sum(map(int, input().split())))\n```", SUMS, 1.0),
    ("```python\nprint(max(map(int, input().split())))\n```", SUMS, 0.0),
    ("class Solution:\n    def pair(self, a, b):\n        return a, b", CALLS, 1.0),
    ("import os\n\ndef pair(a, b):\n    return [a, b] if os.fork() else None", CALLS, 0.0),
)
VERIFIERS: dict[str, BuiltinVerifier] = {  # by the name in `reward.fn`
    "math": BuiltinVerifier(
        _load_math, (*MARKED_ANSWERS, (*UNMARKED_ANSWER, 1.0)), Task.math,
        "the final answer equals that of a solution; symbolic equality by github.com/huggingface/Math-Verify",
    ),
    "math_strict": BuiltinVerifier(
        partial(_load_math, strict=True), (*MARKED_ANSWERS, (*UNMARKED_ANSWER, 0.0)), Task.math,
        r"like math, but only an answer in \boxed{} or after #### counts",
    ),
    "code": BuiltinVerifier(
        _load_code, CODE_SELF_TEST, Task.code,
        "the program passes all tests, in the formats of APPS (arXiv 2105.09938) or HumanEval (arXiv 2107.03374)",
    ),
    "code_unordered": BuiltinVerifier(
        partial(_load_code, unordered=True), CODE_SELF_TEST, Task.code,
        "like code, but an output with the same set of words in any order also passes (as in the APPS test script)",
    ),
}  # fmt: skip


def load_reward(fn: str, seconds: float, test_seconds: float = math.inf) -> RewardFn:
    """Return the function that a local ``reward.fn`` names, with limits per response and per test of a program."""
    if fn in VERIFIERS:
        return VERIFIERS[fn].load(seconds, test_seconds)
    if fn.startswith(FORMAT):
        pattern = re.compile(fn.removeprefix(FORMAT), re.DOTALL)
        return lambda prompt, answer, row: float(pattern.fullmatch(answer) is not None)
    path, _, name = fn.rpartition(":")
    spec = importlib.util.spec_from_file_location("realhf_user_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    if not callable(function := vars(module).get(name)):
        raise AttributeError(f"{path} has no function '{name}'")
    return function


def fns_of(config: RewardConfig) -> list[str]:
    """Return the functions of single responses; none with ``reward.fn=none``."""
    return config.fns or ([] if config.fn == NONE else [config.fn])


def weights_of(config: RewardConfig) -> list[float]:
    return config.weights or [1.0] * len(fns_of(config))


def is_remote(fn: str) -> bool:
    return fn.startswith(("http:", "https:"))


def builtin_verifier(fn: str) -> str | None:
    """Return the name of the built-in verifier behind ``fn``, local or served under ``?fn=math``, or None."""
    name = parse_qs(urlsplit(fn).query).get("fn", [""])[0] if is_remote(fn) else fn
    return name if name in VERIFIERS else None


def names_of(fns: Sequence[str]) -> list[str]:
    """Return a short name for each reward: ``math``, ``format``, a user's function, or ``math@host:port``."""
    return [_remote_name(fn) if is_remote(fn) else "format" if fn.startswith(FORMAT) else fn.rpartition(":")[2]
            for fn in fns]  # fmt: skip


def _remote_name(url: str) -> str:
    parts = urlsplit(url)
    names = parse_qs(parts.query).get("fn")
    return f"{names[0]}@{parts.netloc}" if names else f"{parts.netloc}{parts.path}"


def check_fn(fn: str) -> list[str]:
    """Return the problems of a ``reward.fn``, one line each, without running the file or contacting the service."""
    if is_remote(fn):
        return check_url("reward.fn", fn, "reward.token_env")
    if fn in VERIFIERS:
        return []
    if fn.startswith(FORMAT):
        try:
            re.compile(fn.removeprefix(FORMAT))
        except re.error as error:
            return [f"reward.fn={fn!r}: invalid regular expression ({error})"]
        return []
    if fn == NONE:
        return ["reward.fn=none gives no reward: it cannot be one of several, or be served"]
    return check_file("reward.fn", fn, [*VERIFIERS, NONE], "prompt, response and row")


def check_file(option: str, fn: str, others: Sequence[str], arguments: str) -> list[str]:
    """Return the problems of an option with a ``file.py:function`` of three ``arguments``, without running the file.

    ``others`` are the names that the option may have instead.
    """
    path, colon, name = fn.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        hint = did_you_mean(fn, others)
        return [f"{option}={fn!r} must be one of {', '.join(others)}, or 'file.py:function'{hint}"]
    if not Path(path).is_file():
        return [f"{option}={fn!r}: no such file: {path}"]
    try:
        source = importlib.util.decode_source(Path(path).read_bytes())
        symbols, tree = symtable.symtable(source, path, "exec").get_symbols(), ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return [f"{option}={fn!r}: {path} is not valid Python: {error}"]
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name not in names:
        return [f"{option}={fn!r}: {path} does not define '{name}'{did_you_mean(name, names)}"]
    return [] if _accepts_three(tree, name) else [f"{option}={fn!r}: {name} must take three arguments: {arguments}"]


def _accepts_three(tree: ast.Module, name: str) -> bool:
    """Return False if the source shows that the function ``name`` cannot be called with three positional arguments."""
    bound = [node for node in ast.walk(tree) if not isinstance(getattr(node, "ctx", None), ast.Load)
             and name in {getattr(node, key, None) for key in ("name", "asname", "id")}]  # fmt: skip
    if len(bound) != 1 or bound[0] not in tree.body or not isinstance(bound[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    function, given = bound[0], bound[0].args
    n_most = len(given.posonlyargs) + len(given.args)
    is_callable = n_most - len(given.defaults) <= 3 and (n_most >= 3 or given.vararg is not None)
    return bool(function.decorator_list) or (is_callable and None not in given.kw_defaults)


def check_url(option: str, url: str, secret: str) -> list[str]:
    """Return the problems of an option with a URL; ``secret`` is the option for a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return [f"{option}={url!r}: {error}"]
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return [f"{option}={url!r} is not of the form http://host:port/path"]
    if parts.username or parts.password:
        return [f"{option} contains a password in the URL of {parts.hostname}; use {secret}"]
    if not url.isascii() or any(char.isspace() for char in url):
        return [f"{option}={url!r}: a URL contains no spaces and only ASCII characters"]
    return []
