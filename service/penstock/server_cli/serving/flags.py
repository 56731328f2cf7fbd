"""Flags that set options: how they are named and read, and how errors name them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OptionsT = TypeVar("OptionsT", bound="DataclassInstance")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class AddFlag(Protocol):
    """Adds a flag, see `Flags.group`."""

    def __call__(self, option: str, text: str, metavar: str | None = None, **more: Any) -> None: ...


class Flags:
    """The flags of a command that set options: fields of frozen dataclasses."""

    def __init__(self, parser: argparse.ArgumentParser, *options: DataclassInstance) -> None:
        """`options` have the default values. No two may have a field of the same name with a flag."""
        self._parser = parser
        self._options = options
        self.by_option: dict[str, str] = {}
        """The flag that sets each option, such as "--max-num-seqs" by "max_num_seqs"."""

    def group(self, title: str, description: str | None = None) -> AddFlag:
        """Begin a heading of --help. What is returned adds the flag of an option under it.

        The flag is named after the option, without the `_s` of seconds, unless `name` says otherwise. How it
        is read follows from the option's type, unless `type`, `choices` or `action` is given. The default is
        the option's own; --help says it, unless the text has a "default:".
        """
        group = self._parser.add_argument_group(title, description)

        def add(option: str, text: str, metavar: str | None = None, **more: Any) -> None:
            default, kind = self._find(option)
            name = more.pop("name", "--" + option.removesuffix("_s").replace("_", "-"))
            if "action" not in more:
                more = {"type": _READERS.get(kind.split()[0]), "metavar": metavar, **more}
                if kind.startswith("float") and metavar is None:
                    more["metavar"] = "SECONDS"
                if default is not None and "default:" not in text:
                    text += f"; default: %(default){'g' if kind.startswith('float') else 's'}"
            elif metavar is not None:
                more["metavar"] = metavar
            text = text.removeprefix("; ")
            action = group.add_argument(name, **{"dest": option, "default": default, "help": text, **more})
            self.by_option[action.dest] = action.option_strings[0]

        return add

    def _find(self, option: str) -> tuple[Any, str]:
        """Find the default and the type of an option. A field that holds options of its own is none."""
        ((default, kind),) = (
            (default, str(field.type))
            for options in self._options
            for field in dataclasses.fields(options)
            if field.name == option and not dataclasses.is_dataclass(default := getattr(options, option))
        )
        return default, kind


def options_of(kind: type[OptionsT], args: argparse.Namespace, **made: Any) -> OptionsT:
    """Make the options `kind` of a command line: each field takes the value of the flag whose `dest` has its
    name, unless `made` has it. A field without a flag keeps its default. Raises ConfigError.
    """
    names = (field.name for field in dataclasses.fields(kind))
    given = {name: getattr(args, name) for name in names if name not in made and hasattr(args, name)}
    return kind(**given, **made)


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Write the message of a ConfigError as it is told on the command line: with `flags` in place of options.

    An error names options by their fields, because a program that embeds the engine sets those. A name with
    an underscore is replaced wherever it stands, unless it is part of a path or of a file's name, or is
    quoted as somebody's value. Other names, such as `port` and `dtype`, are words, too, and fields of
    config.json. They are replaced where they begin a problem ("port: must be from 0 to 65535"), if the whole
    message begins with an option.
    """
    names = "|".join(name for name in flags if "_" in name)
    option = rf"(?<![\w/.\-'\"])(?:{names})(?![\w/\-'\"]|\.\w)"
    if message.partition(": ")[0] in flags:
        option += rf"|(?:^|(?<=; ))(?:{'|'.join(flags)})(?=: )"
    return re.sub(option, lambda match: flags[match[0]], message)


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


def named_directory(text: str) -> tuple[str, Path]:
    """Parse NAME=DIR."""
    name, separator, directory = text.partition("=")
    if not name or not separator or not directory:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, path(directory)


def port(text: str) -> int | None:
    """Parse a port, or "none"."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def count_or_auto(text: str) -> int | None:
    """Parse a number, or "auto" as None."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


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


def size_text(count: int) -> str:
    """Write a number of bytes as `size` reads it: 64K, 512M."""
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K"


_READERS: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "Path": path}
"""How a flag is read, by the type of its option; others are texts."""
