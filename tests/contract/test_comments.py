"""Every part of the contract says what it means, and what the comments say of keys and errors is so."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from penstock.service.access.roles import RULES
from penstock.service.errors import TABLE
from tests.contract.test_protos import REPOSITORY, buf
from tools import reflected_comments
from tools.site import contract
from tools.site.comments import FIELD, MESSAGE, METHOD, SERVICE, Comment, comments_of, parse, read_files

PROTOS = REPOSITORY / "protos"
FILES = read_files(PROTOS)
COMMENTS: Mapping[str, Mapping[tuple[int, ...], Comment]] = {file.name: comments_of(file) for file in FILES}
STREAMED = "penstock.v1.StreamRequest"
WHOLE = (FieldDescriptorProto.TYPE_UINT32, FieldDescriptorProto.TYPE_UINT64, FieldDescriptorProto.TYPE_INT64)
NO_COUNT = re.compile(r"(.*_)?(ids?|index|seed|generation|revision|first_output_token)$")
"""Names of whole numbers that count nothing."""


@dataclass(frozen=True)
class Told:
    """A field with its comment."""

    name: str
    field: FieldDescriptorProto
    comment: Comment
    in_oneof: bool


def told_of(file: FileDescriptorProto, message: DescriptorProto, number: int) -> Iterator[Told]:
    for index, field in enumerate(message.field):
        comment = COMMENTS[file.name][(MESSAGE, number, FIELD, index)]
        in_oneof = field.HasField("oneof_index") and not field.proto3_optional
        yield Told(f"{file.package}.{message.name}.{field.name}", field, comment, in_oneof)


MESSAGES = {
    f"{file.package}.{message.name}": list(told_of(file, message, number))
    for file in FILES
    for number, message in enumerate(file.message_type)
}


def sent_by_callers() -> list[Told]:
    """Return the fields of all messages that a caller sends, and of those in them."""
    names = [method.input_type for file in FILES for service in file.service for method in service.method]
    found: dict[str, list[Told]] = {}
    while names:
        name = names.pop().removeprefix(".")
        if name in MESSAGES and name not in found:
            found[name] = MESSAGES[name]
            names += [told.field.type_name for told in found[name]]
    return [told for fields in found.values() for told in fields]


SENT = sent_by_callers()


def test_the_tree_has_the_fields_that_the_tests_below_walk_over() -> None:
    names = {told.name for told in SENT}
    assert {"penstock.v1.TensorSpec.crc32c", "penstock.v1.ToolCall.id", f"{STREAMED}.stopping"} < names
    assert "penstock.v1.Usage.prompt_tokens" not in names


@pytest.mark.parametrize(
    ("comment", "rule"),
    [
        ("  // The cached prefixes' salt.\n  string salt", "COMMENT_FIELD"),
        ("  // One of them.\n  oneof kind", "COMMENT_ONEOF"),
        ("// A message.\nmessage Thing", "COMMENT_MESSAGE"),
        ("// Values.\nenum Value", "COMMENT_ENUM"),
        ("  // None.\n  VALUE_UNSPECIFIED", "COMMENT_ENUM_VALUE"),
        ("// A service.\nservice ThingService", "COMMENT_SERVICE"),
        ("  // An RPC.\n  rpc Do", "COMMENT_RPC"),
    ],
)
def test_buf_lint_refuses_a_part_without_a_comment(tmp_path: Path, comment: str, rule: str) -> None:
    """The tree itself passes `buf lint`, which tests/contract/test_protos.py runs."""
    whole = (
        'syntax = "proto3";\npackage thing.v1;\n'
        "// A service.\nservice ThingService {\n  // An RPC.\n  rpc Do(DoRequest) returns (DoResponse);\n}\n"
        "// A request.\nmessage DoRequest {}\n// An answer.\nmessage DoResponse {}\n"
        "// A message.\nmessage Thing {\n  // The cached prefixes' salt.\n  string salt = 1;\n"
        "  // One of them.\n  oneof kind {\n    // A.\n    string a = 2;\n  }\n}\n"
        "// Values.\nenum Value {\n  // None.\n  VALUE_UNSPECIFIED = 0;\n}\n"
    )
    shutil.copy(REPOSITORY / "buf.yaml", tmp_path)
    file = tmp_path / "protos" / "thing" / "v1" / "thing.proto"
    file.parent.mkdir(parents=True)
    file.write_text(whole)
    passed = buf("lint", str(tmp_path))
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert comment in whole
    file.write_text(whole.replace(comment, comment.split("\n")[1]))
    refused = buf("lint", str(tmp_path), "--error-format", "json")
    assert refused.returncode != 0
    assert f'"type":"{rule}"' in refused.stdout


def test_comments_are_sentences_that_say_more_than_the_name() -> None:
    for name, comments in COMMENTS.items():
        for path, comment in comments.items():
            if path in ((12,), (2,)):  # the head of the file
                continue
            for said in (comment.text, *comment.labels.values()):
                assert said.endswith((".", ":")), (name, path, said)
    for told in (told for fields in MESSAGES.values() for told in fields):
        name_words = set(told.field.name.split("_")) | {"the", "a", "an", "of", "its"}
        words = set(re.findall(r"\w+", told.comment.text.lower()))
        assert words - name_words, told.name


def test_each_field_that_a_caller_sends_tells_its_default_and_its_limits() -> None:
    """A field of a oneof has no default: the oneof's comment says whether one is required."""
    free = (FieldDescriptorProto.TYPE_BOOL, FieldDescriptorProto.TYPE_MESSAGE)
    for told in SENT:
        labels = told.comment.labels
        assert told.in_oneof or "Default" in labels, told.name
        is_list = told.field.label == FieldDescriptorProto.LABEL_REPEATED
        is_duration = told.field.type_name == ".google.protobuf.Duration"
        if told.field.type not in free or is_list or is_duration:
            assert labels.keys() & {"Limits", "Errors"}, told.name


def test_each_count_tells_its_unit() -> None:
    for told in (told for fields in MESSAGES.values() for told in fields):
        if told.field.type in WHOLE and not NO_COUNT.match(told.field.name):
            assert "Unit" in told.comment.labels, told.name


def test_both_requests_that_generate_tell_the_same_of_the_fields_that_they_share() -> None:
    generate = {told.field.name: told.comment for told in MESSAGES["penstock.v1.GenerateRequest"]}
    stream = {told.field.name: told.comment for told in MESSAGES[STREAMED] if told.field.number < 100}
    assert generate == stream


def methods() -> Iterator[tuple[str, Comment]]:
    for file in FILES:
        for number, service in enumerate(file.service):
            for index, method in enumerate(service.method):
                comment = COMMENTS[file.name][(SERVICE, number, METHOD, index)]
                yield f"{file.package}.{service.name}/{method.name}", comment


def test_each_rpc_tells_the_role_that_it_needs() -> None:
    told = {name: comment.labels["Role"] for name, comment in methods()}
    ours = {name: rule for name, rule in RULES.items() if name.startswith("penstock.v1.")}
    assert told == {name: f"{rule.role.value}." for name, rule in ours.items()}


STATUSES = {row.code.name for row in TABLE.values()} | {"CANCELLED"}
REASONS = {(row.code.name, row.reason) for row in TABLE.values()}
_PAIR = re.compile(rf"\b({'|'.join(STATUSES)}) ([A-Z]+(?:_[A-Z]+)*)\b")


def test_each_reason_in_a_comment_is_one_that_the_server_sends_with_that_status() -> None:
    """In a table of errors the reasons of a row begin it, or come after a semicolon."""
    in_fields = [
        pair
        for comments in COMMENTS.values()
        for comment in comments.values()
        for told in (comment.text, *comment.labels.values())
        for pair in _PAIR.findall(told)
    ]
    rows = [row for comments in COMMENTS.values() for one in comments.values() for row in one.rows]
    known = {reason for _, reason in REASONS}
    in_rows = [
        (status, word)
        for status, text in rows
        for word in re.findall(r"\b[A-Z]{4,}(?:_[A-Z]+)*\b", text)
        if word in known or "_" in word
    ]
    assert len(in_fields) > 30
    assert len(in_rows) > 50
    others = {("RESOURCE_EXHAUSTED", "CANCELLED")}  # the status that follows on STALLED_READER
    features = {(status, word) for status, word in in_rows if word.startswith("FEATURE_")}
    assert {*in_fields, *in_rows} - REASONS - others - features == set()


def test_the_page_is_what_the_files_say() -> None:
    assert contract.PAGE.read_text(encoding="utf-8") == contract.page(PROTOS), "run `make proto`"


def test_reflection_has_the_comments_of_the_files() -> None:
    assert reflected_comments.FILE.read_bytes() == reflected_comments.serialized(PROTOS), "run `make proto`"


def test_a_comment_is_taken_apart() -> None:
    comment = parse(
        " How far\n it goes: on. Unit: steps. Default: 1.\n Limits: 1 to 2.\n   NOT_FOUND  ONE: a\n"
        "              b; TWO\n   ABORTED    THREE\n The end.\n"
    )
    assert comment.text == "How far it goes: on."
    assert comment.labels == {"Unit": "steps.", "Default": "1.", "Limits": "1 to 2."}
    assert comment.rows == [("NOT_FOUND", "ONE: a b; TWO"), ("ABORTED", "THREE")]
    assert comment.after == "The end."
    for wrong in (" A. Limits: 1. Default: 2.", " A. Unit: s. Unit: s."):
        with pytest.raises(ValueError, match="labels"):
            parse(wrong)
