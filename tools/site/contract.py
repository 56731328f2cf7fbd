"""The contract as a page: every service, message, field and enum, with the comments of the .proto files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

_SERVICE, _MESSAGE, _ENUM = 6, 4, 5
"""Numbers of the fields of FileDescriptorProto, of which source locations are paths."""
_METHODS, _FIELDS, _VALUES = 2, 2, 2
"""The same of services, messages and enums."""
_LABELS = {descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED: "repeated "}
Comments = Mapping[tuple[int, ...], str]


def read_files(root: Path) -> Sequence[descriptor_pb2.FileDescriptorProto]:
    """Parse the .proto files below `root` with their comments. Raises RuntimeError if one is wrong."""
    names = sorted(str(path.relative_to(root)) for path in root.glob("penstock/**/*.proto"))
    common = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "files"
        command = [
            "protoc",
            f"-I{root}",
            f"-I{common}",
            "--include_source_info",
            f"--descriptor_set_out={out}",
        ]
        if protoc.main([*command, *names]) != 0:
            raise RuntimeError("protoc refused the contract")
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file


def comments_of(file: descriptor_pb2.FileDescriptorProto) -> Comments:
    """Path of a declaration to the comments before and behind it."""
    found = {}
    for location in file.source_code_info.location:
        text = " ".join(f"{location.leading_comments} {location.trailing_comments}".split())
        if text:
            found[tuple(location.path)] = text
    return found


def head_of(file: descriptor_pb2.FileDescriptorProto) -> str:
    """The comment at the top of a file, as paragraphs and lists."""
    for location in file.source_code_info.location:
        if tuple(location.path) == (12,):  # the line `syntax = ...`
            return "\n".join(line.removeprefix(" ") for line in location.leading_comments.splitlines())
    return ""


def page(root: Path) -> str:
    """Markdown of the whole contract."""
    files = read_files(root)
    lines: list[str] = []
    for file in sorted(files, key=lambda f: (not f.service, f.name)):
        lines += [f"## {Path(file.name).name}", "", head_of(file), ""]
        comments = comments_of(file)
        lines += _services(file, comments)
        for number, message in enumerate(file.message_type):
            lines += _message(message, (_MESSAGE, number), comments)
        for number, enum in enumerate(file.enum_type):
            lines += _enum(enum, (_ENUM, number), comments)
    return "\n".join(lines)


def _services(file: descriptor_pb2.FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, service in enumerate(file.service):
        path = (_SERVICE, number)
        yield from (f"### {service.name}", "", *_lines_of(file, path), "")
        yield from ("| RPC | request | reply | |", "|---|---|---|---|")
        for index, method in enumerate(service.method):
            request = f"{'stream of ' * method.client_streaming}{_link(method.input_type)}"
            reply = f"{'stream of ' * method.server_streaming}{_link(method.output_type)}"
            yield f"| `{method.name}` | {request} | {reply} | {_cell(comments, (*path, _METHODS, index))} |"
        yield ""


def _lines_of(file: descriptor_pb2.FileDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
    """The comment before a declaration. Where it is laid out as a table, its lines stay as they are."""
    for location in file.source_code_info.location:
        if tuple(location.path) == path and location.leading_comments:
            lines = [line.removeprefix(" ") for line in location.leading_comments.splitlines()]
            laid_out = any(line.startswith("  ") for line in lines)
            yield from ("```text", *lines, "```") if laid_out else (escaped(line) for line in lines)


def _message(
    message: descriptor_pb2.DescriptorProto, path: tuple[int, ...], comments: Comments
) -> Iterator[str]:
    yield from (f"### {message.name}", "", escaped(comments.get(path, "")), "")
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    if not message.field:
        yield from ("It has no fields.", "")
        return
    yield from ("| field | type | number | |", "|---|---|---|---|")
    for index, field in enumerate(message.field):
        oneof = field.HasField("oneof_index") and not field.proto3_optional
        notes = [f"one of `{message.oneof_decl[field.oneof_index].name}`"] if oneof else []
        if field.proto3_optional:
            notes.append("optional")
        told = _cell(comments, (*path, _FIELDS, index))
        text = "; ".join([*notes, told] if told else notes)
        yield f"| `{field.name}` | {_type(field, maps)} | {field.number} | {text} |"
    yield ""


def _type(field: descriptor_pb2.FieldDescriptorProto, maps: Mapping[str, Any]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = (_type(part, {}) for part in entry.field)
        return f"map of {key} to {value}"
    label = _LABELS.get(field.label, "")
    if field.type_name:
        return f"{label}{_link(field.type_name)}"
    name = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"{label}`{name}`"


def _enum(
    enum: descriptor_pb2.EnumDescriptorProto, path: tuple[int, ...], comments: Comments
) -> Iterator[str]:
    yield from (f"### {enum.name}", "", escaped(comments.get(path, "")), "")
    yield from ("| value | number | |", "|---|---|---|")
    for index, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {_cell(comments, (*path, _VALUES, index))} |"
    yield ""


def _link(type_name: str) -> str:
    """To the type's heading on this page; types of others stand as they are."""
    package, _, name = type_name.removeprefix(".").rpartition(".")
    return f"[{name}](#{name.lower()})" if package == "penstock.v1" else f"`{package}.{name}`"


def _cell(comments: Comments, path: tuple[int, ...]) -> str:
    return escaped(comments.get(path, ""))


def escaped(text: str) -> str:
    """Plain text that means itself in a cell of a table."""
    for char in ("\\", "|", "<", "*", "_", "[", "]"):
        text = text.replace(char, f"\\{char}" if char != "<" else "&lt;")
    return text
