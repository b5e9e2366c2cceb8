"""Symbolic comparisons of hostile answers end at their own limit of processor time, without a pool that kills them."""

import json
import subprocess
import sys

import pytest

from tests.conftest import TIMEOUT_S

MAX_CPU_S = 60
"""Processor time of one process: its imports and three comparisons that have 2 s each."""
CODE = r"""
import json, resource, sys
from realhf.rewards.math.equality import judge_math
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
answers, gold = json.load(sys.stdin)
print([judge_math("", r"\boxed{%s}" % answer, {"solutions": [r"\boxed{%s}" % gold]}) for answer in answers])
"""
HOSTILE = {
    "sums": (r"(x+y+z+w)^{{{}}}-(x-y+z-w)^{{{}}}", r"(x+y)^{400}+(z+w)^{399}"),
    "quotients": (r"\left(\frac{{x+1}}{{x-1}}\right)^{{{}}}+(x+y+1)^{{{}}}", r"(x+y)^{998}(x-y)^{999}"),
}


@pytest.mark.parametrize("form", HOSTILE)
def test_hostile_comparisons_end_at_their_own_limit(form: str) -> None:
    text, gold = HOSTILE[form]
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(MAX_CPU_S)],
        input=json.dumps([[text.format(n, n + 1) for n in (301, 555, 998)], gold]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout) == (0, "[0.0, 0.0, 0.0]\n"), done.stderr
