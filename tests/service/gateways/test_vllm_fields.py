"""The part of vLLM's service that is here has the names, numbers and types of the public one.

`vllm_fields.json` was made from the descriptors of the package smg-grpc-proto 0.4.28, which gateways are
built with: of each field the number, the type's number, the message's name, and whether it is repeated and
has presence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from penstock.service.gateways import smg_common_pb2, vllm_engine_pb2

PUBLIC: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_fields.json").read_text())
MESSAGES: list[Descriptor] = [
    *vllm_engine_pb2.DESCRIPTOR.message_types_by_name.values(),
    *smg_common_pb2.DESCRIPTOR.message_types_by_name.values(),
]
REFUSED_WHOLE = {"vllm.grpc.engine.MultimodalInputs", "vllm.grpc.engine.MediaRefs"}
"""Messages of which nothing is known but that they are refused."""


def shape(field: FieldDescriptor) -> list[Any]:
    message = field.message_type
    named = "" if message is None or message.GetOptions().map_entry else message.full_name
    return [field.number, field.type, named, field.is_repeated, field.has_presence]


def test_every_field_is_the_public_one() -> None:
    assert len(MESSAGES) > 20
    for message in MESSAGES:
        if message.full_name in REFUSED_WHOLE:
            assert not message.fields
            continue
        public = PUBLIC["messages"][message.full_name]
        for field in message.fields:
            assert shape(field) == public[field.name], f"{message.full_name}.{field.name}"


def test_every_field_of_a_request_is_known_so_that_none_is_ignored() -> None:
    for name in ("GenerateRequest", "SamplingParams", "TokenizedInput", "AbortRequest", "GetLoadsRequest"):
        ours = vllm_engine_pb2.DESCRIPTOR.message_types_by_name[name]
        assert set(ours.fields_by_name) == set(PUBLIC["messages"][ours.full_name]), name


def test_the_methods_are_the_public_ones() -> None:
    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    for method in service.methods:
        found = [method.input_type.full_name, method.output_type.full_name]
        streams = [method.client_streaming, method.server_streaming]
        assert [*found, *streams] == PUBLIC["methods"][method.name]
    asked_for = {"Generate", "Abort", "GetModelInfo", "GetServerInfo", "HealthCheck"}
    assert asked_for < {method.name for method in service.methods}
