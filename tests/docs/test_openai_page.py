"""What docs/openai.md and docs/anthropic.md say of endpoints, fields, errors and limits is what is done."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args

import pytest

from penstock.openai.app import ENDPOINTS
from penstock.openai.counts import Meters
from penstock.openai.describing import ERRORS
from penstock.openai.failures import ANTHROPIC_TYPES, INVALID, TABLE
from penstock.openai.schemas.base import IGNORED, Body
from penstock.openai.settings import Settings
from tests.docs.pages import ROOT, text_of

PAGES = "".join(text_of(ROOT / "docs" / name) for name in ("openai.md", "anthropic.md"))
COMMON = {
    "/v1/chat/completions": ("Fields of all requests that generate", "Fields of chats and completions"),
    "/v1/completions": ("Fields of all requests that generate", "Fields of chats and completions"),
    "/v1/responses": ("Fields of all requests that generate",),
    "/v1/messages": ("Fields of a conversation",),
    "/v1/messages/count_tokens": ("Fields of a conversation",),
}
"""The sections that list fields of several endpoints. Each endpoint has a section of its own name besides."""
ALIASES = {"/v2/rerank": "/v1/rerank", "/rerank": "/v1/rerank", "/score": "/v1/score"}
"""Paths that are answered as another one is, whose section tells of both."""
BODIES = [row for row in ENDPOINTS if row.body is not None and row.path not in ALIASES]


def section(heading: str) -> str:
    """Return the text below a heading, down to the next one."""
    found = re.search(rf"^#+ `?{re.escape(heading)}`?\n(.*?)(?=^#|\Z)", PAGES, re.M | re.S)
    assert found, heading
    return found[1]


def rows(text: str) -> list[tuple[list[str], str]]:
    """Return the rows of its tables: the code in the first column, and the rest."""
    found = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.M)
    return [(re.findall(r"`([^`]+)`", first), rest) for first, rest in found]


def listed(text: str) -> set[str]:
    """Return the fields in the first columns, and those that the rest names as parts of them (`a.b`)."""
    fields = {name for names, _ in rows(text) for name in names}
    return fields | {name for _, rest in rows(text) for name in re.findall(r"`(\w+\.\w+)`", rest)}


def fields_of(body: type[Body]) -> dict[str, Any]:
    """Return the fields that the body has, by their names in JSON."""
    return {field.alias or name: field for name, field in body.model_fields.items()}


def inner(annotation: Any) -> list[type[Body]]:
    """Return the objects that a field may hold, also in lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return [annotation]
    return [body for part in get_args(annotation) for body in inner(part)]


@pytest.mark.parametrize("row", BODIES, ids=lambda row: row.path)
def test_every_field_of_a_request_is_listed_and_no_other(row: Any) -> None:
    own, common = section(row.path), [section(heading) for heading in COMMON.get(row.path, ())]
    body: type[Body] = row.body
    taken = fields_of(body)
    refused = {name for name in body.unsupported if "." not in name}
    ours = listed(own)
    told = ours.union(*map(listed, common))
    assert set(taken) | refused | body.ignored - IGNORED <= {
        name.partition(".")[0].partition("[")[0] for name in told
    }
    assert {re.split(r"[.\[]", name)[0] for name in ours} <= set(taken) | refused | body.ignored
    for name in ours:
        top, _, below = name.replace("[]", "").partition(".")
        if below:
            assert any(
                below in fields_of(part) or below in part.ignored or below in part.unsupported
                for part in inner(taken[top].annotation)
            ), name


@pytest.mark.parametrize("row", BODIES, ids=lambda row: row.path)
def test_the_reasons_of_refusals_are_those_that_callers_are_told(row: Any) -> None:
    texts = [section(heading) for heading in (*COMMON.get(row.path, ()), row.path)]
    told = {name: why for text in texts for names, why in rows(text) for name in names}
    for name, why in row.body.unsupported.items():
        if "." not in name:
            assert told[name].replace("`", "") in (why, "refused") or "refused" in told[name], name


def test_the_ignored_fields_are_listed() -> None:
    assert listed(section("Fields that are ignored")) == IGNORED


def test_every_endpoint_is_listed() -> None:
    told = {
        (method, path)
        for names, _ in rows(section("Endpoints"))
        for method, _, path in (name.partition(" ") for name in names)
    }
    name = re.compile(r"\{(\w+?)(?:_id)?(?::path)?\}")
    there = {(row.method, name.sub(lambda found: found[1].upper(), row.path)) for row in ENDPOINTS}
    assert told == {row for row in there if not row[1].startswith("/page")}


def test_every_error_is_listed_with_its_status_and_type() -> None:
    said = re.findall(r"^\| ([\d, ]+) \| `(\w+)` \| (.+?) \|", section("Errors"), re.M)
    told = {(int(status), kind) for statuses, kind, _ in said for status in statuses.split(",")}
    assert {(row.status, row.type) for row in TABLE.values()} <= told
    assert set(ERRORS) <= {status for status, _ in told}
    codes = {code for _, _, text in said for code in re.findall(r"`(\w+)`", text)}
    assert {row.code for row in TABLE.values() if row.code is not None} <= codes


def test_every_status_has_its_type_of_anthropics_api() -> None:
    said = re.findall(r"^\| ([\d, ]+) \| `(\w+)` \|$", section("Errors of Anthropic's form"), re.M)
    told = {int(status): kind for statuses, kind in said for status in statuses.split(",")}
    assert told == {status: ANTHROPIC_TYPES.get(status, INVALID) for status in {*ERRORS, 405}}


def test_every_limit_is_listed_with_its_default() -> None:
    said = dict(re.findall(r"`--([a-z-]+)` \(([^)]+)\)", section("Limits").partition("To the server")[0]))
    limits = {
        field.name: field.default
        for field in dataclasses.fields(Settings)
        if field.name.startswith("max_") or field.name.endswith("_s")
    }
    assert said.keys() == {name.removesuffix("_s").replace("_", "-") for name in limits}
    for name, default in limits.items():
        told = said[name.removesuffix("_s").replace("_", "-")]
        number, _, unit = told.partition(" ")
        factor = {"": 1, "s": 1, "hour": 3600, "KiB": 1 << 10, "MiB": 1 << 20}[unit]
        assert int(number) * factor == default, name


def test_every_metric_is_listed() -> None:
    told = {name.removesuffix("_total") for name in listed(section("Metrics and log")) if "." not in name}
    page = Meters().page().decode()
    assert (
        told == {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", page, re.M)} - CREATED
    )


CREATED = {
    f"penstock_openai_{name}_created"
    for name in ("requests", "request_seconds", "first_byte_seconds", "closed_connections")
}
"""When prometheus_client first saw a metric."""
