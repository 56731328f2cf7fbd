"""What the wire cannot carry, told as the server would tell it: InvalidRequest with the contract's fields."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock.client.errors import InvalidRequest
from penstock.client.status import Violation


@contextlib.contextmanager
def checked(field: str) -> Iterator[None]:
    """Turns what protobuf or json says of a value into InvalidRequest of one field."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InvalidRequest.local([Violation(field, str(error))]) from error


class Violations:
    """Gathers what several fields violate, so that all are told at once."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    @contextlib.contextmanager
    def of(self, field: str) -> Iterator[None]:
        """Like `checked`, but going on after the block; InvalidRequest in it keeps its own fields."""
        try:
            with checked(field):
                yield
        except InvalidRequest as error:
            self._found += error.violations

    def tell(self) -> None:
        """Raises InvalidRequest when there were any."""
        if self._found:
            raise InvalidRequest.local(self._found)
