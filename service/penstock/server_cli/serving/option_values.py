"""Reads the values of `penstock serve`'s flags, and makes options of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OptionsT = TypeVar("OptionsT", bound="DataclassInstance")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def options_of(kind: type[OptionsT], args: argparse.Namespace, **made: Any) -> OptionsT:
    """Make the options `kind` of a command line: each field takes the value of the flag whose `dest` has its
    name, unless `made` has it. A field without a flag keeps its default. Raises ConfigError.
    """
    names = (field.name for field in dataclasses.fields(kind))
    given = {name: getattr(args, name) for name in names if name not in made and hasattr(args, name)}
    return kind(**given, **made)


def size(text: str) -> int:
    """Parse a number of bytes with an optional binary unit: 512M, 2G, 1.5GiB."""
    number = text.upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        value = float(number.removesuffix(unit)) * _UNITS[unit]
        whole = int(value)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 512M or 2G") from None
    if whole < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one byte")
    return whole


def size_or_none(text: str) -> int:
    """Parse a number of bytes as `size`, or "none" as 0."""
    return 0 if text == "none" else size(text)


def port(text: str) -> int | None:
    """Parse a port, or "none"."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def octal(text: str) -> int:
    """Parse the mode of a file."""
    try:
        return int(text, 8)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an octal number such as 660") from None


def path(text: str) -> Path:
    """Parse a path; `~` is the user's home."""
    return Path(text).expanduser()


def path_or_off(text: str) -> Path | None:
    """Parse a path, or "off"."""
    return None if text == "off" else path(text)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
