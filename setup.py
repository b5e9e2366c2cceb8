"""Builds csrc into realhf/ops/_C.so, and csrc/planner into realhf/plan/search/_planner.so, or says in one line why not.

CXX and NVCC name the compilers. The CUDA half is built where nvcc is found and torch has CUDA, or where
REALHF_BUILD_CUDA=1 asks for it; then every failure is an error. REALHF_CUDA_ARCH narrows the GPUs that it is built
for, in the words of nvcc's -arch. The kernels use only torch's stable ABI: they need no ATen headers, no Python
headers, and run under the torch that built them and every later one. The planner needs a C++ compiler and nothing else.
All metadata is in pyproject.toml.
"""

import importlib.util
import os
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

KERNELS, PLANNER = "realhf.ops._C", "realhf.plan.search._planner"
INSTEAD = {
    KERNELS: "realhf works without native kernels, on plain torch",
    PLANNER: "plans are searched in Python, more than a hundred times slower",
}
CPU_TORCH = (2, 10)  # the first torch whose stable ABI has what the C++ files use: parallel_for, to, contiguous
CUDA_TORCH = (2, 13)  # and the CUDA files: the native handle of a stream
CUDA_DEMANDED = os.environ.get("REALHF_BUILD_CUDA") == "1"
CXX = os.environ.get("CXX", "g++").split()
FLAGS = ["-O3", "-std=c++17", "-DNDEBUG"]
CXX_FLAGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
CXX_FLAGS += ["-Wno-psabi"]  # vectors pass between functions of one library
CUDA_ARCH = os.environ.get("REALHF_CUDA_ARCH", "all-major")
NVCC_FLAGS = [f"-arch={CUDA_ARCH}", "--threads=0", "-Xcompiler=-fPIC,-fvisibility=hidden"]


class Torch(NamedTuple):
    """The torch to build against: its folder, its version, and whether it has CUDA."""

    home: Path
    version: tuple[int, int]
    has_cuda: bool


class BuildNative(build_ext):
    """Compiles and links with plain compiler commands: no flags of the Python that happens to run this."""

    def run(self) -> None:
        """Build; what an earlier build left is removed first, so that the library is never older than the sources."""
        if self.inplace:
            for ext in self.extensions:
                Path(self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without a Python version: torch loads the library, Python never imports it."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Build the library; where that is optional, a failure becomes one line of warning in the caller."""
        target = Path(self.build_lib, self.get_ext_filename(ext.name))
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        try:
            if ext.name == PLANNER:
                call([*CXX, *CXX_FLAGS, *FLAGS, "-shared", *ext.sources, "-o", str(target)])
            else:
                self.build_kernels(ext, target, find_torch())
        except CompileError as error:
            if not ext.optional:
                raise
            raise CompileError(f"{error}; {INSTEAD[ext.name]}") from error

    def build_kernels(self, ext: Extension, target: Path, torch: Torch) -> None:
        """Compile the C++ half, the CUDA half where it is wanted and can be had, and link them."""
        linker = CXX
        objects = self.compile([*linker, *CXX_FLAGS], ext, ".cpp", torch, CPU_TORCH)
        if torch.has_cuda or CUDA_DEMANDED:
            try:
                nvcc = find_nvcc()
                objects += self.compile([nvcc, *NVCC_FLAGS], ext, ".cu", torch, CUDA_TORCH)
                linker = [nvcc]
            except CompileError as error:
                if CUDA_DEMANDED:
                    raise
                self.warn(f"native kernels are for CPUs only: {error}")
        call([*linker, "-shared", *objects, "-o", str(target), f"-L{torch.home / 'lib'}", "-ltorch_cpu", "-lc10"])

    def compile(self, compiler: list[str], ext: Extension, kind: str, torch: Torch, abi: tuple[int, int]) -> list[str]:
        """Compile the sources of one kind against the stable ABI of that torch version and return the objects."""
        if torch.version < abi:
            raise CompileError(f"torch {torch.version} is older than {abi}")
        version = f"-DTORCH_TARGET_VERSION=0x{abi[0]:02x}{abi[1]:02x}000000000000"
        include = ["-isystem", str(torch.home / "include")]
        sources = [source for source in ext.sources if source.endswith(kind)]
        objects = [os.path.join(self.build_temp, os.path.basename(source) + ".o") for source in sources]
        commands = [
            [*compiler, *FLAGS, version, *include, "-c", source, "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(call, commands))
        return objects


def call(command: list[str]) -> None:
    """Run one compiler command; its own messages go to the console."""
    try:
        failed = subprocess.run(command).returncode
    except OSError:
        failed = True
    if failed:
        raise CompileError(f"'{command[0]}' failed")


def find_torch() -> Torch:
    """Return what torch the building environment has, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CompileError("the building environment has no torch (pip install --no-build-isolation would use yours)")
    home = Path(spec.origin).parent
    facts = runpy.run_path(str(home / "version.py"))
    major, minor = facts["__version__"].split(".")[:2]
    return Torch(home, (int(major), int(minor)), facts["cuda"] is not None)


def find_nvcc() -> str:
    """Return the CUDA compiler."""
    in_home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    found = os.environ.get("NVCC") or shutil.which("nvcc") or (str(in_home) if in_home.exists() else "")
    if not found:
        raise CompileError("no nvcc on PATH or in CUDA_HOME")
    return found


def extension(name: str, folder: str, optional: bool) -> Extension:
    """Return the library that a folder's sources make."""
    found = {kind: sorted(str(path) for path in Path(folder).glob(f"*.{kind}")) for kind in ("cpp", "cu", "h")}
    return Extension(name, sources=found["cpp"] + found["cu"], depends=found["h"], optional=optional)


setup(
    ext_modules=[
        extension(KERNELS, "csrc", optional=not CUDA_DEMANDED),
        extension(PLANNER, "csrc/planner", optional=True),
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
