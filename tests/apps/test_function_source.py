"""Functions of scripts and notebooks as files: random programs give the same values there."""

import json
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.apps.function_source import module_source, reference
from realhf.base.errors import UserError
from tests.conftest import TIMEOUT_S
from tests.scaling import examples

PROLOGUE = """
from __future__ import annotations
import functools
import json as data
import math, re
from collections import Counter as Count
from dataclasses import dataclass
from os.path import join
import realhf.base.errors
from realhf.apps.function_source import module_source

print("this line is not repeated")
"""
EPILOGUE = """
functions = [value for name, value in sorted(globals().items()) if name.startswith("reward")]
results = [(f.__name__, module_source(f), [f("a", text, {"n": 3}) for text in ("", "12", "a 7 b")]) for f in functions]
print(data.dumps(results))
"""
CONSTANTS = ("7", "-2.5", "1e300 * 1e10", "'tex\\nt'", "('a', 2)", "{'a': [1, 2]}", "None", "True", "b'x'",
             "re.compile(r'\\d+', re.I)", "set()", "frozenset() or {1, 2}")  # fmt: skip
USES = ("Count(answer).get('7', 0)", "math.sqrt(len(answer))", "len(data.dumps(row))", "len(join(prompt, answer))",
        "len(realhf.base.errors.did_you_mean(answer, ['12']))", "sum(int(x) for x in re.findall(r'\\d', answer))",
        "len(str({K}))", "{F}(prompt, answer, row)", "{C}(len(answer)).twice()", "(lambda x: {F}(x, x, row))(answer)",
        "cached_{F}(answer)", "max(({F}(prompt, c, row) for c in answer), default=0)")  # fmt: skip


def program(rng: random.Random) -> str:
    """Return a script with rewards that use constants, classes, decorators and each other."""
    parts, functions, constants, classes = [], ["first"], ["K"], ["Base"]
    parts.append(
        "def first(prompt, answer, row):\n    return len(answer) if len(answer) < 3 else last(prompt, '', row)"
    )
    parts.append("cached_first = functools.lru_cache(lambda answer: len(answer)).__wrapped__ and len")
    parts.append("K = 1")
    parts.append("@dataclass\nclass Base:\n    n: int\n\n    def twice(self) -> Unknown:\n        return 2 * self.n")
    for number in range(rng.randint(3, 9)):
        match rng.randrange(4):
            case 0:
                constants.append(f"K{number}")
                parts.append(f"K{number} = {rng.choice(CONSTANTS)}")
            case 1:
                classes.append(f"C{number}")
                parts.append(f"class C{number}({rng.choice(classes[:-1])}):\n    def twice(self):\n"
                             f"        return super().twice() + len(str({rng.choice(constants)}))")  # fmt: skip
            case _:
                name = f"{rng.choice(['reward', 'helper'])}{number}"
                uses = [rng.choice(USES).format(K=rng.choice(constants), F=rng.choice(functions), C=rng.choice(classes))
                        for _ in range(rng.randint(1, 3))]  # fmt: skip
                decorator = rng.choice(["", "", "@doubled\n"])
                default = rng.choice(["", f", extra={rng.choice(constants)}"])
                parts.append(f"{decorator}def {name}(prompt, answer, row{default}):\n    return {' + '.join(uses)}")
                parts.append(f"@functools.lru_cache\ndef cached_{name}(answer):\n    return {name}('', answer, {{}})")
                functions.append(name)
    decorator = ("def doubled(f):\n    @functools.wraps(f)\n    def inner(*a, **k):\n        return 2 * f(*a, **k)\n"
                 "    return inner")  # fmt: skip
    return "\n\n".join(
        [
            PROLOGUE,
            decorator,
            *parts,
            f"last = {functions[-1]}",
            f"def reward(prompt, answer, row):\n    return {functions[-1]}(prompt, answer, row)",
            EPILOGUE,
        ]
    )


def loaded(source: str) -> dict[str, Any]:
    module = types.ModuleType("realhf_user_reward")
    sys.modules[module.__name__] = module  # as load_reward does; dataclasses look for it
    exec(compile(source, "reward.py", "exec"), vars(module))
    return vars(module)


@pytest.mark.parametrize("seed", range(examples(6)))
def test_a_function_has_the_same_values_in_its_file(seed: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(program(random.Random(seed)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results
    for name, source, values in results:
        assert "not repeated" not in source
        function = loaded(source)[name]
        assert [function("a", text, {"n": 3}) for text in ("", "12", "a 7 b")] == values, source


CELLS = ["import re", "LIMIT = 3", "def helper(text):\n    return len(re.findall(r'\\d', text)) > LIMIT",
         "def reward(prompt, answer, row):\n    return float(helper(answer))", "LIMIT = 1",
         "from realhf.apps.function_source import module_source\nsource = module_source(reward)"]  # fmt: skip
NOTEBOOK = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
for cell in {CELLS!r}:
    shell.run_cell(cell).raise_error()
print(shell.user_ns["source"])
"""


def test_a_function_of_a_notebook_has_its_current_globals(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=TIMEOUT_S,
                          env={"IPYTHONDIR": str(tmp_path), "PATH": ""})  # fmt: skip
    assert done.returncode == 0, done.stderr
    function = loaded(done.stdout)["reward"]
    assert [function("", text, {}) for text in ("1", "12", "123456")] == [0.0, 1.0, 1.0]


def script_functions(text: str, path: Path) -> dict[str, Callable]:
    path.write_text(text)
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, str(path), "exec"), variables)
    return variables


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("reward = lambda p, a, r: 1.0", "must be a function defined by 'def'"),
        ("class A:\n    def __call__(self, p, a, r): return 1\nreward = A()", "must be a function defined by 'def'"),
        ("reward = print", "must be a function defined by 'def'"),
        ("def make(k):\n    def reward(p, a, r):\n        return k\n    return reward\nreward = make(2)",
         r"reward uses variables of an enclosing function \(k\)"),
        ("model = object()\ndef reward(p, a, r):\n    return model", "reward uses the variable model of type object"),
        ("import threading\nlock = threading.Lock()\ndef helper():\n    return lock\n"
         "def reward(p, a, r):\n    return helper()", "helper uses the variable lock of type lock"),
    ],
)  # fmt: skip
def test_a_function_that_has_no_source_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem) as error:
        module_source(script_functions(text, tmp_path / "script.py")["reward"])
    assert "'file.py:function'" in str(error.value)


def test_a_function_without_a_file_is_refused() -> None:
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec("def reward(p, a, r):\n    return 1.0", variables)
    with pytest.raises(UserError, match="reward has no source"):
        module_source(variables["reward"])


def test_only_functions_of_flat_modules_are_used_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flat_rewards.py").write_text("def reward(p, a, r):\n    return 1.0\n\nother = reward\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "inner.py").write_text(
        "from . import __name__ as n\ndef reward(p, a, r):\n    return 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import flat_rewards
    from package import inner

    assert reference(flat_rewards.reward) == f"{tmp_path / 'flat_rewards.py'}:reward"
    assert reference(inner.reward) is None
    assert loaded(module_source(inner.reward))["reward"] is inner.reward
