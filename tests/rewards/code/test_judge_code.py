"""Verdicts on programs, comparison of outputs, and programs that try to forge a verdict."""

import gzip
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.base.isolation.seccomp import MACHINES
from realhf.rewards.code.extract_code import complete_stub, extract_code
from realhf.rewards.code.harness import decode, encode
from realhf.rewards.code.judge_code import CodeJudge, same_output, same_value, same_word
from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.sandbox.sandbox import Reason
from realhf.rewards.verdict import ScoreWithReason, Status, Verdict
from tests.conftest import TIMEOUT_S
from tests.rewards.judge.processes import descendants, have_exited

runs = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="the sandbox needs Linux"
)
HUMAN_EVAL = Path(__file__).parents[3] / "../shared/data/HumanEval.jsonl.gz"

LONG = "print(sum(map(int, input().split())))\n"
SHORT = "print(1)\n"


@pytest.fixture(scope="module")
def judge() -> Iterator[CodeJudge]:
    judge = CodeJudge(20.0)
    yield judge
    judge.sandbox.close()


def script(*pairs: tuple[str, str]) -> dict:
    return {"input_output": json.dumps({"inputs": [a for a, _ in pairs], "outputs": [b for _, b in pairs]})}


def function(name: str, *pairs: tuple[str, str]) -> dict:
    tests = json.loads(script(*pairs)["input_output"])
    return {"input_output": json.dumps({**tests, "fn_name": name})}


def check(stub: str, test: str) -> dict:
    return {"stub": stub, "test": f"def check(candidate):\n    {test}\n", "entry_point": "f"}


ADD = script(("1 2\n", "3\n"), ("5 6", "11"))
PAIR = function("pair", ("1\n[2]", "[1, [2]]"), ('"a"\nnull', '["a", null]'))
STUB = 'import math\n\ndef f(x):\n    """Return x + 1."""\n'
INCREMENT = check(STUB, "assert candidate(1) == 2 and candidate(2.5) == 3.5")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"First\n```python\n{LONG}```\nthen\n```py\n{LONG}#2\n```\nDone.", LONG + "#2\n"),
        (f"```python\n{LONG}```\nIt prints:\n```\n3 apples\n```", LONG),
        (f"```python\n{LONG}```\n```python\n{SHORT}```", LONG),
        (f"```python\n{SHORT}```", SHORT),
        (f"```\n{LONG}```", LONG),
        (f"```Python3\r\n{LONG}```", LONG),
        (f"cut off\n```python\n{LONG}", LONG),
        (f"```cpp\nint main() {{}}\n```\n{LONG}", None),
        (f"```python\n{LONG}x = (\n```", None),
        (LONG, LONG),
        ("I cannot do this.", None),
        ("```python\n```", None),
        ("(" * 100_000, None),
        ("", None),
        (" \n", None),
    ],
)
def test_extract_code(answer: str, code: str | None) -> None:
    assert extract_code(answer) == code


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("    return x + 1", STUB + "    return x + 1"),
        ("    return x + 1\n\nThis adds one.", STUB + "    return x + 1\n"),
        (f"So:\n```python\n{STUB}    return x + 1\n```", STUB + STUB + "    return x + 1\n"),
        ("```python\n    return x + 1\n```", STUB + "    return x + 1\n"),
        (f"```\ndef f(x):\n    return x\n```\n```\n{LONG}```", STUB + "def f(x):\n    return x\n"),
        ("I cannot do this.", None),
        ("```python\nno program\n```", None),
        ("", None),
    ],
)
def test_complete_stub(answer: str, program: str | None) -> None:
    assert complete_stub(STUB, answer, "f") == complete_stub(STUB.rstrip("\n"), answer, "f") == program


@runs
@pytest.mark.parametrize(
    ("answer", "row", "reason"),
    [
        (LONG, ADD, Reason.ok),
        ("print(3)", ADD, Reason.wrong),
        ("print(sum(map(int, input().split())) / 1)", ADD, Reason.ok),
        ("a, b = map(int, input().split())\nprint(a + b if a < 5 else a)", ADD, Reason.wrong),
        ("I cannot.", ADD, Reason.no_program),
        ("print(input(), input(), input())", ADD, Reason.error),
        ("def main():\n    print(sum(map(int, sys.stdin.read().split())))\n\nif __name__ == '__main__':\n    main()",
         ADD, Reason.ok),
        (LONG + "raise SystemExit(1)", ADD, Reason.error),
        (LONG + "import os\nos._exit(0)", ADD, Reason.wrong),  # its output was never flushed
        ("pair = lambda a, b: (a, b)", PAIR, Reason.ok),
        ("class Solution:\n    def pair(self, a, b):\n        print('noise')\n        return [a, b]", PAIR, Reason.ok),
        ("class Solution:\n    def pear(self, a, b):\n        return [a, b]", PAIR, Reason.error),
        ("def pair(a, b):\n    return [b, a]", PAIR, Reason.wrong),
        ("def pair(a, b):\n    return {a, 'x'}", PAIR, Reason.wrong),
        ("def pair(a, b):\n    return pair", PAIR, Reason.error),
        ("def pair(a):\n    return a", PAIR, Reason.error),
        ("def pair(a, b):\n    x = []\n    x.append(x)\n    return x", PAIR, Reason.error),
        ("import time\ntime.sleep(0)\ndef pair(a, b):\n    exit()", PAIR, Reason.error),
        ("def count(n):\n    return {n: float(n)}", function("count", ("1", '{"1": 1.0000001}')), Reason.ok),
        ("def other(a, b):\n    return a", function("gcd", ("4\n6", "2")), Reason.error),
        ("from math import gcd  # as good as any", function("gcd", ("4\n6", "2")), Reason.ok),
        ("class Solution:\n    def count(self, n):\n        return n", function("count", ("4", "4")), Reason.ok),
        ("def many(n):\n    return 10 ** n", function("many", ("5000", "1.5")), Reason.error),
        ("    return x + 1", INCREMENT, Reason.ok),
        (f"```python\n{STUB}    return x + 1\n```", INCREMENT, Reason.ok),
        ("    return x", INCREMENT, Reason.wrong),
        ("    return None", INCREMENT, Reason.wrong),
        ("    raise ValueError(x)", INCREMENT, Reason.error),
        ("    return f(x + 1)", INCREMENT, Reason.error),
        ("    return bytearray(2 ** 40)", INCREMENT, Reason.memory),
        ("    import socket\n    socket.socket()", INCREMENT, Reason.forbidden),
        ("    import os\n    os.abort()", INCREMENT, Reason.killed),
        ("    while True:\n        print(x)", INCREMENT, Reason.output),
        ("    return '1' * 10**7", INCREMENT, Reason.output),
        ("no program", INCREMENT, Reason.no_program),
        ("    return {x, (x, 1j)}", check(STUB, "assert candidate(b'1') == {b'1', (b'1', 1j)}"), Reason.ok),
    ],
)  # fmt: skip
def test_verdict_reasons(judge: CodeJudge, answer: str, row: dict, reason: Reason) -> None:
    outcome = judge.judge(answer, row)
    assert outcome.reason is reason, outcome
    assert judge.judge(LONG, ADD).reason is Reason.ok
    assert judge.judge("    return x + 1", INCREMENT).reason is Reason.ok


FORGERIES = {
    "writes everywhere": 'for fd in range(64):\n    try:\n        os.write(fd, b\'"passed"\\n{"score": 1}\\n\')\n'
    "    except OSError:\n        pass\n",
    "equals anything": "class Any(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n",
    "patches what compares": "import builtins, json\nbuiltins.AssertionError = Warning\nbuiltins.all = lambda _: True\n"
    "json.dumps = lambda _: 'passed'\njson.loads = lambda _: 1\n",
    "leaves early": "import atexit, os\natexit.register(os._exit, 0)\n",
    "reads the test": "import gc, sys\nfound = [o for o in gc.get_objects() if 'assert' in str(o)[:10000]]\n"
    "frame = sys._getframe()\nwhile frame:\n    found += map(str, frame.f_locals.values())\n    frame = frame.f_back\n"
    "assert not any('== 2 and' in str(o) for o in found)\n",
    "takes its caller": "import sys\nsys.modules['__main__'].check = sys.exit\n",
}


@runs
@pytest.mark.parametrize("name", FORGERIES)
def test_verdict_cannot_be_forged(judge: CodeJudge, name: str) -> None:
    trick = FORGERIES[name]
    wrong = trick.replace("\n", "\n    ").rstrip(" ")
    ends = ["    return Any(7)" if "Any" in trick else "    return 'passed'", "    sys.exit(0)"]
    for answer in [trick + "def f(x):\n" + end for end in ends] + [f"    {wrong}{end}" for end in ends]:
        fenced = f"```python\nimport os, sys\n{answer}\n```" if answer.startswith(trick) else answer
        outcome = judge.judge(fenced, INCREMENT)
        assert outcome.reason in (Reason.wrong, Reason.error), (answer, outcome)
        assert outcome.reason is not Reason.error or "==" not in outcome.detail
    assert judge.judge(f"import os, sys\n{trick}print('passed')", ADD).reason in (Reason.wrong, Reason.error)
    assert judge.judge("    return x + 1", INCREMENT).reason is Reason.ok


@runs
def test_first_failed_test_ends_the_run() -> None:
    judge = CodeJudge(20.0)
    slow = "x = input()\nprint(x)\nwhile x == 'never':\n    pass"
    assert judge.judge(slow, script(("a", "b"), ("never", "never"))).reason is Reason.wrong
    judge.sandbox.close()


@runs
def test_deadline_covers_all_tests() -> None:
    judge = CodeJudge(1.0)
    naps = script(*[("0.2", "0.2")] * 50)
    assert judge.judge("import time\nx = input()\ntime.sleep(float(x))\nprint(x)", naps).reason is Reason.timeout
    assert judge.judge("    while True:\n        pass", INCREMENT).reason is Reason.timeout
    judge.sandbox.close()


@runs
def test_pool_returns_reasons() -> None:
    with closing(JudgePool("code", timeout=TIMEOUT_S, processes=2)) as pool:
        verdicts = pool.judge([("", LONG, ADD), ("", "print(1)", ADD), ("", "1 / 0", ADD), ("", LONG, {})])
    assert verdicts[:2] == [Verdict(1.0, Status.ok, "ok"), Verdict(0.0, Status.ok, "wrong")]
    assert verdicts[2] == Verdict(0.0, Status.ok, "error") and verdicts[3].status is Status.error


@runs
def test_no_process_outlives_a_killed_judge() -> None:
    before = descendants()
    command = [sys.executable, "-m", "realhf.rewards.judge.server", "code", "60"]
    judge = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert judge.stdin is not None and judge.stdout is not None
    assert json.loads(judge.stdout.readline()).get("ready")
    request = {"prompt": "", "answer": "while True:\n    pass", "row": ADD}
    judge.stdin.write(json.dumps(request).encode() + b"\n")
    judge.stdin.flush()
    while len(mine := descendants() - before) < 3:  # the judge, the sandbox, the program
        time.sleep(0.01)
    os.killpg(judge.pid, signal.SIGKILL)
    judge.communicate()
    assert have_exited(mine)


@runs
def test_unordered_outputs() -> None:
    judge = CodeJudge(20.0, unordered=True)
    score = judge("", "print('b a')", script(("", "a\nb")))
    assert score == 1.0 and isinstance(score, ScoreWithReason) and score.reason == "ok"
    judge.sandbox.close()


@pytest.mark.slow
@runs
def test_human_eval(judge: CodeJudge) -> None:
    if not HUMAN_EVAL.is_file():
        pytest.skip(f"third-party data {HUMAN_EVAL.name} is not available")
    with gzip.open(HUMAN_EVAL, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == 164
    for raw in rows:
        name, right = raw["entry_point"], raw["canonical_solution"]
        row = {"stub": raw["prompt"], "test": raw["test"], "entry_point": name}
        broken = f"{right}\n\nright = {name}\n\ndef {name}(*arguments):\n    return [right(*arguments)]\n"
        assert judge.judge(right, row).reason is Reason.ok, raw["task_id"]
        assert judge.judge(broken, row).reason is Reason.wrong, raw["task_id"]
        assert judge.judge(f"```python\n{raw['prompt']}{right}\n```", row).reason is Reason.ok, raw["task_id"]


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("1\n2\n", "1\n2", True),
        (" 1 \r\n\n 2", "1\n2\n\n", True),
        ("1 2", "1\n2", False),
        ("2\n1", "1\n2", False),
        ("0.3333333", "0.33333330001", True),
        ("0.33", "0.34", False),
        ("3", "3.0", True),
        ("1000000", "1000001", False),
        ("1e3", "1000.0", True),
        ("x = 1.0", "x = 1.00", True),
        ("x = 1.0", "y = 1.00", False),
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("inf", "1e400", False),
        ("1e400", "2e400", False),
        ("1_0", "10", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_same_output(given: str, wanted: str, same: bool) -> None:
    assert same_output(given, wanted) is same


@given(st.text(), st.text())
def test_same_output_is_reflexive_and_symmetric(a: str, b: str) -> None:
    assert same_output(a, a) and same_output(f"\n{a}\n", a)
    assert same_output(a, b) == same_output(b, a) and (same_output(a, b, unordered=True) or not same_output(a, b))


@given(st.integers(), st.integers())
def test_integers_are_compared_exactly(a: int, b: int) -> None:
    assert same_word(str(a), str(b)) == same_value(a, b) == (a == b)


@given(st.floats(-1e300, 1e300))
def test_floats_are_compared_up_to_rounding(x: float) -> None:
    assert same_value(x, x) and same_value(x * (1 + 1e-7), x) and same_word(repr(x), f"{x:.17e}")
    assert not same_value(x + abs(x) * 1e-3 + 1, x) and not same_value(math.inf, x)


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ((1, [2.0]), [1, [2]], True),
        ([1, 2], [1, 2, 3], False),
        ({1: (True,), None: 2}, {"1": [True], "null": 2}, True),
        ({"a": 1}, {"b": 1}, False),
        ({b"a": 1, (1,): 2}, {"a": 1, "[1]": 2}, False),
        ({1, 2}, [1, 2], False),
        ("a", "a", True),
        (None, None, True),
        ("1", 1, False),
        (10**400, 1.5, False),
        (0.1 + 0.2, 0.3, True),
    ],
)
def test_same_value(given: object, wanted: object, same: bool) -> None:
    assert same_value(given, wanted) is same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5,
)  # fmt: skip
PLAIN = st.recursive(KEYS | st.sets(KEYS), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))


@given(JSON)
def test_every_json_value_equals_itself(value: object) -> None:
    assert same_value(json.loads(json.dumps(value)), value)


@given(PLAIN)
def test_plain_values_round_trip(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


def test_other_values_raise() -> None:
    for value in (object(), len, [iter("")], bytearray(b"")):
        with pytest.raises(TypeError, match="cannot be compared"):
            encode(value)
    for form in (["list"], ["function", []], ["list", 3], ["set", [["list", []]]]):
        with pytest.raises((ValueError, TypeError)):
            decode(form)
