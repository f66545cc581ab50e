"""Build the C extensions: `python scripts/build_extensions.py FOLDER`, or through hatchling (see `pyproject.toml`)."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

MODULES = ("backends.drafting._suffix", "gateway.rooms.recorder._units", "policies.features._tail")


IN_CHECKOUT = MODULES[:1]  # suffix drafting, which takes 30 times as long in Python; the others save microseconds


def build(root: Path, folder: Path, modules: Iterable[str] = MODULES) -> list[Path]:
    """Compile the modules for this interpreter into a folder, and return the files."""
    sources = {name: root.joinpath(*name.split(".")).with_suffix(".c") for name in modules}
    extensions = [Extension(name, [str(source)], extra_compile_args=["-O3"]) for name, source in sources.items()]
    command = build_ext(Distribution({"ext_modules": extensions}))
    command.build_lib = str(folder)
    with tempfile.TemporaryDirectory() as temporary:
        command.build_temp = temporary
        command.ensure_finalized()
        command.run()
    return [Path(output) for output in command.get_outputs()]


class ExtensionsHook(BuildHookInterface[Any]):
    """Adds the modules to the wheel. For an editable installation, builds what a checkout needs beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the modules, except on big-endian processors, which they do not support."""
        self._built = tempfile.TemporaryDirectory()
        if version == "editable":
            with contextlib.suppress(CompileError):  # there is no compiler, or no Python.h
                build(Path(self.root), Path(self.root), IN_CHECKOUT)
            return
        if sys.byteorder != "little":
            return
        folder = Path(self._built.name)
        for file in build(Path(self.root), folder):
            build_data["force_include"][str(file)] = str(file.relative_to(folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the built files, which are in the wheel by now."""
        self._built.cleanup()


if __name__ == "__main__":
    build(Path(__file__).parents[1], Path(sys.argv[1]))
