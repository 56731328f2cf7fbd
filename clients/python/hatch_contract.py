"""Puts the code of the contract, `penstock.v1`, into the wheel, from a clone or from an sdist."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Contract(BuildHookInterface[Any]):
    """Adds protos/penstock, which lies two folders up in a clone, and beside this file in an sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Include the contract when a wheel is built; an editable one finds the folder by its path
        instead.
        """
        if version == "editable":
            return
        here = Path(self.root)
        folders = (here / "protos" / "penstock", here.parents[1] / "protos" / "penstock")
        build_data["force_include"][str(next(filter(Path.is_dir, folders)))] = "penstock"
