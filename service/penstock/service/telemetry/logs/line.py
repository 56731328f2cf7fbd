"""Messages of the log that are values with fields, and not texts."""

from __future__ import annotations

import abc
from collections.abc import Mapping


class Line(abc.ABC):
    """A message that `log.info(line)` takes in place of a text. It must not change after that, because it is
    formatted later, on another thread.
    """

    __slots__ = ()

    @abc.abstractmethod
    def __str__(self) -> str:
        """The message in words."""

    @abc.abstractmethod
    def fields(self) -> Mapping[str, object]:
        """The same as values that JSON has, by name."""
