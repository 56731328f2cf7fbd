"""Reads the bodies of requests, within bounds on their size, their depth and the time that they take."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from penstock.openai import failures
from penstock.openai.endpoints import ignored_in
from penstock.openai.failures import INVALID, ApiError, ClientGone
from penstock.openai.front import front_of
from penstock.openai.schemas.base import Body
from penstock.openai.settings import Settings

BodyT = TypeVar("BodyT", bound=Body)

MAX_DEPTH: Final = 100
MAX_PARTS: Final = 1_000_000
"""How many commas and brackets a body may have: parsing takes time for each, and holds up other requests."""
INLINE_BYTES: Final = 64 << 10
"""A body of more bytes is parsed in a thread."""
_MOST_PROBLEMS: Final = 5
_MOST_ERRORS: Final = 100
"""How many of pydantic's errors are looked at."""
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
BIGGEST_INT_DIGITS: Final = 20
"""A whole number of more digits is refused."""
_PYTHONS_OBJECT: Final = re.compile(r"a valid dictionary( or instance of \w+)?")
_UNKNOWN_KIND: Final = ("union_tag_invalid", "union_tag_not_found")
"""pydantic's errors of an object whose `type` is none of those that are known, or is missing."""


async def read_body(request: Request, model: type[BodyT]) -> BodyT:
    """Read a request's body as this model. Raises ApiError; its `param` is the path of the first
    bad field. What of the body has no effect is noted in `ignored_in`.
    """
    front = front_of(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be application/json, not {kind!r}", code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"the body must not be encoded as {coding!r}", code="unsupported_media_type")
    ignored = ignored_in(request.scope)
    with front.incoming.counted() as take:
        data = await _receive(request, front.settings, take)
        if len(data) <= INLINE_BYTES:
            return _parsed(data, model, ignored)
        async with front.heavy:
            return await asyncio.to_thread(_parsed, data, model, ignored)


async def _receive(request: Request, settings: Settings, take: Callable[[int], None]) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes)
    data = bytearray()
    try:
        async with asyncio.timeout(settings.receive_limit_s):
            async for part in request.stream():
                if len(data) + len(part) > settings.max_body_bytes:
                    raise _too_large(settings.max_body_bytes)
                take(len(part))
                data += part
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {settings.receive_limit_s:g} s", code="body_timeout"
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(data)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body may have at most {most} bytes", code="body_too_large")


def _parsed(data: bytes, model: type[BodyT], ignored: set[str] | None = None) -> BodyT:
    """Parse the body. The fields that it ignores are added to `ignored`."""
    value = json_object(data)
    try:
        return model.model_validate(value, context=ignored)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), value, model) from None


def json_object(data: bytes, what: str = "the body") -> dict[str, Any]:
    """Read JSON strictly, within bounds. Raises ApiError, whose message says `what` is wrong."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_PARTS:
        raise ApiError(413, f"{what} has more than {MAX_PARTS} values", code="body_too_large")
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except UnicodeDecodeError as error:
        raise _not_json(what, f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _not_json(what, f"it has more than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise _not_json(what, str(error)) from None
    if not isinstance(value, dict):
        raise _not_json(what, "it must be an object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_too_deep(value):
        raise _not_json(what, f"it has more than {MAX_DEPTH} levels")
    if _SURROGATE.search(data) and not _is_unicode(value):
        raise _not_json(what, "half of a surrogate pair is no character")
    return value


def _not_json(what: str, why: str) -> ApiError:
    return ApiError(400, f"{what} is not a JSON object: {why}", INVALID, code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:100]!r} stands twice in an object")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:50]} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > BIGGEST_INT_DIGITS:
        raise ValueError(f"the number {text[:50]} is too large")
    return int(text)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _is_unicode(value: Any) -> bool:
    """Say whether UTF-8 has all characters of the texts in this value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refusal(errors: Sequence[ErrorDetails], value: Any, model: type[Body]) -> ApiError:
    """Make the error of a body that does not match its model, with the fields as they stand in the body."""
    found: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for error in errors[:_MOST_ERRORS]:
        found.setdefault(_path(error, value), []).append(error)
    # A value that could be one of several kinds has errors for each of them; those further inside say more.
    paths = [path for path in found if not any(_is_above(path, other) for other in found)]
    told = [_told(found[path], path, model) for path in paths[:_MOST_PROBLEMS]]
    message = " ".join(error.message for error in told)
    if len(paths) > _MOST_PROBLEMS:
        message += f" And {len(paths) - _MOST_PROBLEMS} more."
    return ApiError(400, message, INVALID, told[0].param, told[0].code)


def _path(error: ErrorDetails, value: Any) -> tuple[str | int, ...]:
    """Tell where in the body an error is. pydantic's own locations also name the members of unions."""
    path: list[str | int] = []
    here: Any = value
    steps = error["loc"]
    for number, step in enumerate(steps):
        if _has(here, step):
            here = here[step]
        elif not (error["type"] == "missing" and number == len(steps) - 1):
            continue
        path.append(step)
    if error["type"] in _UNKNOWN_KIND and isinstance(here, dict):
        name = str(error.get("ctx", {}).get("discriminator", ""))  # "'role'", or "function()"
        path.append(name.strip("'") if name.startswith("'") else "type")
    return tuple(path)


def _has(here: Any, step: str | int) -> bool:
    """Say whether the step is an index of this list or a key of this object."""
    if isinstance(here, dict):
        return step in here
    return isinstance(here, list) and isinstance(step, int)


def _is_above(path: tuple[str | int, ...], other: tuple[str | int, ...]) -> bool:
    return len(path) < len(other) and other[: len(path)] == path


def _written(path: tuple[str | int, ...]) -> str:
    """Write the path as OpenAI writes it: "messages[0].content"."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step[:100]}" if text else step[:100]
    return text


def _told(errors: Sequence[ErrorDetails], path: tuple[str | int, ...], model: type[Body]) -> ApiError:
    """Make the error of one field. A value that could be one of several kinds has an error for each of
    them.
    """
    name, kind = _written(path), errors[0]["type"]
    if kind == "extra_forbidden":
        why = _why_unsupported(path, model)
        return failures.unknown(name) if why is None else failures.unsupported_parameter(name, f"{why}.")
    if kind == "missing":
        return failures.missing(name)
    said = " or ".join(dict.fromkeys(_said(error) for error in errors)) + "."
    if kind == "literal_error" or kind in _UNKNOWN_KIND:
        return failures.unsupported_value(name, said)
    if kind.endswith("_type"):
        return failures.invalid_type(name, said)
    return failures.invalid_value(name, said)


def _said(error: ErrorDetails) -> str:
    if error["type"] in _UNKNOWN_KIND:
        tags = str(error.get("ctx", {}).get("expected_tags", "")).replace("'<", "'").replace(">'", "'")
        return f"must be one of {tags}" if tags else "it is missing, or the value has the wrong type"
    text = error["msg"].removeprefix("Value error, ").replace(" should ", " must ", 1)
    text = text.removeprefix("Input ").replace(" after validation", "")
    text = _PYTHONS_OBJECT.sub("an object", text).replace("a valid list", "an array")
    if error["type"] == "literal_error":  # pydantic writes its values as Python does, not as JSON
        text = re.sub(r"(?<!')\b(False|True)\b", lambda match: match[0].lower(), text)
    return text[:1].lower() + text[1:]


def _why_unsupported(path: tuple[str | int, ...], model: type[Body]) -> str | None:
    """Say why the model refuses the field, by its name without the indices of lists: "messages.audio"."""
    return model.unsupported.get(".".join(step for step in path if isinstance(step, str)))
