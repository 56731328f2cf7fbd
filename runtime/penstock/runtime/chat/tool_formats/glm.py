"""The form of GLM-4.5 to 4.7: the name of the function, then pairs of elements.

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

From GLM-4.7 on there are no line breaks between them.
"""

from __future__ import annotations

from penstock.runtime.chat.tool_formats.events import Draft, Events, Tools, attempt, text_before
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, more, run_of, spaces
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

    Only the closing tag, or another call, shows that all arguments have come. A call without it was cut off.
    """
    while (yield from text_before(r, out, (START,))):
        yield from attempt(r, out, START, lambda call: _block(r, call, tools), ends=(END,))


def _block(r: Reader, call: Draft, tools: Tools) -> Wait[bool]:
    yield from literal(r, START)
    yield from spaces(r)
    function = (yield from run_of(r, NAME)).strip()
    if not function or not (yield from more(r)):
        return False
    call.begin(function)
    return (yield from rest_of_function(r, call, ARGUMENTS, tools, function))
