"""Products of bfloat16 pairs: by the instructions of this machine, emulated, and by those of Arm in an emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest

from realhf.base import native
from tests.debian import why_missing

REPOSITORY, HERE = Path(__file__).parents[3], Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def build(compiler: str, program: Path, *flags: str) -> Path:
    torch = native.find_torch()
    includes = [f"-I{REPOSITORY / 'csrc'}", f"-I{HERE}", "-isystem", str(torch.home / "include")]
    command = [compiler, *native.CXX_FLAGS, "-std=c++17", "-O2", "-Wno-unused-function",
               *native.abi_flags("native kernels", torch.version), *includes, *flags, str(HERE / "products.cpp"), "-o",
               str(program)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, done.stderr[-2000:]
    return program


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_instructions_of_this_machine(tmp_path: Path) -> None:
    has_them = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert run(build("g++", tmp_path / "products")) == ("dot" if has_them else "no dot")


def test_emulated_instructions(tmp_path: Path) -> None:
    assert run(build("g++", tmp_path / "products", "-DREALHF_EMULATE_BF16_DOT")) == "dot"


@pytest.mark.slow
def test_instructions_of_arm(tmp_path: Path) -> None:
    """In an emulator, on a processor with and one without them."""
    needed = ("qemu-aarch64", "aarch64-linux-gnu-g++")
    if reason := why_missing(needed, ("qemu-user", "g++-aarch64-linux-gnu", "libc6-dev-arm64-cross")):
        pytest.skip(reason)
    program = build(needed[1], tmp_path / "products", "-static")
    assert run(needed[0], "-cpu", "max", program) == "dot"
    assert run(needed[0], "-cpu", "cortex-a57", program) == "no dot"
