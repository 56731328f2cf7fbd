"""Calls as an element with the name of the function, which holds one element for each argument. Qwen3-Coder
writes

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

Seed-OSS and MiniMax M2 have other tags, and no line breaks around values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.runtime.chat.tool_formats.events import Draft, Events, Tools, attempt, text_before
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, spaces
from penstock.runtime.chat.tool_formats.xml_elements import (
    ArgumentTags,
    is_followed,
    name_before,
    rest_of_function,
)


@dataclass(frozen=True, slots=True)
class Tags:
    """How one family spells such calls."""

    start: str
    """Announces one or more functions."""
    end: str
    function: str
    """What stands before a function's name."""
    function_end: str
    argument: str
    """What stands before an argument's name."""
    argument_end: str
    named: str
    """What stands after a name."""
    on_lines: bool
    """Whether values stand on lines of their own."""

    @property
    def arguments(self) -> ArgumentTags:
        """How arguments are spelled."""
        return ArgumentTags(
            name=self.argument,
            named=self.named,
            value="",
            begin=self.argument_end.replace("</", "<").removesuffix(">"),
            end=self.argument_end,
            function_end=self.function_end,
            after_function=(self.end, self.function, self.start),
            on_lines=self.on_lines,
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that must stay visible while special tokens are skipped."""
        return (self.start, self.end)

    def before_function(self, name: str) -> str:
        """Write the opening tag of a function."""
        return f"{self.function}{name}{self.named}"

    def before_value(self, name: str) -> str:
        """Write the opening tag of an argument."""
        return f"{self.argument}{name}{self.named}"


QWEN3_CODER = Tags(
    start="<tool_call>",
    end="</tool_call>",
    function="<function=",
    function_end="</function>",
    argument="<parameter=",
    argument_end="</parameter>",
    named=">",
    on_lines=True,
)
SEED_OSS = Tags(
    start="<seed:tool_call>",
    end="</seed:tool_call>",
    function="<function=",
    function_end="</function>",
    argument="<parameter=",
    argument_end="</parameter>",
    named=">",
    on_lines=False,
)
MINIMAX_M2 = Tags(
    start="<minimax:tool_call>",
    end="</minimax:tool_call>",
    function='<invoke name="',
    function_end="</invoke>",
    argument='<parameter name="',
    argument_end="</parameter>",
    named='">',
    on_lines=False,
)


def parser(tags: Tags) -> Callable[[Reader, Events, Tools], Wait[None]]:
    """Make a parser of outputs with these tags. The form is explicit, so a name that is not known is a call
    too.

    Models forget the tag that announces functions. A function without it is a call if its name is known. Each
    call is told when its function is closed; where a grammar forces calls, its arguments are told one by one.
    If the block is broken after a call, it ends there, and its rest is text.
    """
    arguments, ends = tags.arguments, (tags.function_end, tags.end)

    def function(r: Reader, call: Draft, tools: Tools, *, is_known: bool = False) -> Wait[bool]:
        yield from spaces(r)
        if not (yield from literal(r, tags.function)):
            return False
        name = yield from name_before(r, tags.named)
        if not name:
            return False
        if is_known and not (
            name in tools and (yield from is_followed(r, (tags.argument, tags.function_end)))
        ):
            return False
        call.begin(name)
        if not (yield from rest_of_function(r, call, arguments, tools, name)):
            return False
        # Its arguments may come too late.
        return call.kept != "{}" or not (yield from is_followed(r, (tags.argument,)))

    def parse(r: Reader, out: Events, tools: Tools) -> Wait[None]:
        def first(call: Draft) -> Wait[bool]:
            is_announced = yield from literal(r, tags.start)
            return (yield from function(r, call, tools, is_known=not is_announced))

        while marker := (yield from text_before(r, out, (tags.start, tags.function))):
            is_call = yield from attempt(r, out, marker, first, ends=ends)
            while is_call:
                r.mark()
                yield from spaces(r)
                if (yield from literal(r, tags.end, or_end=True)):
                    r.keep()
                    break
                r.back()
                is_call = yield from attempt(r, out, "", lambda call: function(r, call, tools), ends=ends)

    return parse
