"""Reflection as tools use it: under its current name, and under the older one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from grpc_reflection.v1alpha import reflection_pb2
from grpc_tools import protoc

from penstock.service.servicers.reflection import ReflectionServicer, file_containing
from tests.service.rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="module")
V1, ALPHA = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"
PROTOS = Path(__file__).parents[3] / "protos"
METHOD = "penstock.v1.InferenceService.Generate"


async def ask(rig: Rig, name: str, *questions: dict[str, str]) -> list[Any]:
    """Return the answers to the questions of one stream."""
    call: Any = rig.channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [reflection_pb2.ServerReflectionRequest(**question) for question in questions]  # type: ignore[arg-type]
    return [answer async for answer in call(iter(requests), timeout=20)]


def files(answer: Any) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    made = map(
        descriptor_pb2.FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto
    )
    return {file.name: file for file in made}


def pool_of(found: dict[str, descriptor_pb2.FileDescriptorProto]) -> descriptor_pool.DescriptorPool:
    """Make a pool of these files alone."""
    pool, added = descriptor_pool.DescriptorPool(), set[str]()

    def add(name: str) -> None:
        if name not in added:
            added.add(name)
            for dependency in found[name].dependency:
                add(dependency)
            pool.AddSerializedFile(found[name].SerializeToString())

    for name in found:
        add(name)
    return pool


@pytest.mark.parametrize("name", [V1, ALPHA])
async def test_services_and_files_under_both_names(rig: Rig, name: str) -> None:
    listed, described, missing = await ask(
        rig,
        name,
        {"list_services": ""},
        {"file_containing_symbol": "penstock.v1.InferenceService"},
        {"file_containing_symbol": "penstock.v1.Nope"},
    )
    services = {service.name for service in listed.list_services_response.service}
    assert services == {
        "penstock.v1.InferenceService", "penstock.v1.ControlService", "grpc.health.v1.Health", V1, ALPHA,
    }  # fmt: skip
    assert "penstock/v1/inference.proto" in files(described)
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_each_listed_service_can_be_described(rig: Rig) -> None:
    """A tool can build the service from the answers alone."""
    (listed,) = await ask(rig, V1, {"list_services": ""})
    for service in listed.list_services_response.service:
        (answer,) = await ask(rig, V1, {"file_containing_symbol": service.name})
        methods = pool_of(files(answer)).FindServiceByName(service.name).methods
        assert methods
        assert all(m.input_type.full_name.rpartition(".")[0] in service.name for m in methods), service.name


async def test_v1_is_not_v1alpha_under_another_name(rig: Rig) -> None:
    (answer,) = await ask(rig, V1, {"file_containing_symbol": V1})
    (file,) = files(answer).values()
    assert file.package == "grpc.reflection.v1"
    assert "v1alpha" not in str(file)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    """Return what protoc makes of the .proto files themselves."""
    out = tmp_path_factory.mktemp("protoc") / "files"
    names = [str(path.relative_to(PROTOS)) for path in PROTOS.glob("penstock/v1/*.proto")]
    common = Path(protoc.__file__).parent / "_proto"
    assert protoc.main(["protoc", f"-I{PROTOS}", f"-I{common}", f"--descriptor_set_out={out}", *names]) == 0
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def symbols_of(file: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    """Yield the full names of everything that the file declares."""

    def of_enum(enum: descriptor_pb2.EnumDescriptorProto, scope: str) -> Iterator[str]:
        yield f"{scope}.{enum.name}"
        yield from (f"{scope}.{value.name}" for value in enum.value)

    def of_message(message: descriptor_pb2.DescriptorProto, scope: str) -> Iterator[str]:
        own = f"{scope}.{message.name}"
        yield own
        yield from (f"{own}.{field.name}" for field in [*message.field, *message.extension])
        yield from (f"{own}.{oneof.name}" for oneof in message.oneof_decl)
        for nested in message.nested_type:
            yield from of_message(nested, own)
        for enum in message.enum_type:
            yield from of_enum(enum, own)

    for message in file.message_type:
        yield from of_message(message, file.package)
    for enum in file.enum_type:
        yield from of_enum(enum, file.package)
    for service in file.service:
        yield f"{file.package}.{service.name}"
        yield from (f"{file.package}.{service.name}.{method.name}" for method in service.method)
    yield from (f"{file.package}.{one.name}" for one in file.extension)


async def test_every_symbol_of_the_contract_is_found(
    compiled: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    """Methods, fields, oneofs, values, nested messages: each in the file that declares it."""
    pool = descriptor_pool.Default()
    declared = {symbol: file.name for file in compiled for symbol in symbols_of(file)}
    assert {METHOD, "penstock.v1.GenerateRequest.input", "penstock.v1.FEATURE_CHAT"} < declared.keys()
    assert {symbol: file_containing(pool, symbol).name for symbol in declared} == declared
    servicer = ReflectionServicer([], pool)
    for wrong in ("penstock.v1.InferenceService.generate", f"{METHOD}.x", "penstock.v1", ".", ""):
        answer = servicer.answer(reflection_pb2.ServerReflectionRequest(file_containing_symbol=wrong))
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0], wrong


@pytest.mark.parametrize("name", [V1, ALPHA])
@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        (METHOD, "inference"),
        ("penstock.v1.ControlService.WatchLoad", "control"),
        ("penstock.v1.GenerateRequest.input", "inference"),
        ("penstock.v1.SamplingParams.LogitBiasEntry.key", "types"),
        ("penstock.v1.TENSOR_ERROR_REASON_SHAPE", "weights"),
    ],
)
async def test_a_method_field_or_value_is_answered_with_its_file(
    rig: Rig, name: str, symbol: str, file: str
) -> None:
    (answer,) = await ask(rig, name, {"file_containing_symbol": symbol})
    assert next(iter(files(answer))) == f"penstock/v1/{file}.proto"
    assert pool_of(files(answer)).FindFileByName(f"penstock/v1/{file}.proto").package == "penstock.v1"


@pytest.mark.parametrize("name", [V1, ALPHA])
async def test_the_bytes_of_an_answer(
    rig: Rig, name: str, compiled: list[descriptor_pb2.FileDescriptorProto]
) -> None:
    """The question and the answer as they are on the wire, written down without the code of any .proto."""
    question = bytes([1 << 3 | 2, 1]) + b"h" + bytes([4 << 3 | 2, len(METHOD)]) + METHOD.encode()
    call: Any = rig.channel.stream_stream(f"/{name}/ServerReflectionInfo")
    (answer,) = [message async for message in call(iter([question]), timeout=20)]
    head = bytes([1 << 3 | 2, 1]) + b"h" + bytes([2 << 3 | 2, len(question)]) + question  # host, the question
    assert answer.startswith(head + bytes([4 << 3 | 2]))  # then a field like FileDescriptorSet
    body = answer[len(head) + 1 :]
    length = next(number for number, byte in enumerate(body, 1) if byte < 128)  # of the varint before it
    sent = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(body[length:]).file}
    expected = {file.name: file for file in compiled}
    ours = {name: file for name, file in sent.items() if name.startswith("penstock")}
    for file in ours.values():
        file.ClearField("source_code_info")  # the comments
    needed = [f"penstock/v1/{file}.proto" for file in ("inference", "types", "weights")]
    assert next(iter(sent)) == needed[0]
    assert ours == {name: expected[name] for name in needed}


def pool_with_extensions() -> descriptor_pool.DescriptorPool:
    """Make a message `a.Base`, extended with number 101 at the top of a file and with 100 inside a
    message.
    """
    base = descriptor_pb2.FileDescriptorProto(name="base.proto", package="a", syntax="proto2")
    base.message_type.add(name="Base").extension_range.add(start=100, end=200)
    more = descriptor_pb2.FileDescriptorProto(
        name="more.proto", package="b", syntax="proto2", dependency=["base.proto"]
    )
    told: dict[str, Any] = {
        "extendee": ".a.Base", "type": Field.TYPE_STRING, "label": Field.LABEL_OPTIONAL,
    }  # fmt: skip
    more.extension.add(name="top", number=101, **told)
    more.message_type.add(name="Holder").extension.add(name="nested", number=100, **told)
    pool = descriptor_pool.DescriptorPool()
    for file in (base, more):
        pool.AddSerializedFile(file.SerializeToString())
    return pool


async def test_extensions_are_found_by_name_and_by_number() -> None:
    servicer = ReflectionServicer([], pool_with_extensions())

    def answer(**question: Any) -> Any:
        return servicer.answer(reflection_pb2.ServerReflectionRequest(**question))

    def by_number(number: int) -> Any:
        return answer(file_containing_extension={"containing_type": "a.Base", "extension_number": number})

    for found in (
        answer(file_containing_symbol="b.top"),
        answer(file_containing_symbol="b.Holder.nested"),
        by_number(100),
        by_number(101),
        answer(file_by_filename="more.proto"),
    ):
        assert list(files(found)) == ["more.proto", "base.proto"]
    numbers = answer(all_extension_numbers_of_type="a.Base").all_extension_numbers_response
    assert (numbers.base_type_name, list(numbers.extension_number)) == ("a.Base", [100, 101])
    for missing in (
        by_number(102),
        by_number(-1),
        answer(all_extension_numbers_of_type="a.Nope"),
        answer(file_by_filename="nope.proto"),
    ):
        assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_the_comments_of_the_contract_come_with_it(rig: Rig) -> None:
    """Of messages, fields, RPCs and values, each at the place of what it is about."""
    (answer,) = await ask(rig, V1, {"file_containing_symbol": "penstock.v1.ControlService.GetLoad"})
    sent = files(answer)
    paths = {
        ("penstock/v1/types.proto", "SamplingParams", "temperature"): "0 always takes the likeliest token",
        ("penstock/v1/control.proto", "GetLoadResponse", "paused"): "Whether the server is paused.",
    }
    for (name, message, field), said in paths.items():
        kind, index = next(
            (one, index) for index, one in enumerate(sent[name].message_type) if one.name == message
        )
        number = next(number for number, one in enumerate(kind.field) if one.name == field)
        (comment,) = [
            location.leading_comments
            for location in sent[name].source_code_info.location
            if list(location.path) == [4, index, 2, number]
        ]
        assert said in comment
    assert not sent["google/protobuf/duration.proto"].HasField("source_code_info")


async def test_an_error_does_not_end_the_stream(rig: Rig) -> None:
    nothing, missing, found = await ask(
        rig, V1, {}, {"file_by_filename": "nope.proto"}, {"file_by_filename": "penstock/v1/types.proto"}
    )
    assert nothing.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert missing.original_request.file_by_filename == "nope.proto"
    assert "penstock/v1/types.proto" in files(found)
