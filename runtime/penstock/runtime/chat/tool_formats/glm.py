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
from penstock.runtime.chat.tool_formats.xml_elements import NAME, ArgumentTags, rest_of_function

START = "<tool_call>"
END = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
MARKERS = (START, END, KEY, KEY_END, VALUE, VALUE_END)
ARGUMENTS = ArgumentTags(
    name=KEY,
    named=KEY_END,
    value=VALUE,
    begin=VALUE.removesuffix(">"),
    end=VALUE_END,
    function_end=END,
    after_function=(START,),
    on_lines=False,
)


def parse(r: Reader, out: Events, tools: Tools) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not known is a call too.

    Only the closing tag, or another call, shows that all arguments have come. A call without it is text.
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
    return (yield from rest_of_function(r, ARGUMENTS, tools, function)) if function else None
