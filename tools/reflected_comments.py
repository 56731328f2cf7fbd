"""Writes the comments of the contract for reflection, so that `grpcurl describe` shows them.

    python -m tools.reflected_comments

The generated Python code has no comments. The file holds, for each .proto file, its name and its comments,
with their places in it; a server appends these to the descriptor that it has from the generated code.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tools.site.comments import read_files

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "service" / "penstock" / "service" / "servicers" / "comments.binpb"


def comments(protos: Path) -> FileDescriptorSet:
    """Return the comments of the .proto files below this folder."""
    found = FileDescriptorSet()
    for file in read_files(protos):
        made = found.file.add(name=file.name)
        for location in file.source_code_info.location:
            if location.leading_comments or location.trailing_comments:
                made.source_code_info.location.add().CopyFrom(location)
    return found


def serialized(protos: Path) -> bytes:
    """Return the content of FILE."""
    return comments(protos).SerializeToString(deterministic=True)


if __name__ == "__main__":
    FILE.write_bytes(serialized(ROOT / "protos"))
