"""The protoc plugin `grpc_python`, for buf.

gRPC's Python generator is compiled into `grpc_tools.protoc`, but buf needs a program. This program translates
the plugin protocol (a CodeGeneratorRequest on stdin, its response on stdout) into a call of that compiler.

The generator writes its own version into the code, which then refuses any older grpcio. What it generates for
this contract has been the same for many versions, so the oldest version that the client supports is written
instead.
"""

import re
import sys
import tempfile
from pathlib import Path

from google.protobuf.compiler import plugin_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

OLDEST_GRPCIO = "1.65.5"
"""The oldest grpcio that the client supports."""
_VERSION = re.compile(r"^GRPC_GENERATED_VERSION = '[\d.]+'$", re.MULTILINE)


def generate(request: plugin_pb2.CodeGeneratorRequest) -> plugin_pb2.CodeGeneratorResponse:
    response = plugin_pb2.CodeGeneratorResponse(
        supported_features=plugin_pb2.CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL
    )
    with tempfile.TemporaryDirectory() as folder:
        descriptors, out = Path(folder, "descriptors.binpb"), Path(folder, "out")
        descriptors.write_bytes(FileDescriptorSet(file=request.proto_file).SerializeToString())
        out.mkdir()
        arguments = [f"--descriptor_set_in={descriptors}", f"--grpc_python_out={request.parameter}:{out}"]
        status = protoc.main(["protoc", *arguments, *request.file_to_generate])
        if status != 0:
            response.error = f"grpc_tools.protoc ended with status {status}; see its messages above"
        for path in sorted(path for path in out.rglob("*") if path.is_file()):
            code = _VERSION.sub(f"GRPC_GENERATED_VERSION = '{OLDEST_GRPCIO}'", path.read_text())
            response.file.add(name=path.relative_to(out).as_posix(), content=code)
    return response


if __name__ == "__main__":
    code_request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
    sys.stdout.buffer.write(generate(code_request).SerializeToString())
