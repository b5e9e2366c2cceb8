"""The comparison of calls with signatures finds wrong keywords, surplus arguments and unknown names."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.signatures.matching import mismatch, problem
from tests.signatures.parameters import parsed
from tests.signatures.record import read_records
from tests.signatures.targets import RELEASES, TOP_LEVEL, distribution, uses
from tests.signatures.uses import Arguments, Use, uses_in

RECORDS = read_records()
MISSPELT = "misspelt"


@pytest.mark.parametrize(
    "signature, call, reason",
    [
        ("a, b=", Arguments(1), None),
        ("a, b=", Arguments(1, ("b",)), None),
        ("a, b=", Arguments(0), "needs parameter 'a'"),
        ("a, b=", Arguments(3), "takes 2 positional arguments, 3 are given"),
        ("a, b=", Arguments(1, ("a",)), "parameter 'a' is given twice"),
        ("a, b=", Arguments(1, ("c",)), "has no parameter 'c'"),
        ("a, /, b=", Arguments(0, ("a",)), "has no parameter 'a'"),
        ("a, *, b", Arguments(1), "needs parameter 'b'"),
        ("a, *, b", Arguments(2), "takes 1 positional arguments, 2 are given"),
        ("*args, b=", Arguments(5, ("b",)), None),
        ("a, **options", Arguments(1, ("c",)), None),
        ("a, b", Arguments(0, ("b",), more_positional=True), None),
        ("a, b", Arguments(0, (), more_keywords=True), None),
    ],
)
def test_arguments_are_bound_as_python_does(signature: str, call: Arguments, reason: str | None) -> None:
    assert problem(parsed(signature), call) == reason


@pytest.mark.parametrize(
    "call, reason",
    [
        ("F.linear(x, weight, bia=None)", "functional.linear(_, _, bia=) in torch==2.5.0: has no parameter 'bia'"),
        ("dist.barrier(group, True, None, 1)", "takes 3 positional arguments, 4 are given"),
        ("partial(F.gelu, approximat='tanh')", "has no parameter 'approximat'"),
        ("torch.zeroes(3)", "not recorded for torch==2.5.0: python -m tests.signatures.record torch==2.5.0"),
        ("x.new_zeros(2, dtyp=None)", "has no parameter 'dtyp'"),
        ("self.work.wait(1, 2)", "takes 1 positional arguments, 2 are given"),
    ],
)  # fmt: skip
def test_a_wrong_call_in_a_file_is_reported(tmp_path: Path, call: str, reason: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "import torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\n"
        f"class One:\n    work: dist.Work | None\n    def f(self, x: torch.Tensor):\n        return {call}\n"
    )
    found = [mismatch(use, "torch==2.5.0", RECORDS["torch"]["2.5.0"]) for use in uses_in(file, TOP_LEVEL)]
    (problem,) = {one for one in found if one}
    assert problem.startswith("wrong.py:7: ") and reason in problem


def strict_calls(package: str, version: str) -> list[Use]:
    """Return the calls of functions that accept only named parameters."""
    record = RECORDS[package][version]
    return [
        use for use in uses()
        if distribution(use.name) == package and use.arguments and record.get(use.name)
        and not any("*" in one.replace("*,", "") for one in record[use.name] or [])
    ]  # fmt: skip


def mutants(use: Use) -> list[Use]:
    """Return wrong variants of a call: each keyword misspelt, 100 more arguments, and another name."""
    call = use.arguments
    assert call
    variants = [
        replace(call, keywords=(*call.keywords[:index], MISSPELT, *call.keywords[index + 1 :]))
        for index in range(len(call.keywords) + 1)
    ]
    variants.append(replace(call, n_positional=call.n_positional + 100))
    return [*(replace(use, arguments=one) for one in variants), replace(use, name=f"{use.name}_{MISSPELT}")]


@pytest.mark.parametrize("package", ["torch", "vllm", "megatron-core"])
def test_every_mutant_of_a_call_is_found(package: str) -> None:
    version = RELEASES[package][-1]
    record = RECORDS[package][version]
    calls = strict_calls(package, version)
    assert len(calls) >= 5
    alive = [one for use in calls for one in mutants(use) if mismatch(one, f"{package}=={version}", record) is None]
    assert not alive
