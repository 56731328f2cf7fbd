"""What the pages say about flags and errors is what the programs do."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

import penstock.client
import penstock.runtime
from penstock.cli.__main__ import COMMANDS, main
from penstock.service.errors import TABLE
from tests.docs.pages import ROOT, inline_code_of, pages, text_of

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
NEVER_SENT = {
    "CONFIG": "at the start of a server only",
    "UNKNOWN_ARCHITECTURE": "at the start of a server only",
    "CHECKPOINT": "at the start of a server only",
    "INVALID_REQUEST": "the class above others, which is never raised itself",
    "CHANGE_REFUSED": "the class above others, which is never raised itself",
    "WEIGHTS_REFUSED": "the class above others, which is never raised itself",
    "PROFILE_REFUSED": "the class above others, which is never raised itself",
    "ADAPTER_REFUSED": "the class above others, which is never raised itself",
}
"""Reasons of the table that no RPC answers in this release."""


@pytest.fixture
def helps(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what all commands print for --help."""
    commands = [[name] for name in COMMANDS] + [["keys", action] for action in ("add", "list", "revoke")]
    commands += [["adapters", action] for action in ("list", "load", "push", "unload", "pin", "unpin")]
    for command in commands:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
    return capsys.readouterr().out


def test_flags_in_the_text_exist(helps: str) -> None:
    known = set(_FLAG.findall(helps)) | {"--help", "--version"}
    docs = [page for page in pages() if page.is_relative_to(ROOT / "docs") or page.name == "README.md"]
    for page in docs:
        if "bench" in page.parts or "tools" in page.parts or "golden" in page.parts:
            continue
        named = {
            flag
            for code in inline_code_of(page)
            if not re.match(r"(\S+=\S+ )*(make|python|git|pytest|docker|ruff|buf) ", code)
            for flag in _FLAG.findall(code)
        }
        assert sorted(named - known) == [], page


def test_every_reason_of_an_error_is_explained_with_its_status() -> None:
    page = text_of(ROOT / "docs" / "reference" / "errors.md")
    explained = dict(re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \|", page, re.M))
    sent = {row.reason: row.code.name for row in TABLE.values() if row.reason not in NEVER_SENT}
    assert explained == sent


def test_every_finish_reason_is_explained() -> None:
    types = (ROOT / "protos" / "penstock" / "v1" / "types.proto").read_text()
    reasons = set(re.findall(r"FINISH_REASON_(\w+) = [1-9]", types))
    page = text_of(ROOT / "docs" / "reference" / "service.md")
    assert set(re.findall(r"^\| ([A-Z_]+) \| ", page, re.M)) >= reasons


NOT_CLASSES = {
    *("DEFAULT_ADDR", "Constraint", "Metadata", "StreamEvent", "ToolLike", "Turn"),
    *("AdapterSource", "InFlightPolicy", "Progress", "Staging", "Tensors", "TraceLevel"),
}
"""Names of the client that are a constant, or stand for types that are listed one by one."""


@pytest.mark.parametrize(
    ("module", "page"),
    [(penstock.client, "client.md"), (penstock.runtime, "runtime.md")],
    ids=["client", "runtime"],
)
def test_every_public_class_is_in_the_reference(module: ModuleType, page: str) -> None:
    text = text_of(ROOT / "docs" / "reference" / page)
    listed = set(re.findall(r"^::: [\w.]*?(\w+)$", text, re.M))
    if "errors" in listed:  # the page lists all classes of that module
        listed |= vars(module.errors).keys()
    assert sorted(set(module.__all__) - listed - NOT_CLASSES) == []


_PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]\b|[`()]|METHOD|'ID'|127\.0\.0\.1:50051")


def test_messages_of_the_troubleshooting_page_are_those_of_the_programs() -> None:
    page = text_of(ROOT / "docs" / "how-to" / "troubleshoot.md").partition("## Symptoms")[0]
    sources = (
        path for part in ("runtime", "service", "clients/python") for path in (ROOT / part).rglob("*.py")
    )
    text = "".join(path.read_text() for path in sources)
    joined = re.sub(r'"\s*\n\s*f?"', "", text)  # of strings that go on in the next line
    quoted = [row.split(" | ")[0].removeprefix("| ") for row in page.splitlines() if row.startswith("| `")]
    assert len(quoted) > 30
    for message in quoted:
        parts = [part.strip(" ;,:'") for part in _PLACEHOLDER.split(message)]
        assert any(part in joined for part in parts if len(part) > 10), message
