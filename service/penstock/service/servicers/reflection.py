"""Server reflection under both of its names: grpc.reflection.v1, and v1alpha, which older tools ask for.

grpcio-reflection has only v1alpha. The messages of both are equal, so one servicer answers both, and the
description of v1 is made from that of v1alpha.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha import reflection_pb2_grpc as alpha

V1 = "grpc.reflection.v1.ServerReflection"
NAMES = (V1, reflection.SERVICE_NAME)
_FILE = "grpc/reflection/v1/reflection.proto"


def enable_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Let clients ask `server` for its services, their methods and their messages."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer([*services, *NAMES])
    alpha.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": method}
    server.add_registered_method_handlers(V1, handlers)


def _describe_v1() -> None:
    """Describe grpc.reflection.v1 itself, for clients that ask for it."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name = _FILE
        file.package = "grpc.reflection.v1"
        file.ClearField("options")  # options of other languages
        for message in file.message_type:
            for field in message.field:
                if field.type_name:
                    field.type_name = _renamed(field.type_name)
        for service in file.service:
            for rpc in service.method:
                rpc.input_type, rpc.output_type = _renamed(rpc.input_type), _renamed(rpc.output_type)
        pool.AddSerializedFile(file.SerializeToString())


def _renamed(name: str) -> str:
    return name.replace(".grpc.reflection.v1alpha.", ".grpc.reflection.v1.")
