"""Builds csrc into realhf/ops/_C.so and csrc/planner into realhf/plan/search/_planner.so; both are optional.

CXX and NVCC name the compilers. The CUDA kernels are built if nvcc is found and torch has CUDA, or if
REALHF_BUILD_CUDA=1 requires them, which makes every failure an error. REALHF_CUDA_ARCH is nvcc's -arch. The kernels use
only torch's stable ABI: they need no ATen or Python headers and run with the torch that built them and later ones. The
planner needs only a C++ compiler. All metadata is in pyproject.toml.
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
FALLBACK = {
    KERNELS: "realhf works without native kernels, on plain torch",
    PLANNER: "the plan search runs in Python, more than a hundred times slower",
}
CPU_TORCH = (2, 10)  # first torch whose stable ABI has parallel_for, to and contiguous, for C++
CUDA_TORCH = (2, 13)  # and the native handle of a stream, for CUDA
CUDA_REQUIRED = os.environ.get("REALHF_BUILD_CUDA") == "1"
CXX = os.environ.get("CXX", "g++").split()
FLAGS = ["-O3", "-std=c++17", "-DNDEBUG"]
CXX_FLAGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
CXX_FLAGS += ["-Wno-psabi"]  # vector arguments stay within one library
CUDA_ARCH = os.environ.get("REALHF_CUDA_ARCH", "all-major")
NVCC_FLAGS = [f"-arch={CUDA_ARCH}", "--threads=0", "-Xcompiler=-fPIC,-fvisibility=hidden"]


class Torch(NamedTuple):
    home: Path
    version: tuple[int, int]
    has_cuda: bool


class BuildNative(build_ext):
    """Compiles and links with plain compiler commands, without the flags of the running Python."""

    def run(self) -> None:
        """Remove previous libraries first, so that a failed build leaves none that are older than the sources."""
        if self.inplace:
            for ext in self.extensions:
                Path(self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without a Python version, since Python does not import the library."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Build one library; setuptools turns a failure into a warning if it is optional."""
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
            raise CompileError(f"{error}; {FALLBACK[ext.name]}") from error

    def build_kernels(self, ext: Extension, target: Path, torch: Torch) -> None:
        """Compile the C++ files, the CUDA files if possible, and link them."""
        linker = CXX
        objects = self.compile([*linker, *CXX_FLAGS], ext, ".cpp", torch, CPU_TORCH)
        if torch.has_cuda or CUDA_REQUIRED:
            try:
                nvcc = find_nvcc()
                objects += self.compile([nvcc, *NVCC_FLAGS], ext, ".cu", torch, CUDA_TORCH)
                linker = [nvcc]
            except CompileError as error:
                if CUDA_REQUIRED:
                    raise
                self.warn(f"building native kernels without CUDA: {error}")
        call([*linker, "-shared", *objects, "-o", str(target), f"-L{torch.home / 'lib'}", "-ltorch_cpu", "-lc10"])

    def compile(self, compiler: list[str], ext: Extension, kind: str, torch: Torch, abi: tuple[int, int]) -> list[str]:
        """Compile the sources with suffix ``kind`` against a stable ABI version; return the objects."""
        if torch.version < abi:
            raise CompileError(f"torch {torch.version} is older than {abi}")
        version = f"-DTORCH_TARGET_VERSION=0x{abi[0]:02x}{abi[1]:02x}000000000000"
        include = ["-isystem", str(torch.home / "include")]
        sources = [source for source in ext.sources if source.endswith(kind)]
        objects = [os.path.join(self.build_temp, os.path.basename(source) + ".o") for source in sources]
        commands = [
            [*compiler, *FLAGS, version, *include, "-c", source, "-o", output]
            for source, output in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(call, commands))
        return objects


def call(command: list[str]) -> None:
    try:
        failed = subprocess.run(command).returncode
    except OSError:
        failed = True
    if failed:
        raise CompileError(f"'{command[0]}' failed")


def find_torch() -> Torch:
    """Locate the torch of the build environment without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CompileError("the build environment has no torch (pip install --no-build-isolation would use yours)")
    home = Path(spec.origin).parent
    facts = runpy.run_path(str(home / "version.py"))
    major, minor = facts["__version__"].split(".")[:2]
    return Torch(home, (int(major), int(minor)), facts["cuda"] is not None)


def find_nvcc() -> str:
    in_home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or (str(in_home) if in_home.exists() else "")
    if not nvcc:
        raise CompileError("no nvcc on PATH or in CUDA_HOME")
    return nvcc


def extension(name: str, folder: str, optional: bool) -> Extension:
    files = {kind: sorted(str(path) for path in Path(folder).glob(f"*.{kind}")) for kind in ("cpp", "cu", "h")}
    return Extension(name, sources=files["cpp"] + files["cu"], depends=files["h"], optional=optional)


setup(
    ext_modules=[
        extension(KERNELS, "csrc", optional=not CUDA_REQUIRED),
        extension(PLANNER, "csrc/planner", optional=True),
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
