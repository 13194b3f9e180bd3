"""Beside pyproject.toml: compiles the CPU kernels into what is installed, where there is a C++ compiler.

Without one, or where it fails, the package is complete all the same: the kernels are compiled at first use, or torch's run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
KERNELS = Path("kernels", "cpu")


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tokenbus_kernels_build", HERE / KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """A wheel gets the library beside build.py. An editable installation gets none: its sources change, the cache follows them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        build = load_build()
        folder = Path(self.build_lib, "tokenbus", KERNELS)
        for old in folder.glob(build.file_name("*")):
            old.unlink()
        try:
            build.build(folder / build.file_name(build.source_key()))
        except build.BuildError as error:
            print(f"tokenbus: the CPU kernels were not compiled: {error}", file=sys.stderr)  # noqa: T201

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        made = Path(self.build_lib, "tokenbus", KERNELS).glob("*.so")
        return [*super().get_outputs(include_bytecode), *map(str, made)]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """The wheel holds machine code: it is for one platform."""
        return load_build().compiler() is not None


class AnyPythonWheel(bdist_wheel):
    """The machine code knows nothing of Python's version."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPythonWheel})
