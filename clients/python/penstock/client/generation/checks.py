"""Reports values that the wire cannot carry as the server would: InvalidRequest with the
contract's fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from penstock.client.errors import InvalidRequest
from penstock.client.status import Violation


@contextlib.contextmanager
def checked(field: str) -> Iterator[None]:
    """Turn an error that protobuf or json raises for a value into InvalidRequest of `field`."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InvalidRequest.local([Violation(field, str(error))]) from error


@contextlib.contextmanager
def named(option: str) -> Iterator[None]:
    """Put the option's name before a TypeError, because protobuf's own does not say which value is meant."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{option}: {error}") from error


def one_of(name: str, names: Sequence[str]) -> str:
    """Return the name in the contract's upper case. Raises ValueError for one that is not in `names`."""
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names)}, not {name!r}")
    return name.upper()


class Violations:
    """Collects the violations of several fields, so that all are reported at once."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    @contextlib.contextmanager
    def of(self, field: str) -> Iterator[None]:
        """Do as `checked` does, but go on after the block. An InvalidRequest that is raised inside keeps its
        own fields.
        """
        try:
            with checked(field):
                yield
        except InvalidRequest as error:
            self._found += error.violations

    def tell(self) -> None:
        """Raise InvalidRequest when there were any."""
        if self._found:
            raise InvalidRequest.local(self._found)
