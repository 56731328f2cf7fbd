"""What llguidance 1.9 honours only nearly in a JSON Schema, made exact: narrowed where what is left still
serves, refused elsewhere.

- Its numbers are doubles, read to within one unit in the last place, and large negative ones in an enum end
  the process. So constants must be exact, bounds are rounded inwards and kept within 2**53, and multiples are
  small enough for its arithmetic in 32 bits.
- "time" and "date-time" may have a 60th second in any minute. RFC 3339 knows that of true leap seconds only,
  and few readers know it at all: here seconds end at 59.
- It does not see that a member that is not in "properties" is given twice. Readers keep one of the two, and
  then "minProperties" might not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

_VALUES = frozenset({"const", "enum"})
"""Keywords that hold values to write."""
_REMARKS = frozenset({"default", "examples"})
"""Keywords that hold values to pass over."""
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords that hold schemas by a name of the caller's choice."""

_LARGEST = 2**53
_DIGITS = 15
"""A decimal number of so many digits, and an exponent within `_EXPONENT`, is one double to every reader."""
_EXPONENT = 22
_MAX_MULTIPLE = 10**8
"""Of "multipleOf" without its decimal point."""

_INWARDS = {
    "minimum": Context(prec=_DIGITS, rounding=ROUND_CEILING),
    "exclusiveMinimum": Context(prec=_DIGITS, rounding=ROUND_CEILING),
    "maximum": Context(prec=_DIGITS, rounding=ROUND_FLOOR),
    "exclusiveMaximum": Context(prec=_DIGITS, rounding=ROUND_FLOOR),
}
_TIMES = frozenset({"date-time", "time"})
_NO_LEAP_SECOND = {"pattern": "^[^:]*:[^:]*:[0-5]"}


class GrammarError(ValueError):
    """The source of a grammar is refused; the message says why, in llguidance's words where it refused."""


def narrow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that accepts what `schema` does, less what llguidance would not do exactly. Numbers that are
    not integers come as Decimal and leave as float. Raises GrammarError.
    """
    _check_members(schema)
    new = {key: _under(key, value) for key, value in schema.items()}
    named, also = new.get("format"), new.get("allOf", [])
    if isinstance(named, str) and named in _TIMES and isinstance(also, list):
        new["allOf"] = [*also, _NO_LEAP_SECOND]
    return new


def _under(key: str, value: Any) -> Any:
    """What becomes of the value of a keyword."""
    if key in _VALUES:
        return _constant(value)
    if key in _REMARKS:
        return None if key == "default" else []
    if key in _MAPS and isinstance(value, dict):
        return {name: _schemas(schema) for name, schema in value.items()}
    if _is_number(value):
        if key in _INWARDS:
            return _bound(key, Decimal(value))
        if key == "multipleOf":
            return _multiple(Decimal(value))
    return _schemas(value)


def _schemas(value: Any) -> Any:
    """A schema, or several in a list; anything else as it is, for llguidance to judge."""
    if isinstance(value, dict):
        return narrow(value)
    if isinstance(value, list):
        return [_schemas(item) for item in value]
    return float(value) if isinstance(value, Decimal) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _constant(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_constant(item) for item in value]
    if not _is_number(value):
        return value
    number = Decimal(value)
    if not (abs(number) <= _LARGEST if _is_whole(number) else _is_short(number)):
        raise GrammarError(
            f"the constant {_brief(number)} is not exact in every reader: whole numbers may reach 2**53, "
            f"others have {_DIGITS} digits"
        )
    return _spelt(number)


def _bound(key: str, value: Decimal) -> int | float:
    upper = _INWARDS[key].rounding == ROUND_FLOOR
    beyond = value < -_LARGEST if upper else value > _LARGEST
    if beyond or (value and value.adjusted() < -_EXPONENT):
        raise GrammarError(f"{key}: {_brief(value)} is too large or too close to 0 to be held exactly")
    if abs(value) > _LARGEST:
        return _LARGEST if upper else -_LARGEST
    return _spelt(value if _is_whole(value) else _INWARDS[key].plus(value))


def _multiple(value: Decimal) -> int | float:
    scaled = value.normalize().scaleb(max(0, -int(value.normalize().as_tuple().exponent)))
    if not 0 < scaled <= _MAX_MULTIPLE or not _is_short(value):
        raise GrammarError(f"multipleOf: {_brief(value)} must be above 0 and of at most 8 digits")
    return _spelt(value)


def _spelt(value: Decimal) -> int | float:
    """As Python writes it: without the ".0" which would make a number of 16 digits one of 17."""
    return int(value) if _is_whole(value) else float(value)


def _is_whole(value: Decimal) -> bool:
    return value == value.to_integral_value()


def _is_short(value: Decimal) -> bool:
    return value.is_zero() or (
        len(value.normalize().as_tuple().digits) <= _DIGITS and abs(value.adjusted()) <= _EXPONENT
    )


def _brief(value: Decimal) -> str:
    return f"{value:.18g}"


def _check_members(schema: Mapping[str, Any]) -> None:
    least, required = schema.get("minProperties"), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > len(set(map(str, required))) + 1:
        raise GrammarError(
            "minProperties may be at most one more than the number of required properties: others are not "
            "checked for names given twice"
        )
