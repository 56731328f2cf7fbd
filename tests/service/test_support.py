"""Every field of every request message either has an effect that a test shows, or is refused when set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature
from penstock.service.support import HONOURED, REFUSED, REFUSED_RPCS, check_supported, check_wire
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import failure_of, generate, serving, stream

SERVICES = [
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
]
METHODS = {f"{s.full_name}/{m.name}": m for s in SERVICES for m in s.methods}
SERVED = {name: method for name, method in METHODS.items() if name not in REFUSED_RPCS}
GENERATE, CONTROL, REAL = "test_generate", "test_control", "test_cache_and_priority"

EFFECTS = {
    "request_id": f"{GENERATE}::test_request_id_reaches_the_engine",
    "model": f"{GENERATE}::test_model_may_be_named",
    "prompt": f"{GENERATE}::test_generate_answers_with_everything",
    "prompt_token_ids": f"{GENERATE}::test_prompt_ids_are_used_as_they_are",
    "prompt_token_ids.ids": f"{GENERATE}::test_prompt_ids_are_used_as_they_are",
    "chat": f"{GENERATE}::test_chat_is_rendered_with_the_template",
    "chat.messages": f"{GENERATE}::test_chat_is_rendered_with_the_template",
    "chat.messages.role": f"{GENERATE}::test_chat_is_rendered_with_the_template",
    "chat.messages.content": f"{GENERATE}::test_chat_is_rendered_with_the_template",
    "sampling": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.temperature": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.top_p": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.top_k": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.min_p": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.seed": f"{GENERATE}::test_sampling_reaches_the_engine",
    "stopping": f"{GENERATE}::test_max_tokens",
    "stopping.max_tokens": f"{GENERATE}::test_max_tokens",
    "stopping.min_tokens": f"{GENERATE}::test_min_tokens_delays_the_end_and_stops",
    "stopping.stop": f"{GENERATE}::test_stop_string_across_tokens",
    "stopping.stop_token_ids": f"{GENERATE}::test_stop_token_id_is_left_out",
    "stopping.ignore_eos": f"{GENERATE}::test_ignore_eos",
    "stopping.include_stop": f"{GENERATE}::test_include_stop_keeps_the_stop_token",
    "stopping.time_limit": f"{GENERATE}::test_time_limit_is_soft",
    "stopping.time_limit.seconds": f"{GENERATE}::test_time_limit_is_soft",
    "stopping.time_limit.nanos": f"{GENERATE}::test_time_limit_is_soft",
    "output": f"{GENERATE}::test_logprobs",
    "output.text": f"{GENERATE}::test_text_off_runs_no_detokenizer",
    "output.token_ids": f"{GENERATE}::test_token_ids_off",
    "output.logprobs": f"{GENERATE}::test_logprobs",
    "output.skip_special_tokens": f"{GENERATE}::test_special_tokens_are_shown_when_asked",
    "output.echo_prompt_token_ids": f"{GENERATE}::test_prompt_ids_are_echoed_when_asked",
    "cache": f"{REAL}::test_salts_share_nothing",
    "cache.cache_salt": f"{REAL}::test_salts_share_nothing",
    "cache.bypass_prefix_cache": f"{REAL}::test_bypass_neither_reads_nor_adds",
    "priority": f"{REAL}::test_a_higher_priority_overtakes",
    "context": f"{GENERATE}::test_truncation_reject_is_the_default",
    "min_tokens_per_message": f"{GENERATE}::test_min_tokens_per_message_coalesces",
    "request_ids": "test_abort::test_exact_ids",
    "request_ids.ids": "test_abort::test_exact_ids",
    "request_id_prefix": "test_abort::test_prefix",
    "all": "test_abort::test_all",
    "reason": "test_abort::test_exact_ids",
    "text": f"{CONTROL}::test_tokenize_text",
    "add_special_tokens": f"{CONTROL}::test_tokenize_special_tokens",
    "token_ids": f"{CONTROL}::test_detokenize",
    "skip_special_tokens": f"{CONTROL}::test_detokenize",
    "include_tensors": f"{CONTROL}::test_model_info",
}
"""Honoured path to the test of its effect."""


def fields_of(message: Descriptor, refused: frozenset[str], prefix: str = "") -> Iterator[str]:
    """Dotted paths of a message's fields, down to those below which everything is refused."""
    for field in message.fields:
        path = prefix + field.name
        yield path
        nested = field.message_type
        if nested is not None and not nested.GetOptions().map_entry and path not in refused:
            yield from fields_of(nested, refused, path + ".")


def requests_of_served_rpcs() -> dict[str, Descriptor]:
    return {method.input_type.full_name: method.input_type for method in SERVED.values()}


@pytest.mark.parametrize("name", requests_of_served_rpcs())
def test_every_field_is_honoured_or_refused(name: str) -> None:
    """Fails when a field is added to the contract, or when a table names one that is not there."""
    refused = frozenset(REFUSED.get(name, {}))
    honoured = HONOURED.get(name, frozenset())
    assert not honoured & refused
    assert set(fields_of(requests_of_served_rpcs()[name], refused)) == honoured | refused


def test_the_walk_would_see_a_new_field() -> None:
    """The walk above is not blind: it finds fields two levels down, and stops where all below is refused."""
    descriptor = inference_pb2.GenerateRequest.DESCRIPTOR
    walked = set(fields_of(descriptor, frozenset({"constraint"})))
    assert {"chat.messages.role", "stopping.time_limit.nanos", "constraint"} <= walked
    assert "constraint.regex" not in walked


def test_tables_name_real_messages_and_rpcs() -> None:
    assert set(HONOURED) | set(REFUSED) <= set(requests_of_served_rpcs())
    assert set(METHODS) >= REFUSED_RPCS


def test_every_honoured_field_names_a_test_that_exists() -> None:
    honoured = {path for paths in HONOURED.values() for path in paths}
    assert honoured == set(EFFECTS)
    defined = {
        f"{file.stem}::{node.name}"
        for file in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert set(EFFECTS.values()) <= defined


# -- every refused field, set --

SAMPLES = {
    FieldDescriptor.CPPTYPE_STRING: "x",
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_ENUM: 2,
}


def set_field(message: Message, path: str) -> str:
    """Give the field at `path` a value that is not neutral; the path as it will be named, with indices."""
    shown = []
    *parents, last = path.split(".")
    for name in parents:
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.is_repeated:
            message = getattr(message, name).add()
            shown.append(f"{name}[0]")
        else:
            message = getattr(message, name)
            shown.append(name)
    field = message.DESCRIPTOR.fields_by_name[last]
    value = SAMPLES.get(field.cpp_type, 3)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, last)[3] = 0.5
    elif field.message_type is not None and field.is_repeated:
        getattr(message, last).add()
    elif field.message_type is not None:
        getattr(message, last).SetInParent()
    elif field.is_repeated:
        getattr(message, last).append(value)
    else:
        setattr(message, last, value)
    return ".".join([*shown, last])


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, paths in REFUSED.items() for path in paths]
)
def test_refused_when_set(name: str, path: str) -> None:
    message = GetMessageClass(requests_of_served_rpcs()[name])()
    check_supported(message)
    shown = set_field(message, path)
    with pytest.raises(UnsupportedFeature) as refusal:
        check_supported(message)
    assert refusal.value.fields == (shown,)


@pytest.mark.parametrize("path", ["output.prompt_logprobs", "context.reserve_tokens"])
def test_refused_also_when_set_to_zero(path: str) -> None:
    """`optional` fields: 0 is not unset."""
    message = inference_pb2.GenerateRequest()
    parent, field = path.split(".")
    setattr(getattr(message, parent), field, 0)
    with pytest.raises(UnsupportedFeature):
        check_supported(message)


@pytest.mark.parametrize(
    "kind", [f.name for f in types_pb2.Constraint.DESCRIPTOR.oneofs_by_name["kind"].fields]
)
def test_every_kind_of_constraint_is_refused(kind: str) -> None:
    message = inference_pb2.GenerateRequest()
    set_field(message.constraint, kind)
    with pytest.raises(UnsupportedFeature, match="constraint"):
        check_supported(message)


async def test_all_refused_fields_are_named_in_the_status() -> None:
    fields = {
        "sampling": {"n": 2, "presence_penalty": 0.5},
        "adapter": "lora",
        "priority": -1,  # on a server that serves in order of arrival
        "stopping": {"max_tokens": 0},
    }
    async with serving() as rig:
        failure = await failure_of(rig.inference.Generate(generate("a", **fields)))
        streamed = await failure_of(rig.inference.Stream(stream("a", **fields)).read())
    for f in (failure, streamed):
        assert (f.code.name, f.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
        assert f.info.metadata["field"] == "sampling.presence_penalty,sampling.n,adapter,priority"


async def test_a_tool_turn_is_refused() -> None:
    chat = {"messages": [types_pb2.ChatMessage(role="user"), types_pb2.ChatMessage(role="tool")]}
    async with serving() as rig:
        failure = await failure_of(rig.inference.Generate(generate(chat=chat)))
    assert (failure.reason, failure.info.metadata["field"]) == (
        "UNSUPPORTED_FEATURE",
        "chat.messages[1].role",
    )


@pytest.mark.parametrize("name", sorted(REFUSED_RPCS))
async def test_refused_rpcs(name: str) -> None:
    method = METHODS[name]
    request = GetMessageClass(method.input_type)()
    async with serving() as rig:
        stub = rig.inference if "Inference" in name else rig.control
        if method.name == "UpdateWeights":
            failure = await failure_of(stub.UpdateWeights(iter([request])))
        else:
            failure = await failure_of(getattr(stub, method.name)(request))
    assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
    assert failure.info.metadata["field"] == method.name


@pytest.mark.parametrize("name", sorted(SERVED))
async def test_served_rpcs_are_not_refused(name: str) -> None:
    """The other half of the two tables: these answer something else than UNIMPLEMENTED."""
    method = METHODS[name]
    async with serving() as rig:
        call: Any = rig.channel.unary_unary(f"/{name}")
        if method.name == "Stream":
            stream_call: Any = rig.channel.unary_stream(f"/{name}")
            failure = await failure_of(stream_call(b"").read())
            assert failure.reason == "INVALID_FIELD"
        elif method.name in ("Generate", "Abort", "Tokenize"):
            assert (await failure_of(call(b""))).reason == "INVALID_FIELD"
        else:
            await call(b"")


# -- the wire --


def test_wire_types() -> None:
    """Field 1 as a varint where a string belongs; field 99, which nobody knows; and one inside `sampling`."""
    wrong = inference_pb2.GenerateRequest.FromString(b"\x08\x05")
    with pytest.raises(InvalidRequest, match="request_id: has the wrong wire type"):
        check_wire(wrong)
    newer = inference_pb2.GenerateRequest.FromString(b"\xd8\x06\x05" + b"\x32\x03\xd8\x06\x05")
    with pytest.raises(UnsupportedFeature) as refusal:
        check_wire(newer)
    assert refusal.value.fields == ("GenerateRequest#107", "sampling.SamplingParams#107")
    check_wire(generate("a", sampling={"logit_bias": {3: 0.5}}, stopping={"stop": ["x"]}))
