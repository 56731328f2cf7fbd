"""Writes the contract as a set of file descriptors, which Envoy needs to turn JSON into messages and back.

    python -m tools.descriptors

It writes deploy/envoy/penstock.binpb. Beside the contract the set has health, and the details of errors,
which Envoy shows as JSON only if it knows their types.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints
from grpc_health.v1 import health_pb2

from penstock.v1 import adapters_pb2, control_pb2, inference_pb2, telemetry_pb2, types_pb2, weights_pb2

FILE = Path(__file__).parents[1] / "deploy" / "envoy" / "penstock.binpb"
MODULES = (
    types_pb2,
    weights_pb2,
    adapters_pb2,
    telemetry_pb2,
    inference_pb2,
    control_pb2,
    health_pb2,
    error_details_pb2,
)


def descriptors() -> FileDescriptorSet:
    """Return the files of MODULES with all that they import, each after what it imports."""
    found: dict[str, FileDescriptorProto] = {}
    for module in MODULES:
        for file in _with_imports(module.DESCRIPTOR):
            if file.name not in found:
                file.CopyToProto(found.setdefault(file.name, FileDescriptorProto()))
    return FileDescriptorSet(file=found.values())


def _with_imports(file: FileDescriptor) -> Iterator[FileDescriptor]:
    for imported in file.dependencies:
        yield from _with_imports(imported)
    yield file


if __name__ == "__main__":
    FILE.write_bytes(descriptors().SerializeToString(deterministic=True))
