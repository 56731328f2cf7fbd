"""Server reflection under both of its names: grpc.reflection.v1, and v1alpha, which older tools ask for.

grpcio-reflection has the messages of v1alpha, to which those of v1 are equal. So one servicer answers both,
and the description of v1 is made from that of v1alpha. The servicer is our own, because that of
grpcio-reflection does not find methods, which is what `grpcurl describe` and ghz ask for. It also answers
with the contract's comments, which tools show.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from importlib import resources

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
NAMES = (V1, V1ALPHA)
_FILE = "grpc/reflection/v1/reflection.proto"
_COMMENTS = "comments.binpb"
"""The contract's comments, written by tools/reflected_comments.py: the generated code has none."""


def enable_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Let clients ask `server` for its services, their methods and their messages."""
    pool = descriptor_pool.Default()
    _describe_v1(pool)
    servicer = ReflectionServicer([*services, *NAMES], pool)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=ServerReflectionRequest.FromString,
        response_serializer=ServerReflectionResponse.SerializeToString,
    )
    for name in NAMES:
        server.add_registered_method_handlers(name, {"ServerReflectionInfo": method})


class ReflectionServicer:
    """Answers questions about the services of a server from the descriptors of a pool."""

    def __init__(self, services: Sequence[str], pool: descriptor_pool.DescriptorPool) -> None:
        """Args:
        services: the full names of the services to list.
        pool: has their files, and those that these import.
        """
        self._services = sorted(services)
        self._pool = pool

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[ServerReflectionRequest], _: object
    ) -> AsyncIterator[ServerReflectionResponse]:
        """Answer each request of the stream with one response, in the same order."""
        async for request in requests:
            yield self.answer(request)

    def answer(self, request: ServerReflectionRequest) -> ServerReflectionResponse:
        """Make the response to one request. For what does not exist it is an error, and the call goes on."""
        response = ServerReflectionResponse(valid_host=request.host, original_request=request)
        try:
            self._fill(response, request)
        except KeyError:
            question = request.WhichOneof("message_request")
            response.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
            response.error_response.error_message = f"{question}: not found"
        return response

    def _fill(self, response: ServerReflectionResponse, request: ServerReflectionRequest) -> None:
        """Write the answer into `response`. Raises KeyError if what is asked for does not exist."""
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in self._services:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _add_files(response, self._pool.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                _add_files(response, file_containing(self._pool, request.file_containing_symbol))
            case "file_containing_extension":
                wanted = request.file_containing_extension
                extended = self._pool.FindMessageTypeByName(wanted.containing_type)
                found = self._pool.FindExtensionByNumber(extended, wanted.extension_number)
                _add_files(response, file_containing(self._pool, found.full_name))
            case "all_extension_numbers_of_type":
                extended = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                numbers = response.all_extension_numbers_response
                numbers.base_type_name = extended.full_name
                numbers.extension_number.extend(
                    sorted(field.number for field in self._pool.FindAllExtensions(extended))
                )
            case _:
                response.error_response.error_code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
                response.error_response.error_message = "the request asks nothing that this server knows"


def file_containing(pool: descriptor_pool.DescriptorPool, symbol: str) -> FileDescriptor:
    """Find the file that declares what has this full name: a message, field, oneof, enum, value, extension,
    service or method. As in C++, the full name of an enum's value stands beside the enum, not below it:
    `penstock.v1.FEATURE_CHAT`. Raises KeyError if there is none.
    """
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:  # the pool finds all of them but methods
        service, _, method = symbol.rpartition(".")
        return pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def _add_files(response: ServerReflectionResponse, file: FileDescriptor) -> None:
    """Answer with the file and then with all that it imports, each of them once."""
    response.file_descriptor_response.file_descriptor_proto.extend(
        one.serialized_pb + _comments().get(one.name, b"") for one in _with_imports(file, set())
    )


@functools.cache
def _comments() -> Mapping[str, bytes]:
    """Map the name of a file of the contract to its comments: a serialized FileDescriptorProto with nothing
    else, so that both, joined, are one message.
    """
    data = resources.files(__package__).joinpath(_COMMENTS).read_bytes()
    found = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(data).file}
    for file in found.values():
        file.ClearField("name")
    return {name: file.SerializeToString() for name, file in found.items()}


def _with_imports(file: FileDescriptor, seen: set[str]) -> Iterator[FileDescriptor]:
    if file.name not in seen:
        seen.add(file.name)
        yield file
        for imported in file.dependencies:
            yield from _with_imports(imported, seen)


def _describe_v1(pool: descriptor_pool.DescriptorPool) -> None:
    """Describe grpc.reflection.v1 itself, for clients that ask for it."""
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
