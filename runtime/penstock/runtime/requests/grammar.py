"""What a request demands of its output's form: one grammar, as a frozen value that checks its own size."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.errors import InvalidRequest, Violation

MAX_GRAMMAR_BYTES = 256 * 1024
"""Largest source, in bytes of UTF-8. Together with `timed_calls.STACK_BYTES` this bounds how deep a compile
can recurse."""
MAX_CHOICES = 10_000
ANSWER = "answer"
"""The name by which `Grammar.before` refers to the grammar of the answer."""


class GrammarKind(enum.Enum):
    """The kinds, with the names in the contract's Constraint."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must match, or everything in it that comes after `before`.

    Equal grammars share their compiled form. Raises InvalidRequest on construction if the source is empty or
    too large. Whether the source is valid is found when it is compiled (`compiler.GrammarCompiler`).
    """

    kind: GrammarKind
    source: str | tuple[str, ...] = ""
    """A JSON Schema document; "" (any JSON object); a regular expression; a grammar in Lark or GBNF; or the
    choices."""
    field: str = dataclasses.field(default="", compare=False)
    """The contract's field in which the caller wrote it; by default that of the kind, such as
    "constraint.regex"."""
    before: str = ""
    """Lark text, written by the server, for what comes before the answer: its rule `start` ends in `@answer`,
    which stands for the answer's grammar. "": nothing comes before."""

    def __post_init__(self) -> None:
        if not self.field:
            object.__setattr__(self, "field", f"constraint.{self.kind.value}")
        is_choice = self.kind is GrammarKind.CHOICE
        if is_choice is isinstance(self.source, str):
            raise TypeError(
                f"{self.kind.value}: source must be {'a tuple of strings' if is_choice else 'a string'}"
            )
        problem = self._problem()
        if problem:
            raise InvalidRequest([Violation(self.field, problem)])

    @classmethod
    def json_schema(cls, schema: str) -> Grammar:
        """Make the grammar of a JSON value that the schema accepts."""
        return cls(GrammarKind.JSON_SCHEMA, schema)

    @classmethod
    def json_object(cls) -> Grammar:
        """Match any JSON object."""
        return cls(GrammarKind.JSON_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Match text that the expression matches from end to end."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """Match text that the rule `start` (Lark) or `root` (GBNF) derives."""
        return cls(GrammarKind.EBNF, text)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Match exactly one of these strings."""
        return cls(GrammarKind.CHOICE, tuple(choices))

    def _problem(self) -> str:
        """Say what is wrong with the source's size or characters; "" if nothing is."""
        if self.kind is GrammarKind.JSON_OBJECT:
            return "takes no source" if self.source else ""
        texts = (self.source,) if isinstance(self.source, str) else self.source
        if not texts:
            return "must hold at least one string"
        if len(texts) > MAX_CHOICES:
            return f"at most {MAX_CHOICES} choices, not {len(texts)}"
        # An empty regex or choice stands for the empty output; an empty schema or grammar is a mistake.
        if self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.EBNF) and not texts[0].strip():
            return "must not be empty"
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError:
            return "must be valid Unicode"
        return f"at most {MAX_GRAMMAR_BYTES} bytes, not {size}" if size > MAX_GRAMMAR_BYTES else ""
