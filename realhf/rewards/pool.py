"""Judges answers in killable child processes, each answer with its own deadline."""

import ast
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from realhf.base.errors import UserError, did_you_mean
from realhf.rewards.child import Child
from realhf.rewards.verdict import Status, Verdict

Item = tuple[str, str, dict]

MATH_SELF_TEST = (
    ("So it is 7.\n#### 1,234", ["... #### 1234"], 1.0),
    (r"Hence $\boxed{\frac{1}{2}}$.", [r"\boxed{0.5}"], 1.0),
    ("The answer is 72.", ["#### 72"], 1.0),
    ("#### 73", ["#### 72"], 0.0),
    (r"\boxed{x^2}", [r"\boxed{x^3}"], 0.0),
    ("I do not know.", ["#### 72"], 0.0),
)


class JudgePool:
    """``processes`` children that judge with ``fn`` (``math`` or ``file.py:function``), started on first use.

    A bad ``fn``, or a child that is not ready within ``startup_timeout`` seconds, is a UserError.
    """

    def __init__(self, fn: str, timeout: float, processes: int = 1, startup_timeout: float = 60.0) -> None:
        if timeout <= 0 or processes < 1:
            raise UserError(f"reward.timeout={timeout} and reward.processes={processes} must be positive")
        if problems := check_reward_fn(fn):
            raise UserError(problems)
        path, colon, name = fn.rpartition(":")
        self._fn = f"{os.path.abspath(path)}:{name}" if colon else fn
        self.children = [Child(self._fn, timeout, startup_timeout) for _ in range(processes)]

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

        def work(child: Child) -> None:
            while not stop.is_set():
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                prompt, answer, row = items[i]
                verdicts[i] = child.judge({"prompt": prompt, "answer": answer, "row": row})

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
        """Start the children and let ``math`` judge known answers; a wrong verdict is a UserError."""
        self.start()
        if self._fn != "math":
            return
        verdicts = self.judge([("", answer, {"solutions": gold}) for answer, gold, _ in MATH_SELF_TEST])
        problems = [
            f"the math judge does not work: {answer!r} against {gold!r} gave {v.score} ({v.status.value} {v.detail})"
            f" instead of {score}; is math-verify installed as required?"
            for v, (answer, gold, score) in zip(verdicts, MATH_SELF_TEST, strict=True)
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
    if fn == "math":
        return []
    path, colon, name = fn.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        return [f"reward.fn={fn!r} is neither 'math' nor 'file.py:function'"]
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
