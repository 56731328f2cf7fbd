"""Makes exact what llguidance 1.9 honours only approximately in a JSON Schema: narrows the schema where what
is left is still useful, and refuses it elsewhere.

- Its numbers are doubles, read to within one unit in the last place, and large negative ones in an enum end
  the process. So constants must be exact, bounds are rounded inwards and kept within 2**53, and multiples
  must be small enough for its 32-bit arithmetic.
- It treats "above 3" as "at least 3" if the other bound lies between 3 and 4, and likewise for other whole
  numbers and, mirrored, for negative ones. Bounds may come together from several parts of a schema. So an
  exclusive bound becomes the next number of 15 digits (next to 0: 1e-22) if the schema has any other bound
  that near to it.
- "time" and "date-time" may have a 60th second in any minute. RFC 3339 allows that for true leap seconds
  only, and few readers accept it at all, so here seconds end at 59.
- It does not notice that a member which is not in "properties" is given twice. Readers keep one of the two,
  and then "minProperties" might not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from penstock.runtime.schemas.neutral import without_neutral

_VALUES = frozenset({"const", "enum"})
"""Keywords that hold values which the output may be."""
_REMARKS = frozenset({"default", "examples"})
"""Keywords that hold values without effect."""
_DEFINITIONS = frozenset({"$defs", "definitions"})
_MAPS = _DEFINITIONS | {"properties", "patternProperties"}
"""Keywords that hold schemas by names that the caller chooses."""

COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
"""Keywords whose values are whole numbers, which may be written as 1.0."""

_LARGEST = 2**53
_DIGITS = 15
"""A decimal number of at most this many digits, with an exponent within `_EXPONENT`, is the same double to
every reader."""
_EXPONENT = 22
_MAX_MULTIPLE = 10**8
"""Largest "multipleOf", without its decimal point."""

_INWARDS = {
    "minimum": Context(prec=_DIGITS, rounding=ROUND_CEILING),
    "exclusiveMinimum": Context(prec=_DIGITS, rounding=ROUND_CEILING),
    "maximum": Context(prec=_DIGITS, rounding=ROUND_FLOOR),
    "exclusiveMaximum": Context(prec=_DIGITS, rounding=ROUND_FLOOR),
}
_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
"""The formats that llguidance knows."""
_TIMES = frozenset({"date-time", "time"})
_NO_LEAP_SECOND = {"pattern": "^[^:]*:[^:]*:[0-5]"}


class GrammarError(ValueError):
    """The source of a grammar is refused. The message says why, in llguidance's words if that refused it."""


@dataclass(frozen=True, slots=True)
class _Document:
    """What the parts of a schema need to know of the whole of it."""

    crowded: frozenset[int]
    """Whole numbers from which exclusive bounds must keep a distance."""
    counts_contained: bool
    """See `without_neutral`."""
    ignores_formats: bool
    """Whether a format that is not known is ignored."""
    refers: bool
    """Whether there is a reference anywhere, so that definitions may be used."""


def narrow(schema: Mapping[str, Any], *, counts_contained: bool, ignores_formats: bool) -> dict[str, Any]:
    """Make a schema that accepts what `schema` does, less what llguidance would not do exactly. Numbers that
    are not integers come as Decimal and leave as float. Raises GrammarError.

    `counts_contained`: see `without_neutral`. `ignores_formats`: whether a format that is not known is
    ignored, and not refused.
    """
    crowded = frozenset(_parts_with_bounds(schema))
    return _narrowed(schema, _Document(crowded, counts_contained, ignores_formats, refers(schema)))


def refers(value: Any) -> bool:
    """Say whether there is a reference anywhere in a schema."""
    if isinstance(value, list):
        return any(map(refers, value))
    return isinstance(value, dict) and ("$ref" in value or any(map(refers, value.values())))


def _parts_with_bounds(value: Any) -> Iterator[int]:
    """Yield the whole part of every bound that is not a whole number, anywhere in the schema."""
    if isinstance(value, list):
        for item in value:
            yield from _parts_with_bounds(item)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _parts_with_bounds(item)
            if key in _INWARDS and _is_number(item):
                bound = _INWARDS[key].plus(Decimal(item))
                if not _is_whole(bound):
                    yield int(bound)


def _narrowed(schema: Mapping[str, Any], document: _Document) -> dict[str, Any]:
    schema = without_neutral(schema, counts_contained=document.counts_contained)
    schema = {key: _count(value) if key in COUNTS else value for key, value in schema.items()}
    if document.ignores_formats and isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    if not document.refers:
        schema = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    _check_members(schema)
    new = {key: _under(key, value, schema, document) for key, value in schema.items()}
    named, also = new.get("format"), new.get("allOf", [])
    if isinstance(named, str) and named in _TIMES and isinstance(also, list):
        new["allOf"] = [*also, _NO_LEAP_SECOND]
    return new


def _under(key: str, value: Any, schema: Mapping[str, Any], document: _Document) -> Any:
    """Return the new value of a keyword of the schema."""
    if key in _VALUES:
        return _constant(value)
    if key in _REMARKS:
        return None if key == "default" else []
    if key in _MAPS and isinstance(value, dict):
        return {name: _schemas(inner, document) for name, inner in value.items()}
    if _is_number(value):
        if key in _INWARDS:
            # In draft 4 a bound is exclusive if a boolean keyword beside it says so.
            exclusive = key.startswith("exclusive") or schema.get(_EXCLUSIVE.get(key, "")) is True
            return _bound(key, Decimal(value), document.crowded if exclusive else frozenset())
        if key == "multipleOf":
            return _multiple(Decimal(value))
    return _schemas(value, document)


def _schemas(value: Any, document: _Document) -> Any:
    """Narrow a schema, or a list of schemas; leave any other value as it is, for llguidance to judge."""
    if isinstance(value, dict):
        return _narrowed(value, document)
    if isinstance(value, list):
        return [_schemas(item, document) for item in value]
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


def _count(value: Any) -> Any:
    return _spelt(value) if isinstance(value, Decimal) else value


def _bound(key: str, value: Decimal, crowded: frozenset[int]) -> int | float:
    upper = _INWARDS[key].rounding == ROUND_FLOOR
    beyond = value < -_LARGEST if upper else value > _LARGEST
    if beyond or (value and value.adjusted() < -_EXPONENT):
        raise GrammarError(f"{key}: {_brief(value)} is too large or too close to 0 to be held exactly")
    if abs(value) > _LARGEST:
        return _LARGEST if upper else -_LARGEST
    if not _is_whole(value):
        return _spelt(_INWARDS[key].plus(value))
    if value in crowded and (value <= 0 if upper else value >= 0):
        return _spelt(-_next(-value) if upper else _next(value))
    return _spelt(value)


def _next(value: Decimal) -> Decimal:
    """Return the smallest number of 15 digits above `value`, which is not negative."""
    return Context(prec=_DIGITS).next_plus(value) if value else Decimal(1).scaleb(-_EXPONENT)


def _multiple(value: Decimal) -> int | float:
    scaled = value.normalize().scaleb(max(0, -int(value.normalize().as_tuple().exponent)))
    if not 0 < scaled <= _MAX_MULTIPLE or not _is_short(value):
        raise GrammarError(f"multipleOf: {_brief(value)} must be above 0 and of at most 8 digits")
    return _spelt(value)


def _spelt(value: Decimal) -> int | float:
    """Spell the number as Python writes it: without a ".0", which would turn a number of 16 digits into one
    of 17.
    """
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
