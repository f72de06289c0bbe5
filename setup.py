"""Compiles Motet's C++ kernels during `pip install`. Without a compiler Motet installs all the same, and says so.

Set MOTET_KERNELS=skip to leave them out; `motet doctor --build` compiles them later.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = "motet/kernels/cpu"


def building() -> ModuleType:
    """motet.kernels.cpu.building, before there is a package to import."""
    spec = importlib.util.spec_from_file_location("building", Path(__file__).parent / "src" / NATIVE / "building.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDING = building()


def wanted() -> bool:
    """Whether kernels are to be compiled: there is a compiler, and nobody said no."""
    if os.environ.get("MOTET_KERNELS") == "skip":
        return False
    try:
        BUILDING.compiler()
    except BUILDING.CannotBuild as error:
        print(f"motet: installing without its own CPU kernels: {error}", file=sys.stderr)
        return False
    return True


class BuildKernels(build_py):
    """Python files, then one library for each form of the kernels."""

    made: tuple[str, ...] = ()

    def run(self) -> None:
        """Also compile; what fails is printed, and the package is built without it."""
        super().run()
        if not wanted():
            return
        directory = Path("src" if self.editable_mode else self.build_lib) / NATIVE / "built"
        try:
            made = BUILDING.build(directory)
        except BUILDING.CannotBuild as error:
            print(f"motet: installing without its own CPU kernels: {error}", file=sys.stderr)
        else:
            self.made = tuple(str(directory / BUILDING.file_name(form)) for form, why in made.items() if why is None)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The libraries too."""
        return [*super().get_outputs(include_bytecode), *self.made]


class Compiled(Distribution):
    """With kernels the package belongs to one kind of processor."""

    def has_ext_modules(self) -> bool:
        """Whether it is compiled."""
        return wanted()


class Wheel(bdist_wheel):
    """For every Python 3 of that processor: the kernels know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """No Python in particular."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if self.distribution.has_ext_modules() else (python, abi, platform)


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel}, distclass=Compiled)
