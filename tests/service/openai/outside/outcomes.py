"""What each tool is expected to find: all passes but the exceptions that its file in `expected` explains.

A file there is named after its tool:

    tool = "llm-comply, chat"
    version = "0.5.0"
    tried = 2026-11-27              # the day on which these outcomes were last seen
    checks = 9                      # how many checks the tool has

    [exceptions.image-input]        # the check that does not pass
    kind = "refused"                # one of KINDS
    error = "input_image"           # words of the error that the check ends with
    reason = "The demo model sees no images."
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "expected"
KINDS = {
    "refused": "the front refuses it by name",
    "model": "the check asks for words that the demo model does not find",
    "tool": "the tool leaves it out, or asks for what OpenAI's API does not have",
}
"""Why a check may fail. docs/openai.md has a column for each."""


@dataclass(frozen=True)
class Exempt:
    """A check that does not pass, and why that is right."""

    kind: str
    error: str
    reason: str


@dataclass(frozen=True)
class Expected:
    """What one tool is expected to find."""

    tool: str
    version: str
    tried: date
    checks: int
    exceptions: Mapping[str, Exempt]

    def count(self, kind: str) -> int:
        return sum(exempt.kind == kind for exempt in self.exceptions.values())


def read(name: str) -> Expected:
    """Return the file of this name in `expected`."""
    return parse(tomllib.loads((FOLDER / f"{name}.toml").read_text()))


def read_all() -> list[Expected]:
    """All files in `expected`."""
    return [read(path.stem) for path in sorted(FOLDER.glob("*.toml"))]


def parse(document: Mapping[str, Any]) -> Expected:
    exceptions = {name: Exempt(**fields) for name, fields in document.get("exceptions", {}).items()}
    wrong = {name: exempt.kind for name, exempt in exceptions.items() if exempt.kind not in KINDS}
    if wrong:
        raise ValueError(f"these exceptions are of no kind that there is: {wrong}")
    return Expected(document["tool"], document["version"], document["tried"], document["checks"], exceptions)


def page(tools: Sequence[Expected]) -> str:
    """Return what docs/openai.md says of the tools, in Markdown: how many checks end how, and why some
    fail.
    """
    lines = [
        "| program | version | last tried | checks | passed | refused | model | tool |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for told in tools:
        counts = (told.checks, told.checks - len(told.exceptions), *map(told.count, KINDS))
        lines.append(f"| {told.tool} | {told.version} | {told.tried} | {' | '.join(map(str, counts))} |")
    lines += ["", "| program | check | | why it does not pass |", "|---|---|---|---|"]
    for told in tools:
        lines += [
            f"| {told.tool} | `{check}` | {exempt.kind} | {exempt.reason} |"
            for check, exempt in told.exceptions.items()
        ]
    return "\n".join(lines) + "\n"


def differences(expected: Expected, outcomes: Mapping[str, str | None]) -> list[str]:
    """Write a sentence for each check that did not end as expected. `outcomes` has each check's error, or
    None.
    """
    told = []
    if len(outcomes) != expected.checks:
        told.append(f"There are {expected.checks} checks in the file and {len(outcomes)} outcomes.")
    for check, exempt in expected.exceptions.items():
        error = outcomes.get(check)
        if check not in outcomes:
            told.append(f"{check} did not run, and the file has it for an exception.")
        elif error is None:
            told.append(f"{check} passes now: take it out of the exceptions.")
        elif exempt.error not in error:
            told.append(f"{check} fails otherwise than by {exempt.error!r}: {error}")
    for check, error in outcomes.items():
        if error is not None and check not in expected.exceptions:
            told.append(f"{check} fails: {error}")
    return told


def judge(name: str, outcomes: Mapping[str, str | None]) -> None:
    """Fail the test unless all checks ended as the file of this name says."""
    told = differences(read(name), outcomes)
    assert not told, "\n".join([f"{name}:", *told])
