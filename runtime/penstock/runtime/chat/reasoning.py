"""Splits an output into what the model thought and what it answers: `<think>...</think>` and similar tags.

The block comes first in an output, white space aside. Either the model writes the opening tag, or the
template's generation prompt ends with it and the output begins within the block (DeepSeek-R1,
Qwen3-Thinking); then a model may write the tag once more. A tag anywhere else is text. Without a closing tag
everything is reasoning. White space around the tags belongs to them and is dropped. Outputs without a block
stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.runtime.chat.tool_formats.reader import (
    SPACES,
    Reader,
    SpaceHolder,
    Stream,
    Wait,
    literal,
    rest,
    spaces,
    text_until,
)


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """A pair of tags."""

    name: str
    start: str
    end: str
    title: str = ""
    """What follows the opening tag and belongs to it."""
    opens_with: tuple[str, ...] = ()
    """What a prompt may end with after the opening tag, to begin the reasoning for the model."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that must stay visible while special tokens are skipped."""
        return (self.start, self.end)

    def opened_by(self, prompt: str) -> bool:
        """Say whether the prompt ends within a block, because its opening tag is the last thing in it, or is
        followed only by what may begin the reasoning.
        """
        prompt = prompt.rstrip(SPACES)
        return any(prompt.endswith(f"{self.start}{self.title}{more}") for more in ("", *self.opens_with))

    def closed_by(self, prompt: str) -> bool:
        """Say whether the prompt ends with a complete block, as Qwen3's does with thinking switched off."""
        return prompt.rstrip(SPACES).endswith(self.end)


REASONING_FORMS: Mapping[str, ReasoningForm] = {
    form.name: form
    for form in (
        ReasoningForm("think", "<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ and most others
        ReasoningForm(  # Seed-OSS, whose template begins the reasoning where it has no budget
            "seed", "<seed:think>", "</seed:think>", opens_with=("<seed:cot_budget_reflect>",)
        ),
        ReasoningForm("magistral", "[THINK]", "[/THINK]"),  # Magistral, Ministral 3
        ReasoningForm("gemma4", "<|channel>", "<channel|>", title="thought"),
    )
}


class Split(NamedTuple):
    """What a piece of text added to reasoning and answer."""

    reasoning: str = ""
    answer: str = ""


@dataclass(slots=True)
class _Sink:
    reasoning: list[str] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)
    spaces: SpaceHolder = field(default_factory=SpaceHolder)
    has_block: bool | None = None
    """None: not known yet."""
    is_over: bool = False
    """Whether no more reasoning can come."""

    def think(self, text: str) -> None:
        self.reasoning.append(self.spaces.push(text))

    def take(self) -> Split:
        split = Split("".join(self.reasoning), "".join(self.answer))
        self.reasoning.clear()
        self.answer.clear()
        return split


class ReasoningParser:
    """Splits the text of one output."""

    def __init__(self, form: ReasoningForm, *, inside: bool) -> None:
        """`inside`: whether the prompt has opened the block (`ReasoningForm.opened_by`)."""
        self._sink = _Sink()
        self._stream = Stream(lambda r: _parse(r, self._sink, form, inside))

    @property
    def has_block(self) -> bool | None:
        """Whether the text has a block; None if that is not known yet."""
        return self._sink.has_block

    @property
    def is_over(self) -> bool:
        """Whether the block is complete, or there is none."""
        return self._sink.is_over

    def push(self, text: str) -> Split:
        """Return what this further text made certain."""
        self._stream.push(text)
        return self._sink.take()

    def flush(self) -> Split:
        """Return the rest, when there is no more text."""
        self._stream.flush()
        return self._sink.take()


def _parse(r: Reader, out: _Sink, form: ReasoningForm, inside: bool) -> Wait[None]:
    r.mark()
    yield from spaces(r)
    if (yield from literal(r, form.start + form.title)) or inside:
        out.has_block = True
        r.keep()
        yield from spaces(r)
        if (yield from text_until(r, out.think, (form.end,))):
            yield from literal(r, form.end)
            out.is_over = True
            yield from spaces(r)
    else:
        r.back()
        out.has_block = False
    out.is_over = True
    yield from rest(r, out.answer.append)
