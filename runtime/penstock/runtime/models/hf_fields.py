"""Reads a config.json mapping field by field, so that no field goes unnoticed.

Every field is read, known to be harmless, or a problem. All problems are reported in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from penstock.runtime.errors import ConfigError

REQUIRED: Final = object()
_MOST: Final = 1 << 33
"""No size of a model is so large, and arrays cannot have larger ones."""
MOST_LAYERS: Final = 1 << 12
_LARGEST: Final = 3e38
"""Below the largest number of float32, in which models compute."""


class Fields:
    """A mapping that records which fields were read.

    A wrong value is noted as a problem and a placeholder is returned, so that one pass finds every problem.
    """

    def __init__(
        self, data: Mapping[str, object], prefix: str = "", problems: list[str] | None = None
    ) -> None:
        self._data, self._prefix = data, prefix
        self._read: set[str] = set()
        self._names: Mapping[str, str] = {}
        self.problems: list[str] = [] if problems is None else problems

    def call(self, names: Mapping[str, str]) -> None:
        """Say what files of the family call fields, by their usual names. Both names are read."""
        self._names = names

    def _own(self, name: str) -> str:
        own = self._names.get(name, name)
        return own if own in self._data else name

    def __contains__(self, name: str) -> bool:
        """Say whether the field is present, even as null."""
        return self._own(name) in self._data

    def problem(self, name: str, text: str) -> None:
        """Note that field `name` cannot be served."""
        self.problems.append(f"{self._prefix}{self._own(name)}: {text}")

    def raw(self, name: str) -> object:
        """Return the value as it is, None if absent. Mark the field as read."""
        own = self._own(name)
        self._read.add(own)
        return self._data.get(own)

    def ignore(self, names: Collection[str]) -> None:
        """Mark fields as read that may have any value."""
        for name in names:
            self.raw(name)

    def rest(self) -> Mapping[str, object]:
        """Return the fields that nobody has read yet, which count as read from now on."""
        unread = {name: value for name, value in self._data.items() if name not in self._read}
        self._read.update(unread)
        return unread

    def integer(self, name: str, default: object = REQUIRED, minimum: int = 1, most: int = _MOST) -> int:
        """Read an int of at least `minimum` and below `most`; null counts as absent."""
        value = self.optional_integer(name, minimum, most)
        if value is not None:
            return value
        if isinstance(default, int):
            return default
        if self.raw(name) is None:
            self.problem(name, "is required")
        return minimum

    def num_layers(self, default: object = REQUIRED) -> int:
        """Tell how many layers the model has: so few that each of them can be described."""
        return self.integer("num_hidden_layers", default, most=MOST_LAYERS)

    def optional_integer(self, name: str, minimum: int = 1, most: int = _MOST) -> int | None:
        """Read an int of at least `minimum` and below `most`, or None when absent or null."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < most:
            bound = "" if not isinstance(value, int) or value < most else f" and below {most}"
            self.problem(name, f"must be an integer of at least {minimum}{bound}, not {value!r}")
            return None
        return value

    def number(self, name: str, default: object = REQUIRED) -> float:
        """Read a number above zero; null counts as absent."""
        value = self.optional_number(name)
        if value is not None:
            return value
        if isinstance(default, float):
            return default
        if self.raw(name) is None:
            self.problem(name, "is required")
        return 1.0

    def optional_number(self, name: str) -> float | None:
        """Read a number above zero, or None when absent or null."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
            self.problem(name, f"must be a number above 0 and below {_LARGEST}, not {value!r}")
            return None
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Read true or false; null counts as absent."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(name, f"must be true or false, not {value!r}")
            return default
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Read one id, a list of ids, or null: always as a tuple."""
        value = self.raw(name)
        values: Sequence[object] = value if isinstance(value, list) else () if value is None else (value,)
        ids = tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
        if len(ids) != len(values):
            self.problem(name, f"must be a token id or a list of them, not {value!r}")
        return ids

    def mapping(self, name: str) -> Mapping[str, object]:
        """Read a JSON object; absent or null is an empty one."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problem(name, f"must be an object, not {value!r}")
            return {}
        return value

    def only(self, name: str, *supported: object) -> None:
        """Note a problem unless the field is absent, null, or one of the values that this build computes."""
        value = self.raw(name)
        if value is not None and value not in supported:
            self.problem(name, f"{value!r} is not supported; supported: {', '.join(map(repr, supported))}")

    def refuse_unread(self, harmless: Collection[str] = ()) -> None:
        """Note every field that was not read, is not `harmless`, and is not off (null, false or empty)."""
        for name in sorted(set(self._data) - self._read):
            value = self._data[name]
            off = value is None or value is False or value in ("", [], {})
            if not off and name not in harmless and not name.startswith("_"):
                self.problem(
                    name,
                    f"{value!r} is not supported: this build does not know the field and it may change the "
                    "computation (remove it from config.json if it does not)",
                )

    def finish(self) -> None:
        """Raise ConfigError listing every problem noted so far, if there is any."""
        if self.problems:
            raise ConfigError("config.json cannot be served: " + "; ".join(self.problems))
