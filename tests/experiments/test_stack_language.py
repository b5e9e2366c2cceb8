"""The stack language of the study on programs: its tasks, and operations that fail."""

from random import Random

import pytest

from experiments.ppo_code.language import DEPTH, LIMIT, OPERATIONS, TASKS, passes, run
from experiments.ppo_code.task import demonstrations, problems


@pytest.mark.parametrize("row", list(problems(2 * len(TASKS), "any", Random(3))), ids=lambda row: row["query_id"])
def test_the_program_of_a_task_passes_and_others_do_not(row: dict) -> None:
    program = TASKS[row["prompt"].strip()][2]
    assert passes(row["prompt"], program, row) == 1.0
    for wrong in ("", program[:-1], program + "1", program + "?", " " + program, program + "dx1+"):
        assert passes(row["prompt"], wrong, row) == 0.0, wrong


@pytest.mark.parametrize(("program", "stack"), [("+", [1]), ("s", [1]), ("o", [1]), ("x", []), ("d", []), ("q", [1, 2]),
                                                ("*", [LIMIT, 2]), ("1" * (DEPTH + 1), [])])  # fmt: skip
def test_what_is_not_possible_fails(program: str, stack: list[int]) -> None:
    assert run(program, stack) is None


def test_operations_equal_python_on_random_programs() -> None:
    """Against a recursive evaluation of the same words."""
    rng, n_valid = Random(5), 0
    for _ in range(3000):
        program = "".join(rng.choice(OPERATIONS) for _ in range(rng.randrange(8)))
        stack = [rng.randrange(-9, 10) for _ in range(rng.randrange(3))]
        found = run(program, stack)
        assert found == evaluated(program, stack), (program, stack)
        n_valid += found is not None
    assert n_valid > 500


def evaluated(program: str, stack: list[int]) -> list[int] | None:
    if not program:
        return stack
    first, rest = program[0], program[1:]
    match first, stack:
        case "+", [*below, a, b]:
            return evaluated(rest, [*below, a + b])
        case "-", [*below, a, b]:
            return evaluated(rest, [*below, a - b])
        case "*", [*below, a, b]:
            return evaluated(rest, [*below, a * b])
        case "s", [*below, a, b]:
            return evaluated(rest, [*below, b, a])
        case "o", [*below, a, b]:
            return evaluated(rest, [*below, a, b, a])
        case "d", [*below, a]:
            return evaluated(rest, [*below, a, a])
        case "x", [*below, _]:
            return evaluated(rest, below)
    return evaluated(rest, [*stack, int(first)]) if first.isdigit() else None


def test_demonstrations_are_mostly_wrong() -> None:
    rows, tests = list(demonstrations(Random(1))), {row["prompt"]: row for row in problems(20, "any", Random(2))}
    right = sum(passes(row["prompt"], row["answer"], tests[row["prompt"]]) for row in rows) / len(rows)
    assert 0.02 < right < 0.25
