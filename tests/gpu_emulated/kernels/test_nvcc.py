"""nvcc compiles every kernel for three architectures, without warnings and without spilled registers."""

import re
import subprocess
from pathlib import Path

import pytest

from realhf.base import native
from tests.conftest import TIMEOUT_S

pytestmark = pytest.mark.slow
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
FLAGS = ["-Xptxas", "-v", "-Xptxas", "-warn-spills", "-Werror", "all-warnings"]
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SOURCES = [path for path in native.sources(native.KERNELS) if path.suffix == ".cu"]


def nvcc() -> str:
    try:
        return native.find_nvcc()
    except native.BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", [(2, 10), (2, 13)], ids=["torch2.10", "torch2.13"])
def test_kernels_compile_without_warnings_and_spills(source: Path, version: tuple[int, int], tmp_path: Path) -> None:
    """The headers are those of the installed torch; the older ABI has another function for the stream."""
    compiler = nvcc()
    abi = native.abi_flags("CUDA kernels", version)
    include = ["-isystem", str(native.find_torch().home / "include")]
    architectures = ARCHITECTURES if version == native.NATIVE_STREAM else ARCHITECTURES[:1]
    codes = [f"-gencode=arch={name.replace('sm', 'compute')},code={name}" for name in architectures]
    command = [compiler, *codes, *native.NVCC_FLAGS, *native.FLAGS, *FLAGS, *abi, *include]
    report = compile_with([*command, "-c", str(source), "-o", str(tmp_path / "kernels.o")])
    found = SPILLS.findall(report)
    assert found and set(found) == {("0", "0")}, report
    assert all(f"for '{name}'" in report for name in architectures)


def compile_with(command: list[str]) -> str:
    """Return what the compiler prints; fail if it prints a warning."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    return done.stdout + done.stderr
