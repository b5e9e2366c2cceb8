"""A model that vLLM supports on a CPU (head size 32), and the interpreter with vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import EXAMPLES
from tests.vllm.model import INTERPRETER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not (INTERPRETER.parents[1] / ".installed").exists():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"no vLLM in {INTERPRETER}: make test-vllm"))


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One-digit sums, a tokenizer, and a Llama of 2 layers with 4 heads of size 32, from examples/arithmetic.py."""
    root = tmp_path_factory.mktemp("sums")
    sizes = {"digits": 1, "sft-rows": 40, "train-rows": 32, "valid-rows": 5, "hidden": 128, "layers": 2}
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    subprocess.run([sys.executable, str(EXAMPLES / "arithmetic.py"), str(root), *options], check=True)
    return root
