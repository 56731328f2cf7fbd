"""Reads the elements of which calls in XML are made.

Texts have no quotes and no escapes, so they may hold what looks like tags, and models leave out tags or write
them twice. A call is read as its model meant it where only one reading is possible. Where a tag may have
been lost within a text, there is no call: it would have wrong arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.runtime.chat.tool_formats.events import Draft, Tools
from penstock.runtime.chat.tool_formats.json_scan import json_value
from penstock.runtime.chat.tool_formats.reader import (
    SPACES,
    Reader,
    Wait,
    drop,
    literal,
    run_of,
    spaces,
    text_until,
)
from penstock.runtime.chat.tool_formats.xml_values import kinds_of, property_schema, value_json

NAME = re.compile(r'[^\n<>"{}\[\]]*')
"""What the names of functions and arguments may be made of: anything that cannot end them."""


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """How a form spells arguments, and what may follow them."""

    name: str
    """What stands before an argument's name."""
    named: str
    """What stands after it."""
    value: str
    """The tag between that and the value; "" if there is none."""
    begin: str
    """What a value's opening tag begins with. An element within a text begins with it, too."""
    end: str
    """What stands after a value."""
    function_end: str
    after_function: tuple[str, ...]
    """What may stand after a function."""
    on_lines: bool
    """Whether values stand on lines of their own: a line break at the beginning and one at the end belong to
    the tags.
    """


class _Value(NamedTuple):
    json: str
    is_mended: bool = False
    """Whether a tag was missing, or came twice."""
    has_tags: bool = False
    """Whether its text holds what looks like tags."""


def name_before(r: Reader, end: str) -> Wait[str]:
    """Consume a name and the `end` after it. Returns "" if there is none."""
    name = (yield from run_of(r, NAME)).strip()
    return name if (yield from literal(r, end)) else ""


def rest_of_function(r: Reader, call: Draft, tags: ArgumentTags, tools: Tools, function: str) -> Wait[bool]:
    """Consume the arguments of a function and its closing tag, and write each argument to the call when it is
    whole. Returns False as soon as they make no call.

    After an argument, what may stand after a function ends it, too.
    """
    names: set[str] = set()
    is_mended = has_tags = False
    while True:
        if call.is_certain:
            r.mark()  # there is no way back, so that nothing before has to be kept
        yield from spaces(r)
        if (yield from literal(r, tags.function_end)):
            break
        if names and (yield from is_followed(r, tags.after_function)):
            is_mended = True
            break
        name = (yield from name_before(r, tags.named)) if (yield from literal(r, tags.name)) else ""
        if not name or name in names:
            return False
        own = tags.value or f"{tags.name}{name}{tags.named}"
        if tags.value:
            yield from spaces(r)
            if not (yield from literal(r, tags.value)):
                return False
        value = yield from _value(r, tags, tools.get(function, {}), name, own, names)
        if value is None:
            return False
        call.add(f"{', ' if names else '{'}{json.dumps(name, ensure_ascii=False)}: {value.json}")
        names.add(name)
        is_mended, has_tags = is_mended or value.is_mended, has_tags or value.has_tags
        while (yield from is_followed(r, (tags.end,))):
            yield from spaces(r)
            yield from literal(r, tags.end)
            is_mended = True
    if is_mended and has_tags:
        return False
    call.add("}" if names else "{}")
    return True


def is_followed(r: Reader, by: Sequence[str], *, or_end: bool = False) -> Wait[bool]:
    """Tell whether one of `by` comes next, white space aside. Consume nothing. `or_end`: the end of the text,
    also in the middle of one of them, counts too.
    """
    at = r.pos
    yield from spaces(r)
    found = False
    for tag in by:
        found = found or (yield from literal(r, tag, or_end=or_end))
    r.return_to(at)
    return found


def _value(
    r: Reader,
    tags: ArgumentTags,
    parameters: Mapping[str, Any],
    name: str,
    own: str,
    given: Collection[str],
) -> Wait[_Value | None]:
    """Consume the value of an argument and the closing tag, of which `own` is the opening one. Returns None
    if it is not known where the value ends.
    """
    properties = parameters.get("properties")

    def may_follow(other: str) -> bool:
        listed = not isinstance(properties, Mapping) or other in properties
        return listed and other != name and other not in given

    schema = property_schema(parameters, name)
    kinds = kinds_of(schema, parameters)
    if kinds is not None and "string" not in kinds:
        start = r.pos
        found = yield from _json_before_tag(r, tags, may_follow)
        if found is not None:
            return found
        r.return_to(start)
    return (
        yield from _text_before_tag(r, tags, own, may_follow, lambda t: value_json(t, schema, parameters))
    )


def _json_before_tag(r: Reader, tags: ArgumentTags, may_follow: Callable[[str], bool]) -> Wait[_Value | None]:
    yield from spaces(r)
    start = r.pos
    if not (yield from json_value(r)):
        return None
    found = r.text[start : r.pos]
    yield from spaces(r)
    if (yield from literal(r, tags.end)):
        return _Value(found)
    at = r.pos
    ends = yield from literal(r, tags.function_end)
    ends = ends or may_follow((yield from _argument_name(r, tags)))
    r.return_to(at)
    return _Value(found, is_mended=True) if ends else None


def _text_before_tag(
    r: Reader,
    tags: ArgumentTags,
    own: str,
    may_follow: Callable[[str], bool],
    meaning: Callable[[str], str],
) -> Wait[_Value | None]:
    """Consume a text and its closing tag, which is the first that another tag of the call follows, or the end
    of the output.

    If it is missing, the text ends before the tag of an argument that may follow, and before the end of the
    function. Other closing tags in the text must close what was opened in it.
    """
    start = r.pos
    is_mended = has_tags = False
    opened = arguments = 0  # elements that are open in the text, and those of them that look like arguments
    markers = [tags.end, tags.function_end, tags.begin]
    if not tags.name.startswith(tags.begin):
        markers.append(tags.name)
    while tag := (yield from text_until(r, drop, markers)):
        at = r.pos
        if tag == tags.end:
            yield from literal(r, tag)
            after = r.pos
            follow = (tags.name, tags.function_end, *tags.after_function)
            ends = yield from is_followed(r, follow, or_end=not has_tags)
            if not ends and opened == 0:
                ends = yield from is_followed(r, (tags.end,))
                if not ends:
                    return None
            if ends:
                break
            opened, arguments = opened - 1, max(arguments - 1, 0)
        elif tag == tags.function_end:
            yield from literal(r, tag)
            if (yield from is_followed(r, tags.after_function, or_end=True)):
                is_mended, after = True, at
                break
        else:
            is_own = yield from literal(r, own)
            before = _end_of_words(r.text, start, at)
            if is_own and before == start:
                is_mended, start = True, r.pos
                continue
            other = "" if is_own else (yield from _argument_name(r, tags))
            has_lines = tags.on_lines and r.text.startswith("\n", start)
            begins_line = not has_lines or r.text.find("\n", before, at) >= 0
            if other and begins_line and may_follow(other):
                is_mended, after = True, at
                break
            if r.pos == at:
                yield from literal(r, tag)
            opened += tag == tags.begin
            arguments += is_own or bool(other and begins_line and not tags.value)
        has_tags = True
    else:
        return None
    r.pos = after
    if arguments:
        return None  # the text may have swallowed an argument
    text = r.text[start:at]
    if tags.on_lines:
        text = text.removeprefix("\n")
    if tags.on_lines or after == at:
        text = text.removesuffix("\n")
    return _Value(meaning(text), is_mended, has_tags)


def _end_of_words(text: str, start: int, end: int) -> int:
    """Tell where the white space before `end` begins, and so `start` if there is nothing else from there
    on.
    """
    while end > start and text[end - 1] in SPACES:
        end -= 1
    return end


def _argument_name(r: Reader, tags: ArgumentTags) -> Wait[str]:
    """Consume the opening tag of an argument, and return the argument's name. Consume nothing, and return "",
    if none comes.
    """
    at = r.pos
    name = (yield from name_before(r, tags.named)) if (yield from literal(r, tags.name)) else ""
    if not name:
        r.return_to(at)
    return name
