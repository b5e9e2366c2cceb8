"""Builds csrc into realhf/ops/_C.so, or says in one line why not; all metadata is in pyproject.toml.

CXX and NVCC name the compilers. The CUDA half is built where nvcc is found and torch has CUDA, or where
REALHF_BUILD_CUDA=1 asks for it; then every failure is an error. The library uses only torch's stable ABI: it needs no
ATen headers, no Python headers, and runs under the torch that built it and every later one.
"""

import importlib.util
import os
import runpy
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

LIBRARY = "realhf.ops._C"
CPU_TORCH = (2, 10)  # the first torch whose stable ABI has what the C++ files use: parallel_for, to, contiguous
CUDA_TORCH = (2, 13)  # and the CUDA files: the native handle of a stream
CUDA_DEMANDED = os.environ.get("REALHF_BUILD_CUDA") == "1"
FLAGS = ["-O3", "-std=c++17", "-DNDEBUG"]
CXX_FLAGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
NVCC_FLAGS = ["-arch=all-major", "--threads=0", "-Xcompiler=-fPIC,-fvisibility=hidden"]


class BuildNative(build_ext):
    """Compiles and links with plain compiler commands: no flags of the Python that happens to run this."""

    def run(self) -> None:
        """Build; what an earlier build left is removed first, so that the library is never older than the sources."""
        if self.inplace:
            Path(self.get_ext_filename(LIBRARY)).unlink(missing_ok=True)
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without a Python version: torch loads the library, Python never imports it."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile every source and link what compiled, the C++ half at least."""
        target = Path(self.build_lib, self.get_ext_filename(ext.name))
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        torch, version, has_cuda = find_torch()
        cxx, nvcc = os.environ.get("CXX", "g++").split(), find_nvcc()
        objects = [self.compile([*cxx, *CXX_FLAGS], source, torch, CPU_TORCH) for source in sources(ext, ".cpp")]
        linker = cxx
        if CUDA_DEMANDED or (nvcc and has_cuda and version >= CUDA_TORCH):
            objects += [self.compile([nvcc, *NVCC_FLAGS], source, torch, CUDA_TORCH) for source in sources(ext, ".cu")]
            linker = [nvcc]
        call([*linker, "-shared", *objects, "-o", str(target), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"])

    def compile(self, compiler: list[str], source: str, torch: Path, abi: tuple[int, int]) -> str:
        """Compile one source against the stable ABI of that torch version and return the object's path."""
        target = os.path.join(self.build_temp, os.path.basename(source) + ".o")
        version = f"-DTORCH_TARGET_VERSION=0x{abi[0]:02x}{abi[1]:02x}000000000000"
        include = ["-isystem", str(torch / "include")]
        call([*compiler, *FLAGS, version, *include, "-c", source, "-o", target])
        return target


def sources(ext: Extension, suffix: str) -> list[str]:
    """Return the extension's sources of one kind."""
    return [source for source in ext.sources if source.endswith(suffix)]


def call(command: list[str]) -> None:
    """Run one compiler command; its own messages go to the console."""
    try:
        failed = subprocess.run(command).returncode
    except OSError:
        failed = True
    if failed:
        raise CompileError(f"'{command[0]}' failed; realhf works without native kernels, on plain torch")


def find_torch() -> tuple[Path, tuple[int, int], bool]:
    """Return where torch is, its version and whether it has CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CompileError(
            "torch is not in the building environment; realhf works without native kernels, on plain torch. "
            "To have them: pip install --no-build-isolation"
        )
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    major, minor = facts["__version__"].split(".")[:2]
    version = (int(major), int(minor))
    needed = CUDA_TORCH if CUDA_DEMANDED else CPU_TORCH
    if version < needed:
        raise CompileError(
            f"torch {major}.{minor} is older than {needed[0]}.{needed[1]}; realhf works without native kernels"
        )
    return Path(spec.origin).parent, version, facts["cuda"] is not None


def find_nvcc() -> str:
    """Return the CUDA compiler, or an empty string; REALHF_BUILD_CUDA=1 makes a missing one an error."""
    in_home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    found = os.environ.get("NVCC") or shutil.which("nvcc") or (str(in_home) if in_home.exists() else "")
    if CUDA_DEMANDED and not found:
        raise CompileError("REALHF_BUILD_CUDA=1, but there is no nvcc on PATH or in CUDA_HOME")
    return found


csrc = Path("csrc")
native = Extension(
    LIBRARY,
    sources=sorted(str(path) for kind in ("*.cpp", "*.cu") for path in csrc.glob(kind)),
    depends=sorted(str(path) for path in csrc.glob("*.h")),
    optional=not CUDA_DEMANDED,
)
setup(
    ext_modules=[native],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
