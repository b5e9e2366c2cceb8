"""Judges answers in killable child processes, each answer with its own deadline."""

import ast
import json
import os
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from realhf.base.errors import UserError, did_you_mean
from realhf.rewards.judge.async_judge import judge_all
from realhf.rewards.judge.process import JudgeProcess
from realhf.rewards.verdict import BUILT_IN, FORMAT, Status, Verdict

Item = tuple[str, str, dict]

SUMS = {"input_output": json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})}
CALLS = {"input_output": json.dumps({"inputs": ["1\n2"], "outputs": ["[1, 2]"], "fn_name": "pair"})}
CODE_SELF_TEST: tuple[tuple[str, dict, float], ...] = (
    ("```python\nprint(sum(map(int, input().split())))\n```", SUMS, 1.0),
    ("```python\nprint(max(map(int, input().split())))\n```", SUMS, 0.0),
    ("class Solution:\n    def pair(self, a, b):\n        return a, b", CALLS, 1.0),
    ("import os\n\ndef pair(a, b):\n    return [a, b] if os.fork() else None", CALLS, 0.0),
)
SELF_TESTS: dict[str, tuple[tuple[str, dict, float], ...]] = {
    "math": (
        ("So it is 7.\n#### 1,234", {"solutions": ["... #### 1234"]}, 1.0),
        (r"Hence $\boxed{\frac{1}{2}}$.", {"solutions": [r"\boxed{0.5}"]}, 1.0),
        ("The answer is 72.", {"solutions": ["#### 72"]}, 1.0),
        ("#### 73", {"solutions": ["#### 72"]}, 0.0),
        (r"\boxed{x^2}", {"solutions": [r"\boxed{x^3}"]}, 0.0),
        ("I do not know.", {"solutions": ["#### 72"]}, 0.0),
    ),
    "code": CODE_SELF_TEST,
    "code_unordered": CODE_SELF_TEST,
}
"""Answers, rows and the scores that our own verifiers must give them."""


class JudgePool:
    """``processes`` children that judge with ``fn`` (one of BUILT_IN or ``file.py:function``), started on first use.

    A bad ``fn``, or a child that is not ready within ``startup_timeout`` seconds, is a UserError.
    """

    def __init__(
        self, fn: str, timeout: float, processes: int = 1, startup_timeout: float = 60.0, max_concurrency: int = 16
    ) -> None:
        if timeout <= 0 or processes < 1 or max_concurrency < 1:
            raise UserError(
                f"reward.timeout={timeout}, processes={processes}, max_concurrency={max_concurrency} must be positive"
            )
        if problems := check_reward_fn(fn):
            raise UserError(problems)
        path, colon, name = fn.rpartition(":")
        self._fn = f"{os.path.abspath(path)}:{name}" if colon and not fn.startswith(FORMAT) else fn
        self._in_flight = max_concurrency
        self.children = [JudgeProcess(self._fn, timeout, startup_timeout) for _ in range(processes)]

    def start(self) -> None:
        """Start all children side by side and wait until they are ready."""
        for child in self.children:
            child.spawn()
        for child in self.children:
            child.await_ready()

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """Return the verdicts on ``(prompt, answer, row)`` items, in order."""
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(items)):
            todo.put(i)
        verdicts: dict[int, Verdict] = {}
        stop = threading.Event()

        def waiting() -> Iterator[tuple[int, dict]]:
            while not stop.is_set():
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                prompt, answer, row = items[i]
                yield i, {"prompt": prompt, "answer": answer, "row": row}

        def work(child: JudgeProcess) -> None:
            verdicts.update(judge_all(child, waiting(), self._in_flight))

        with ThreadPoolExecutor(len(self.children)) as threads:
            futures = [threads.submit(work, child) for child in self.children[: len(items)]]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # the others finish their answer and no more
        for future in futures:
            future.result()
        return [verdicts[i] for i in range(len(items))]

    def self_test(self) -> None:
        """Start the children and let our own verifiers judge known answers; a wrong verdict is a UserError."""
        self.start()
        known = SELF_TESTS.get(self._fn, ())
        verdicts = self.judge([("", answer, row) for answer, row, _ in known])
        problems = [
            f"the {self._fn} judge does not work here: {answer!r} for {row!r} gave {v.score} instead of {score}"
            f" ({v.status.value} {v.detail})"
            for v, (answer, row, score) in zip(verdicts, known, strict=True)
            if v.status is not Status.ok or v.score != score
        ]
        if problems:
            raise UserError(problems)

    def close(self) -> None:
        """Kill all children and what they started."""
        for child in self.children:
            child.kill()

    def __enter__(self) -> "JudgePool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_reward_fn(fn: str) -> list[str]:
    """Return what is wrong with ``reward.fn``, without running the user's file: one line per problem."""
    if fn in BUILT_IN:
        return []
    if fn.startswith(FORMAT):
        try:
            re.compile(fn.removeprefix(FORMAT))
        except re.error as error:
            return [f"reward.fn={fn!r}: not a regular expression ({error})"]
        return []
    path, colon, name = fn.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        return [f"reward.fn={fn!r} is neither {', '.join(BUILT_IN)} nor 'file.py:function'"]
    if not Path(path).is_file():
        return [f"reward.fn={fn!r}: there is no file {path}"]
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except (SyntaxError, ValueError) as error:
        return [f"reward.fn={fn!r}: {path} is not valid Python: {error}"]
    names = top_level_names(tree)
    if name not in names:
        return [f"reward.fn={fn!r}: {path} does not define '{name}'{did_you_mean(name, names)}"]
    return []


def top_level_names(tree: ast.Module) -> set[str]:
    """Return what a module's body defines, assigns or imports, also below ``if`` and ``try``."""
    names: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names.update(alias.asname or alias.name for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case _:
                todo.extend(ast.iter_child_nodes(node))
    return names
