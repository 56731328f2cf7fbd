"""Readers of flags' values. Each returns the value, or raises argparse's error that says what is wrong.

The ranges are those of the contract that do not depend on the server, so that a mistake is reported before
anything is sent.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.client import Ebnf, Image, JsonSchema, Regex, Tool

Wrong = argparse.ArgumentTypeError

UINT32 = 2**32 - 1


def whole(low: int, high: int) -> Callable[[str], int]:
    """Make a reader of whole numbers from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise Wrong(f"must be a whole number, not {text!r}") from None
        if not low <= value <= high:
            far = f"at most {high}" if value > high else f"{low} or more"
            raise Wrong(f"must be {far}, not {text}")
        return value

    return read


def number(
    low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf
) -> Callable[[str], float]:
    """Make a reader of finite numbers. `low` and `high` are allowed themselves; `above` is not."""
    bounds = [f"above {above:g}"] if above > -math.inf else [f"at least {low:g}"] if low > -math.inf else []
    bounds += [f"at most {high:g}"] if high < math.inf else []

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise Wrong(f"must be a number, not {text!r}") from None
        if not (math.isfinite(value) and low <= value <= high and value > above):
            raise Wrong(f"must be {' and '.join(bounds) or 'finite'}, not {text}")
        return value

    return read


def words(high: int | None = None) -> Callable[[str], str]:
    """Make a reader of text that is not empty and has at most `high` characters."""

    def read(text: str) -> str:
        if not text:
            raise Wrong("must not be empty")
        if high is not None and len(text) > high:
            raise Wrong(f"must have at most {high} characters, not {len(text)}")
        return text

    return read


def bias(text: str) -> tuple[int, float]:
    """Read ID=VALUE."""
    left, equals, right = text.partition("=")
    if not equals:
        raise Wrong(f"must be TOKEN_ID=VALUE, e.g. 50=-2.5, not {text!r}")
    return whole(0, UINT32)(left), number()(right)


def read_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise Wrong(f"cannot read {name}: {error.strerror}") from None
    except ValueError:  # undecodable, or a name with a null byte
        raise Wrong(f"{name} is not a file of UTF-8 text") from None


def image(name: str) -> Image:
    """Read the file of an image. What it is, the server says."""
    try:
        return Image(name)
    except OSError as error:
        raise Wrong(f"cannot read {name}: {error.strerror}") from None
    except ValueError as error:  # a name with a null byte
        raise Wrong(f"cannot read {name!r}: {error}") from None


def json_source(text: str) -> tuple[str, Any]:
    """Read JSON that begins with { or [, or the name of a file that holds JSON. Returns the text and the
    parsed value.
    """
    inline = text.lstrip()[:1] in ("{", "[")
    found = text if inline else read_file(text)
    try:
        return found, json.loads(found)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"{'the value' if inline else text} is not JSON: {error}") from None


def json_object(text: str) -> dict[str, Any]:
    _, value = json_source(text)
    if not isinstance(value, dict):
        raise Wrong("must be a JSON object: {...}")
    return value


def json_schema(text: str) -> JsonSchema:
    """Read a schema. Its text is passed on as it is written, because the order of its properties matters."""
    source, value = json_source(text)
    if not isinstance(value, dict | bool):
        raise Wrong("must be a JSON Schema: {...}")
    return JsonSchema(source)


def tools(text: str) -> list[Tool]:
    """Read a list of tools, or a single one, each bare or in the form of the OpenAI API."""
    _, value = json_source(text)
    entries = value if isinstance(value, list) else [value]
    found: list[Tool] = []
    for i, entry in enumerate(entries):
        try:
            tool = Tool.from_dict(entry)
        except TypeError as error:
            raise Wrong(f"tool {i}: {error}") from None
        if not isinstance(tool.parameters, dict | str | None):
            raise Wrong(f"tool {i}: parameters must be a JSON Schema: {{...}}")
        if tool.name in [other.name for other in found]:
            raise Wrong(f"tool {i}: another tool is called {tool.name!r}, too")
        found.append(tool)
    if not found:
        raise Wrong("must hold at least one tool")
    return found


def grammar(name: str) -> Ebnf:
    source = read_file(name)
    if not source.strip():
        raise Wrong(f"{name} is empty")
    return Ebnf(source)


def regex(text: str) -> Regex:
    return Regex(words()(text))
