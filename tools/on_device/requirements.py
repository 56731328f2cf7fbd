"""Which of the carried wheels a machine needs. Pure functions over names, versions and bounds.

Only the standard library is there when this is asked, so versions are compared here, by their numbers alone:
a release candidate counts as the release.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?", re.DOTALL)
_PYTHON = re.compile(r"\s*python_version\s*(>=|<)\s*['\"]([\d.]+)['\"]\s*")
_BOUND = re.compile(r"\s*(===|==|~=|!=|>=|<=|>|<)\s*([^\s,]+)\s*")


class Requirement(NamedTuple):
    """What is wanted of a package."""

    name: str
    """In the form that `canonical` gives."""
    bounds: str
    """Such as ">=1.2,<2"; empty: any version."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that was carried along."""

    file: str
    name: str
    version: str
    requirements: tuple[Requirement, ...]


def canonical(name: str) -> str:
    """Return the one form of a package's name: Google_CRC32C and google-crc32c are the same package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement(text: str) -> Requirement | None:
    """Read a line such as "jax[cuda13]>=0.10,<0.11 ; python_version < '3.12'"; None if only an extra or
    another Python wants it. Other conditions count as met, which costs no more than a look at a package that
    is not needed.
    """
    found = _REQUIREMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"this is no requirement: {text}")
    name, bounds, condition = found.groups()
    if condition and re.search(r"\bextra\b", condition):
        return None
    python = _PYTHON.fullmatch(condition or "")
    if python is not None and not _is_within("{}.{}".format(*sys.version_info), *python.groups()):
        return None
    return Requirement(canonical(name), bounds.strip().strip("()").strip())


def fits(version: str, bounds: str) -> bool:
    """Say whether a version is within all bounds."""
    return all(_is_within(version, *_parts(bound)) for bound in bounds.split(",") if bound.strip())


def _parts(bound: str) -> tuple[str, str]:
    found = _BOUND.fullmatch(bound)
    if found is None:
        raise ValueError(f"this is no bound of a version: {bound}")
    operator, wanted = found.groups()
    return operator, wanted


def _is_within(version: str, operator: str, wanted: str) -> bool:
    have, than = _numbers(version), _numbers(wanted.removesuffix(".*"))
    width = max(len(have), len(than))
    if wanted.endswith(".*"):
        is_equal = _padded(have, width)[: len(than)] == than
    else:
        is_equal = _padded(have, width) == _padded(than, width)
    is_less = _padded(have, width) < _padded(than, width)
    match operator:
        case "==" | "===":
            return is_equal
        case "!=":
            return not is_equal
        case ">=":
            return not is_less
        case "<":
            return is_less
        case "<=":
            return is_less or is_equal
        case ">":
            return not (is_less or is_equal)
        case _:  # ~=
            return not is_less and _padded(have, width)[: len(than) - 1] == than[:-1]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    if found is None:
        raise ValueError(f"this is no version: {version}")
    return tuple(map(int, found[1].split(".")))


def _padded(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    return numbers + (0,) * (width - len(numbers))


def choose(
    wheels: Iterable[Wheel], wanted: Iterable[Requirement], installed: Mapping[str, str]
) -> tuple[Wheel, ...]:
    """Choose the wheels of what is missing or has an unfit version, and then of what those want. What the
    machine has and fits stays, and so does what it wants: JAX with CUDA, above all. `installed` has versions
    by canonical names.
    """
    carried = {wheel.name: wheel for wheel in wheels}
    chosen: dict[str, Wheel] = {}
    queue = list(wanted)
    while queue:
        name, bounds = queue.pop()
        if name in carried and name not in chosen and _lacks(installed, name, bounds):
            chosen[name] = carried[name]
            queue += carried[name].requirements
    return tuple(chosen[name] for name in sorted(chosen))


def lacking(wanted: Iterable[Requirement], installed: Mapping[str, str]) -> tuple[str, ...]:
    """Write a sentence for each package that is missing or unfit."""
    return tuple(
        f"{name} {installed.get(name, 'is missing')}{f', and {bounds} is wanted' if bounds else ''}"
        for name, bounds in sorted(set(wanted))
        if _lacks(installed, name, bounds)
    )


def _lacks(installed: Mapping[str, str], name: str, bounds: str) -> bool:
    return name not in installed or not fits(installed[name], bounds)
