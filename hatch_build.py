"""Compiles the native library while a wheel is built, so that nobody who installs the wheel needs a compiler.

Where there is no compiler, or the machine is none that the kernels are for, the wheel has no library:
then Penstock compiles it at its first start, or serves without it.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibrary(BuildHookInterface[Any]):
    """Adds the library to the wheel, and names in the wheel's tag the platform that it is for."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return what the build environment needs: JAX, for the headers of its FFI."""
        if platform.machine() != "x86_64" or not any(map(shutil.which, ("c++", "g++", "clang++"))):
            return []
        return [wanted for wanted in self.metadata.core.dependencies if wanted.startswith("jax")]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library for a wheel. An editable one needs none: `make install` compiles it."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root, "runtime")))
        try:
            from penstock.runtime.ops.native.build import (  # noqa: PLC0415
                KERNELS,
                SHIPPED,
                BuildFailed,
                build,
                default_folder,
            )
        except ModuleNotFoundError as error:
            if error.name != "jax":
                raise
            return  # as `dependencies` decided
        library = default_folder() / KERNELS.file_name()
        if not library.is_file():  # otherwise this machine has compiled exactly these sources for itself
            self._folder = tempfile.TemporaryDirectory()
            try:
                library = build(Path(self._folder.name))
            except BuildFailed as error:
                self.app.display_warning(f"the wheel has no native library: {error}")
                return
        inside = SHIPPED.relative_to(Path(self.root, "runtime")) / library.name
        build_data["force_include"][str(library)] = str(inside)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled, when the wheel is written."""
        if self._folder is not None:
            self._folder.cleanup()
