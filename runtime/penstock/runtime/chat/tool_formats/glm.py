"""The form of GLM-4.5 to 4.7: the name of the function, then pairs of elements.

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

From GLM-4.7 on there are no line breaks between them.
"""

from __future__ import annotations

from penstock.runtime.chat.tool_formats.events import Call, Events, Tools
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, run_of, spaces, text_until
from penstock.runtime.chat.tool_formats.xml_elements import NAME, call_of, name_before, value_before

START = "<tool_call>"
END = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
MARKERS = (START, END, KEY, KEY_END, VALUE, VALUE_END)


def parse(r: Reader, out: Events, tools: Tools) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not known is a call too.

    Only the closing tag shows that all arguments have come, so a call without it is text.
    """
    while (yield from text_until(r, out.text, (START,))):
        r.mark()
        call = yield from _block(r, tools)
        if call is None:
            r.back()
            out.text(r.take(len(START)))
        else:
            r.keep()
            out.call(call)


def _block(r: Reader, tools: Tools) -> Wait[Call | None]:
    yield from literal(r, START)
    yield from spaces(r)
    function = (yield from run_of(r, NAME)).strip()
    arguments: dict[str, str] = {}
    while function:
        yield from spaces(r)
        if (yield from literal(r, END)):
            return call_of(function, arguments)
        name = (yield from name_before(r, KEY_END)) if (yield from literal(r, KEY)) else ""
        yield from spaces(r)
        if not name or name in arguments or not (yield from literal(r, VALUE)):
            return None
        value = yield from value_before(r, VALUE_END, (KEY, END), tools, function, name, on_lines=False)
        if value is None:
            return None
        arguments[name] = value
    return None
