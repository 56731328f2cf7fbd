"""Takes the comments of the .proto files apart: what is told in words, and what is told behind labels.

types.proto says how comments are written. This module knows that form; the page and the tests read it here.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

SERVICE, MESSAGE, ENUM = 6, 4, 5
"""Numbers of the fields of FileDescriptorProto, of which source locations are paths."""
METHOD, FIELD, VALUE, ONEOF = 2, 2, 2, 8
"""The same of services, messages (twice) and enums."""
LABELS = ("Unit", "Default", "Limits", "Errors", "Role")
_LABEL = re.compile(rf"(?:^|(?<=[.:;] ))({'|'.join(LABELS)}): ")
_ROW = re.compile(r"  (?P<status>[A-Z_]+(?:, [A-Z_]+)*) +(?P<text>\S.*)")


@dataclass(frozen=True, slots=True)
class Comment:
    """One comment."""

    text: str
    """What it says in words: each paragraph is a line, with an empty line between two."""
    labels: Mapping[str, str]
    """What stands behind each label that it has."""
    rows: Sequence[tuple[str, str]] = ()
    """Its table of errors: a status, and its reasons with what they mean."""
    after: str = ""
    """What it says after the table."""


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


def comments_of(file: descriptor_pb2.FileDescriptorProto) -> Mapping[tuple[int, ...], Comment]:
    """Map the path of a declaration to the comment before it. Those without a comment are missing."""
    return {
        tuple(location.path): parse(location.leading_comments)
        for location in file.source_code_info.location
        if location.leading_comments.strip()
    }


def head_of(file: descriptor_pb2.FileDescriptorProto) -> Sequence[str]:
    """Return the lines of the comment at the top of a file."""
    for location in file.source_code_info.location:
        if tuple(location.path) == (12,):  # the line `syntax = ...`
            return [line.removeprefix(" ") for line in location.leading_comments.splitlines()]
    return []


def parse(comment: str) -> Comment:
    """Take a comment apart. Raises ValueError where a label comes twice, or in another order than LABELS."""
    lines = [line.removeprefix(" ") for line in comment.splitlines()]
    table = [number for number, line in enumerate(lines) if line.startswith("  ")]
    before, after = (lines[: table[0]], lines[table[-1] + 1 :]) if table else (lines, [])
    paragraphs = "\n".join(before).split("\n\n")
    text, *labelled = _LABEL.split("\n\n".join(" ".join(one.split()) for one in paragraphs))
    names = labelled[::2]
    if names != [label for label in LABELS if label in names]:
        raise ValueError(f"the labels {', '.join(names)} are not once each in the order {', '.join(LABELS)}")
    labels = {name: told.strip() for name, told in zip(names, labelled[1::2], strict=True)}
    rows = _rows(lines[number] for number in table)
    return Comment(text.strip(), labels, list(rows), " ".join(" ".join(after).split()))


def _rows(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table. A line without a status goes on with the row before it."""
    status, text = "", ""
    for line in lines:
        found = _ROW.fullmatch(line)
        if found is None:
            text = f"{text} {line.strip()}"
        else:
            if status:
                yield status, text
            status, text = found["status"], found["text"]
    if status:
        yield status, text
