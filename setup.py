"""Compiles csrc into the package, where a compiler and torch are found; all metadata is in pyproject.toml.

Without them, as in pip's isolated builds, the package contains the sources and compiles them at first use
(``realhf/base/native.py``).
"""

import os
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

native = SimpleNamespace(**runpy.run_path("realhf/base/native.py"))
LIBRARIES = {f"realhf.{library.path.removesuffix('.so').replace('/', '.')}": library
             for library in (native.KERNELS, native.PLANNER)}  # fmt: skip


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
        return f"realhf/{LIBRARIES[fullname].path}"

    def build_extension(self, ext: Extension) -> None:
        """Build one library; setuptools turns a failure into a warning if it is optional."""
        library, target = LIBRARIES[ext.name], Path(self.build_lib, self.get_ext_filename(ext.name))
        target.unlink(missing_ok=True)
        try:
            native.build(library, target, Path(self.build_temp))
        except native.BuildError as error:
            raise CompileError(f"{error}; without it, it is compiled at first use, or {library.fallback}") from error


class BuildPython(build_py):
    """Copies the sources of the libraries into the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("csrc", Path(self.build_lib, "realhf/csrc"), dirs_exist_ok=True)


setup(
    ext_modules=[
        Extension(
            name, sources=sorted(map(os.path.relpath, native.sources(library))), optional=not native.CUDA_REQUIRED
        )
        for name, library in LIBRARIES.items()
    ],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
