"""Every field of every request message either has an effect, which a test shows, or is refused when set."""

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
from penstock.service.requests.support import REFUSED, check_supported, check_wire
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import failure_of, fake, generate, serving, stream

SERVICES = [
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
]
METHODS = {f"{s.full_name}/{m.name}": m for s in SERVICES for m in s.methods}
GENERATE, CONTROL, REAL = "test_generate", "test_control", "test_cache_and_priority"
CHATS, CONSTRAINTS, CONTEXT = "test_chats", "test_constraints", "test_context"
UPDATE, PAUSE, PROFILE = "test_update_weights", "test_pause", "test_profile"
WATCH, IMAGES, ADAPTERS = "test_watch", "test_images", "test_adapters"

FIELDS_REQUIRED = {
    "Generate", "Embed", "Score", "Rerank", "Abort", "Tokenize", "CommitWeights", "DiscardWeights",
}  # fmt: skip
EMBED, SCORE, RERANK = "test_embed", "test_score", "test_rerank"

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
    **dict.fromkeys(
        (
            "chat.messages.tool_calls",
            "chat.messages.tool_calls.id",
            "chat.messages.tool_calls.name",
            "chat.messages.tool_calls.arguments_json",
            "chat.messages.tool_call_id",
        ),
        f"{CHATS}::test_calls_and_what_tools_answered_stand_in_the_prompt",
    ),
    "chat.messages.name": f"{CHATS}::test_the_template_decides_whether_the_model_sees_who_speaks",
    "chat.messages.reasoning": f"{CHATS}::test_the_template_decides_what_the_model_sees_of_its_reasoning",
    **dict.fromkeys(
        ("chat.messages.parts", "chat.messages.parts.text", "chat.messages.parts.image"),
        f"{IMAGES}::test_images_of_a_turn_stand_in_its_prompt_and_its_usage",
    ),
    "chat.messages.parts.image.data": f"{IMAGES}::test_images_of_a_turn_stand_in_its_prompt_and_its_usage",
    "chat.messages.parts.image.media_type": f"{IMAGES}::test_a_media_type_may_be_told",
    **dict.fromkeys(
        ("media", "media.data", "media.media_type"),
        f"{IMAGES}::test_media_belong_to_the_places_of_a_prompt",
    ),
    "chat.tools": f"{CHATS}::test_tools_stand_in_the_prompt",
    "chat.tools.name": f"{CHATS}::test_tools_stand_in_the_prompt",
    "chat.tools.description": f"{CHATS}::test_a_tools_definition_reaches_the_template",
    "chat.tools.parameters_json": f"{CHATS}::test_a_tools_definition_reaches_the_template",
    "chat.tools.strict": "test_strict_tools::test_a_strict_tool_is_called_as_its_schema_says",
    "chat.tool_choice": "test_tool_calls::test_tool_choice_that_requires_a_call_enforces_it",
    "chat.parallel_tool_calls": "test_tool_calls::test_an_output_may_be_kept_to_one_call",
    "chat.chat_template": f"{CHATS}::test_a_template_of_the_requests_own",
    "chat.template_options_json": f"{CHATS}::test_options_are_variables_of_the_template",
    "sampling": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.temperature": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.top_p": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.top_k": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.min_p": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.presence_penalty": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.frequency_penalty": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.repetition_penalty": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.seed": f"{GENERATE}::test_sampling_reaches_the_engine",
    "sampling.n": "test_outputs::test_n_outputs_in_order",
    **dict.fromkeys(
        (
            "sampling.logit_bias",
            "sampling.bad_words",
            "sampling.allowed_token_ids",
        ),
        f"{GENERATE}::test_tokens_that_are_pushed_or_forbidden_reach_the_engine",
    ),
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
    "output.prompt_logprobs": "test_prompt_logprobs::test_prompt_logprobs",
    "output.skip_special_tokens": f"{GENERATE}::test_special_tokens_are_shown_when_asked",
    "output.hidden_states": "test_hidden_states::test_one_for_each_token",
    **dict.fromkeys(
        ("inputs", "inputs.text", "inputs.token_ids", "inputs.token_ids.ids"),
        f"{EMBED}::test_one_vector_for_each_input_in_their_order",
    ),
    **dict.fromkeys(
        ("query", "documents", "top_n", "max_document_tokens"),
        f"{RERANK}::test_documents_are_ordered_by_the_cosines_of_vectors",
    ),
    "method": f"{RERANK}::test_the_checkpoint_chooses_the_method",
    "instruction": f"{RERANK}::test_a_model_that_judges_is_shown_each_pair_with_both_answers",
    **dict.fromkeys(("pooling", "normalize", "dimensions"), f"{EMBED}::test_pooling_dimensions_and_length"),
    **dict.fromkeys(
        (f"inputs.pair{field}" for field in ("", ".first", ".second")),
        "test_classify::test_the_classes_are_pytorchs",
    ),
    "truncation": f"{EMBED}::test_inputs_that_are_too_long",
    **dict.fromkeys(
        (f"continuations{field}" for field in ("", ".text", ".token_ids", ".token_ids.ids")),
        f"{SCORE}::test_each_continuation_has_the_log_probabilities_of_its_tokens",
    ),
    "output.echo_prompt_token_ids": f"{GENERATE}::test_prompt_ids_are_echoed_when_asked",
    "cache": f"{REAL}::test_salts_share_nothing",
    "cache.cache_salt": f"{REAL}::test_salts_share_nothing",
    "cache.bypass_prefix_cache": f"{REAL}::test_bypass_neither_reads_nor_adds",
    "max_proposed_tokens": (
        f"{GENERATE}::test_the_bound_of_proposals_reaches_the_engine_and_usage_tells_what_came_of_it"
    ),
    "adapter": f"{ADAPTERS}::test_requests_reach_the_engine_with_their_adapter",
    "priority": f"{REAL}::test_a_higher_priority_overtakes",
    "constraint": f"{CONSTRAINTS}::test_every_kind",
    "constraint.json_schema": f"{CONSTRAINTS}::test_every_kind",
    "constraint.json_object": f"{CONSTRAINTS}::test_json_object",
    "constraint.regex": f"{CONSTRAINTS}::test_every_kind",
    "constraint.ebnf": f"{CONSTRAINTS}::test_every_kind",
    "constraint.choice": f"{CONSTRAINTS}::test_every_kind",
    "constraint.choice.choices": f"{CONSTRAINTS}::test_every_kind",
    "context": f"{CONTEXT}::test_truncation",
    "context.truncation": f"{CONTEXT}::test_truncation",
    "context.reserve_tokens": f"{CONTEXT}::test_reserve_tokens",
    "context.cap_max_tokens": f"{CONTEXT}::test_cap_max_tokens",
    "tool_call_deltas": "test_tool_calls::test_calls_come_in_pieces_if_these_are_asked_for",
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
    "include_tokenizer": f"{CONTROL}::test_model_info",
    "first_token_id": "test_vocabulary::test_pages_join_to_the_whole_vocabulary",
    "max_tokens": "test_vocabulary::test_pages_join_to_the_whole_vocabulary",
    "level": "test_tracing::test_a_level_is_set_and_told",
    **dict.fromkeys(
        ("min_weights", "min_weights.generation", "min_weights.label"),
        "test_min_weights::test_requests_that_want_newer_weights_are_refused",
    ),
    **dict.fromkeys(
        (
            "begin",
            "begin.update_id",
            "begin.version_label",
            "begin.manifest",
            "begin.manifest.tensors",
            "begin.manifest.tensors.name",
            "begin.manifest.tensors.dtype",
            "begin.manifest.tensors.shape",
            "begin.manifest.tensors.crc32c",
            "begin.manifest.tensors.sha256",
            "begin.partial",
            "begin.expected_generation",
            "begin.in_flight",
            "begin.drain_timeout",
            "begin.drain_timeout.seconds",
            "begin.drain_timeout.nanos",
            "begin.staging",
            "begin.refuse_non_finite",
        ),
        f"{UPDATE}::test_everything_asked_for_reaches_the_updater",
    ),
    **dict.fromkeys(
        (
            "chunk",
            "chunk.tensor_index",
            "chunk.offset",
            "chunk.data",
            "commit",
            "commit.total_bytes",
        ),
        f"{UPDATE}::test_new_weights_serve",
    ),
    **dict.fromkeys(
        (
            "chunks",
            "chunks.chunks",
            "chunks.chunks.tensor_index",
            "chunks.chunks.offset",
            "chunks.chunks.data",
        ),
        "test_update_weights_refused::test_chunks_in_one_message_are_taken_as_if_they_came_alone",
    ),
    "begin.uri": f"{UPDATE}::test_weights_from_a_file",
    "begin.stage_only": f"{UPDATE}::test_staged_weights_are_committed",
    "begin.validate_only": f"{UPDATE}::test_a_manifest_is_only_validated",
    "update_id": f"{UPDATE}::test_staged_weights_are_committed",
    **dict.fromkeys(
        ("in_flight", "drain_timeout", "drain_timeout.seconds", "drain_timeout.nanos"),
        f"{PAUSE}::test_a_pause_that_waits_too_long_is_taken_back",
    ),
    **dict.fromkeys(
        ("interval", "interval.seconds", "interval.nanos"), f"{WATCH}::test_the_interval_is_the_callers"
    ),
    "max_requests": f"{WATCH}::test_requests_are_listed_oldest_first",
    **dict.fromkeys(("free_kv_cache", "offload_weights"), f"{PAUSE}::test_memory_is_freed"),
    **dict.fromkeys(
        ("steps", "timeout", "timeout.seconds", "timeout.nanos"),
        f"{PROFILE}::test_it_says_when_it_begins_and_what_was_written",
    ),
    **dict.fromkeys(
        ("name", "uri", "replace", "pinned"),
        f"{ADAPTERS}::test_an_adapter_is_read_by_its_name_or_its_uri",
    ),
    **dict.fromkeys(
        ("begin.name", "begin.config_json", "begin.pinned"),
        f"{ADAPTERS}::test_a_pushed_adapter_is_what_was_sent",
    ),
    "begin.replace": f"{ADAPTERS}::test_a_name_that_is_taken_is_pushed_again_only_to_replace_it",
    "include_data": f"{PROFILE}::test_the_files_come_as_parts_of_a_zip",
}
"""From each honoured path to the test of its effect."""


def fields_of(message: Descriptor, refused: frozenset[str], prefix: str = "") -> Iterator[str]:
    """Dotted paths of a message's fields, except below a path that is refused."""
    for field in message.fields:
        path = prefix + field.name
        yield path
        nested = field.message_type
        if nested is not None and not nested.GetOptions().map_entry and path not in refused:
            yield from fields_of(nested, refused, path + ".")


def requests() -> dict[str, Descriptor]:
    return {method.input_type.full_name: method.input_type for method in METHODS.values()}


def test_the_walk_would_see_a_new_field() -> None:
    """The walk above finds fields two levels down, and stops where everything below is refused."""
    descriptor = inference_pb2.GenerateRequest.DESCRIPTOR
    walked = set(fields_of(descriptor, frozenset({"constraint"})))
    assert {"chat.messages.role", "stopping.time_limit.nanos", "constraint"} <= walked
    assert "constraint.regex" not in walked


def test_every_field_has_an_effect_or_is_refused() -> None:
    """A field that is added to the contract is refused in `REFUSED`, or has the test of its effect here."""
    honoured = set[str]()
    for name, descriptor in requests().items():
        refused = frozenset(REFUSED.get(name, {}))
        walked = set(fields_of(descriptor, refused))
        assert refused <= walked, f"{name} has no such field"
        honoured |= walked - refused
    assert set(REFUSED) <= set(requests())
    assert honoured == set(EFFECTS)
    defined = {
        f"{file.stem}::{node.name}"
        for file in Path(__file__).parents[1].rglob("test_*.py")
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
    """Give the field at `path` a value that is not neutral. Returns the path as errors name it,
    with indices.
    """
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
    message = GetMessageClass(requests()[name])()
    check_supported(message)
    shown = set_field(message, path)
    with pytest.raises(UnsupportedFeature) as refusal:
        check_supported(message)
    assert refusal.value.fields == (shown,)


LACKING = {
    "priority": (),
    "output.prompt_logprobs": (),
    "output.text": (False,),
    "chat": (),
    **{f"constraint.{field.name}": () for field in types_pb2.Constraint.DESCRIPTOR.fields},
}
"""What a server may lack, depending on how it was started."""


@pytest.mark.parametrize("path", LACKING)
def test_what_this_server_lacks_is_refused_when_set(path: str) -> None:
    message = inference_pb2.GenerateRequest()
    check_supported(message, LACKING)
    shown = set_field(message, path)
    check_supported(message)
    with pytest.raises(UnsupportedFeature) as refusal:
        check_supported(message, LACKING)
    assert refusal.value.fields == (shown,)


def test_an_optional_zero_is_not_unset() -> None:
    """It is refused as any value, unless that very value asks for nothing."""
    message = inference_pb2.GenerateRequest(output=types_pb2.OutputOptions(prompt_logprobs=0, text=False))
    with pytest.raises(UnsupportedFeature) as refusal:
        check_supported(message, LACKING)
    assert refusal.value.fields == ("output.prompt_logprobs",)


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
        assert f.info.metadata["field"] == "adapter,priority"


@pytest.mark.parametrize("name", sorted(METHODS))
async def test_no_rpc_is_refused_as_a_whole(name: str) -> None:
    """Each answers an empty message with OK, or says what is missing in it."""
    method = METHODS[name]
    async with serving() as rig:
        if method.name in ("LoadAdapter", "UnloadAdapter", "PinAdapter"):  # this server has no adapters
            change: Any = rig.channel.unary_unary(f"/{name}")
            assert (await failure_of(change(b""))).reason == "UNSUPPORTED_FEATURE"
        elif method.name == "PushAdapter":
            push: Any = rig.channel.stream_unary(f"/{name}")
            assert (await failure_of(push(iter([b""])))).reason == "UNSUPPORTED_FEATURE"
        elif method.name == "Profile":  # this server has no folder for profiles
            profile: Any = rig.channel.unary_stream(f"/{name}")
            assert (await failure_of(profile(b"").read())).reason == "UNSUPPORTED_FEATURE"
        elif method.name == "WatchLoad":
            watch: Any = rig.channel.unary_stream(f"/{name}")
            assert await watch(b"").read()
        elif method.name == "Stream":
            stream_call: Any = rig.channel.unary_stream(f"/{name}")
            failure = await failure_of(stream_call(b"").read())
            assert failure.reason == "INVALID_FIELD"
        elif method.name == "UpdateWeights":
            upload: Any = rig.channel.stream_unary(f"/{name}")
            assert (await failure_of(upload(iter([b""])))).reason == "INVALID_FIELD"
        else:
            call: Any = rig.channel.unary_unary(f"/{name}")
            if method.name == "Classify":  # the model of this server has no classes
                assert (await failure_of(call(b""))).reason == "UNSUPPORTED_FEATURE"
            elif method.name in FIELDS_REQUIRED:
                assert (await failure_of(call(b""))).reason == "INVALID_FIELD"
            else:
                await call(b"")


async def test_a_field_of_tomorrow_is_refused_by_every_rpc(tmp_path: Path) -> None:
    """Whatever else is wrong with the message, or right."""
    tomorrow = b"\xf8\x3f\x01"  # the varint 1 as field 1023
    named: dict[str, str] = {}
    async with serving(fake(max_adapters=1, adapter_dir=tmp_path), profile_dir=tmp_path) as rig:
        for name, method in METHODS.items():
            requests, replies = method.client_streaming, method.server_streaming
            kind = f"{'stream' if requests else 'unary'}_{'stream' if replies else 'unary'}"
            call: Any = getattr(rig.channel, kind)(f"/{name}")(iter([tomorrow]) if requests else tomorrow)
            failure = await failure_of(call.read() if replies else call)
            assert failure.reason == "UNSUPPORTED_FEATURE", name
            named[name] = failure.info.metadata["field"]
    assert named == {name: f"{method.input_type.name}#1023" for name, method in METHODS.items()}


# -- the wire --


def test_wire_types() -> None:
    """Field 1 as a varint although it is a string; the unknown field 99; and one inside `sampling`."""
    wrong = inference_pb2.GenerateRequest.FromString(b"\x08\x05")
    with pytest.raises(InvalidRequest, match="request_id: has the wrong wire type"):
        check_wire(wrong)
    newer = inference_pb2.GenerateRequest.FromString(b"\xd8\x06\x05" + b"\x32\x03\xd8\x06\x05")
    with pytest.raises(UnsupportedFeature) as refusal:
        check_wire(newer)
    assert refusal.value.fields == ("GenerateRequest#107", "sampling.SamplingParams#107")
    check_wire(generate("a", sampling={"logit_bias": {3: 0.5}}, stopping={"stop": ["x"]}))
