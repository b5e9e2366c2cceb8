"""A small stack language: its interpreter, twenty tasks, and the reward of a program.

A program is a word of one-character operations on a stack of integers, which starts with the arguments of the task. It
is right if it ends with one value, the result of the task.
"""

from collections.abc import Callable, Sequence

LIMIT = 10**9
"""Largest absolute value; operations that exceed it fail."""
DEPTH = 16
DIGITS = "123456789"
WORDS: dict[str, tuple[int, Callable[..., tuple[int, ...]]]] = {
    "+": (2, lambda a, b: (a + b,)),
    "-": (2, lambda a, b: (a - b,)),
    "*": (2, lambda a, b: (a * b,)),
    "d": (1, lambda a: (a, a)),
    "x": (1, lambda a: ()),
    "s": (2, lambda a, b: (b, a)),
    "o": (2, lambda a, b: (a, b, a)),
    **{digit: (0, lambda digit=digit: (int(digit),)) for digit in DIGITS},
}
"""Operations and how many values they take: d duplicates, x drops, s swaps, o copies the value below the top."""
OPERATIONS = "".join(WORDS)
TASKS = {  # name: arguments, result, and a program
    "a": (2, lambda x, y: x + y, "+"),
    "b": (2, lambda x, y: x - y, "-"),
    "c": (2, lambda x, y: y - x, "s-"),
    "d": (2, lambda x, y: x * y, "*"),
    "e": (1, lambda x: x * x, "d*"),
    "f": (1, lambda x: 2 * x, "d+"),
    "g": (1, lambda x: 3 * x, "dd++"),
    "h": (1, lambda x: x**3, "dd**"),
    "i": (1, lambda x: x + 1, "1+"),
    "j": (1, lambda x: 2 * x + 1, "d+1+"),
    "k": (2, lambda x, y: x * x + y, "sd*+"),
    "l": (2, lambda x, y: x * x - y, "sd*s-"),
    "m": (2, lambda x, y: (x + y) ** 2, "+d*"),
    "n": (2, lambda x, y: (x - y) ** 2, "-d*"),
    "o": (2, lambda x, y: x * y + x, "o*+"),
    "p": (2, lambda x, y: x * y - x, "o*s-"),
    "q": (1, lambda x: x**4, "d*d*"),
    "r": (1, lambda x: x * x + x, "dd*+"),
    "s": (1, lambda x: 5 * x - 3, "5*3-"),
    "t": (2, lambda x, y: x * x + y * y, "d*sd*+"),
}


def run(program: str, arguments: Sequence[int]) -> list[int] | None:
    """Return the stack at the end; None if an operation is unknown, lacks values, or exceeds a limit."""
    stack = list(arguments)
    for operation in program:
        n, function = WORDS.get(operation, (DEPTH + 1, tuple))
        if len(stack) < n:
            return None
        results = function(*stack[len(stack) - n :])
        stack[len(stack) - n :] = results
        if len(stack) > DEPTH or any(abs(value) > LIMIT for value in results):
            return None
    return stack


def passes(prompt: str, answer: str, row: dict) -> float:
    """Return 1 if the program passes all tests of the row, ``[[arguments, result], ...]``, else 0."""
    return float(all(run(answer, arguments) == [result] for arguments, result in row["tests"]))
