"""Reflection as tools use it: under its current name, and under the older one."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from tests.service.rig import Rig, serving

V1, ALPHA = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"


async def ask(rig: Rig, name: str, *questions: dict[str, str]) -> list[Any]:
    """The answers to the questions of one stream."""
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
    """A pool of these files alone."""
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
async def test_services_and_files_under_both_names(name: str) -> None:
    async with serving() as rig:
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


async def test_each_listed_service_can_be_described() -> None:
    """A tool can build the service from the answers alone."""
    async with serving() as rig:
        (listed,) = await ask(rig, V1, {"list_services": ""})
        for service in listed.list_services_response.service:
            (answer,) = await ask(rig, V1, {"file_containing_symbol": service.name})
            methods = pool_of(files(answer)).FindServiceByName(service.name).methods
            assert methods
            assert all(m.input_type.full_name.rpartition(".")[0] in service.name for m in methods), (
                service.name
            )


async def test_v1_is_not_v1alpha_under_another_name() -> None:
    async with serving() as rig:
        (answer,) = await ask(rig, V1, {"file_containing_symbol": V1})
    (file,) = files(answer).values()
    assert file.package == "grpc.reflection.v1"
    assert "v1alpha" not in str(file)
