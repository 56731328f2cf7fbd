"""The contract as a page: every service, RPC, message, field and enum, with the comments of the .proto files.

`python -m tools.site.contract` writes docs/reference/contract.md; `make proto` runs it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from tools.site.comments import (
    ENUM,
    FIELD,
    MESSAGE,
    METHOD,
    ONEOF,
    SERVICE,
    VALUE,
    Comment,
    comments_of,
    head_of,
    read_files,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "contract.md"
FILES = ("inference", "control", "types", "weights", "adapters", "telemetry")
"""The order of the files on the page."""
COLUMNS = ("Unit", "Default", "Limits", "Errors")
"""The columns that a table has if any of its fields has something there."""
OUT_OF_LIMITS = "`INVALID_FIELD`"
"""What a value outside of Limits is answered with, if Errors says nothing else."""
HEAD = """\
<!-- Made from the comments of protos/penstock/v1/*.proto by `make proto`: change those. -->
# Contract

Every service, RPC, message, field and enum of `penstock.v1`, from the comments of the files in
`protos/penstock/v1/`. A running server describes itself, too:

```sh
grpcurl -plaintext 127.0.0.1:50051 describe penstock.v1.GenerateRequest
```

[Errors](errors.md) explains the reasons of errors, and [Limits](limits.md) lists all limits with the options
that set them.
"""
NO_COMMENT = Comment("", {})
Comments = Mapping[tuple[int, ...], Comment]
_CODE = re.compile(
    r'\{[^}]*\}|"[^"]+"|--[a-z][a-z-]+|[A-Za-z]\w*_[\w.]*\w|[A-Z]\w+(?:\.\w+)+|\w+\.proto\b'
    r"|\b(?!JSON\b|GBNF\b)[A-Z]{4,}\b"
)
"""What is shown as code: JSON, quoted words, flags, names of the contract, files, and words in capitals."""


def page(root: Path) -> str:
    """Write the Markdown of the contract whose files are below `root`."""
    files = {Path(file.name).stem: file for file in read_files(root)}
    assert files.keys() == set(FILES), "FILES names every file"
    lines = [HEAD]
    for file in (files[name] for name in FILES):
        comments = comments_of(file)
        lines += [f"## {Path(file.name).name}", "", *_head(head_of(file)), ""]
        for number, service in enumerate(file.service):
            lines += _service(service, (SERVICE, number), comments)
        for number, message in enumerate(file.message_type):
            lines += _message(message, (MESSAGE, number), comments)
        for number, enum in enumerate(file.enum_type):
            lines += _enum(enum, (ENUM, number), comments)
    return "\n".join(lines).rstrip() + "\n"


def _head(lines: Sequence[str]) -> Iterator[str]:
    """Yield the comment at the top of a file. A list begins after an empty line, as Markdown wants it."""
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("- ") and before and not before.startswith(("- ", "  ")):
            yield ""
        yield shown(line)


def _service(
    service: descriptor_pb2.ServiceDescriptorProto, path: tuple[int, ...], comments: Comments
) -> Iterator[str]:
    yield from (f"### {service.name}", "", *_told(comments.get(path, NO_COMMENT)))
    for index, method in enumerate(service.method):
        request = f"{'stream of ' * method.client_streaming}{_link(method.input_type)}"
        reply = f"{'stream of ' * method.server_streaming}{_link(method.output_type)}"
        comment = comments.get((*path, METHOD, index), NO_COMMENT)
        role = comment.labels.get("Role", "").removesuffix(".")
        yield from (f"#### {service.name}.{method.name}", "")
        yield from (f"Takes {request}, answers {reply}. Needs the role {role}.", "")
        yield from _told(comment)


def _told(comment: Comment) -> Iterator[str]:
    """Yield a comment with its table of errors."""
    yield from (shown(comment.text), "")
    if comment.rows:
        yield from ("| status | reason |", "|---|---|")
        yield from (f"| {', '.join(_coded(status))} | {cell(text)} |" for status, text in comment.rows)
        yield ""
    if comment.after:
        yield from (shown(comment.after), "")


def _coded(statuses: str) -> Iterator[str]:
    return (f"`{status}`" for status in statuses.split(", "))


def _message(
    message: descriptor_pb2.DescriptorProto, path: tuple[int, ...], comments: Comments
) -> Iterator[str]:
    yield from (f"### {message.name}", "", shown(comments.get(path, NO_COMMENT).text), "")
    if not message.field:
        return
    for index, oneof in enumerate(message.oneof_decl):
        if comment := comments.get((*path, ONEOF, index)):
            yield from (f"One of `{oneof.name}`: {shown(comment.text)}", "")
    told = [comments.get((*path, FIELD, index), NO_COMMENT) for index in range(len(message.field))]
    columns = [label for label in COLUMNS if any(_label(comment, label) for comment in told)]
    names = ["field", "type", "what it is", *map(str.lower, columns)]
    yield from (f"| {' | '.join(names)} |", "|---" * len(names) + "|")
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    for field, comment in zip(message.field, told, strict=True):
        cells = [f"`{field.name}` = {field.number}", _kind(field, maps), _meaning(message, field, comment)]
        cells += [_label(comment, label) for label in columns]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _label(comment: Comment, label: str) -> str:
    """Return what stands behind a label, as the text of a cell."""
    told = cell(comment.labels.get(label, ""))
    limits = comment.labels.get("Limits", "none")
    if label == "Errors" and not limits.startswith(("none", "any")):
        return f"{OUT_OF_LIMITS}; {told}" if told else OUT_OF_LIMITS
    return told[:1].upper() + told[1:]


def _meaning(
    message: descriptor_pb2.DescriptorProto, field: descriptor_pb2.FieldDescriptorProto, comment: Comment
) -> str:
    in_oneof = field.HasField("oneof_index") and not field.proto3_optional
    told = cell(comment.text)
    return f"(one of `{message.oneof_decl[field.oneof_index].name}`) {told}" if in_oneof else told


def _kind(field: descriptor_pb2.FieldDescriptorProto, maps: Mapping[str, Any]) -> str:
    return f"optional {_type(field, maps)}" if field.proto3_optional else _type(field, maps)


def _type(field: descriptor_pb2.FieldDescriptorProto, maps: Mapping[str, Any]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = (_type(part, {}) for part in entry.field)
        return f"map of {key} to {value}"
    label = "repeated " if field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED else ""
    if field.type_name:
        return f"{label}{_link(field.type_name)}"
    name = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"{label}`{name}`"


def _enum(
    enum: descriptor_pb2.EnumDescriptorProto, path: tuple[int, ...], comments: Comments
) -> Iterator[str]:
    yield from (f"### {enum.name}", "", shown(comments.get(path, NO_COMMENT).text), "")
    yield from ("| value | number | what it means |", "|---|---|---|")
    for index, value in enumerate(enum.value):
        told = cell(comments.get((*path, VALUE, index), NO_COMMENT).text)
        yield f"| `{value.name}` | {value.number} | {told} |"
    yield ""


def _link(type_name: str) -> str:
    """Link to the type's heading on this page; types of others stand as they are."""
    package, _, name = type_name.removeprefix(".").rpartition(".")
    return f"[{name}](#{name.lower()})" if package == "penstock.v1" else f"`{package}.{name}`"


def cell(text: str) -> str:
    """Write plain text in a cell of a table."""
    return shown(text).replace("|", "\\|").replace("\n\n", " ")


def shown(text: str) -> str:
    """Write plain text as Markdown that says the same, with names, flags and quoted words as code."""
    parts, at = [], 0
    for found in _CODE.finditer(text):
        parts += [_escaped(text[at : found.start()]), f"`{found[0]}`"]
        at = found.end()
    return "".join([*parts, _escaped(text[at:])])


def _escaped(text: str) -> str:
    for char in ("\\", "*", "_", "["):
        text = text.replace(char, f"\\{char}")
    return text.replace("<", "&lt;")


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(ROOT / "protos"), encoding="utf-8")
