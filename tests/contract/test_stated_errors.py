"""What the comments of fields say of errors is what a server answers.

Each row has a request that should be refused as the comment of a field says. A status and reason that a
comment states and that have no row fail, unless a test elsewhere shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.service.listening.listen_options import ListenOptions
from penstock.service.replies.reply_budget import ReplyLimits
from penstock.service.requests.generate import Features
from penstock.v1 import control_pb2, inference_pb2, telemetry_pb2, types_pb2, weights_pb2
from tests.contract.test_comments import _PAIR, SENT
from tests.contract.test_protos import REPOSITORY
from tests.service.rig import Rig, failure_of, fake, generate, serving
from tests.service.updatable import updatable
from tests.service.weights_rig import begin, fake_tensors, push, steps

SERVERS: Mapping[str, Callable[[], Any]] = {
    "plain": lambda: serving(updatable()),
    "without a tokenizer": lambda: serving(fake(codec=None)),
    "without grammars": lambda: serving(features=Features(constraints=False)),
    "with an address for control": lambda: serving(listen=ListenOptions(control_port=0)),
    "small replies": lambda: serving(replies=ReplyLimits(max_response_bytes=100)),
}
"""Servers on a fake engine that knows a context of 64 tokens."""
TURN = types_pb2.ChatMessage(role="user", content="x")
TOOL = types_pb2.ToolDefinition(name="f")
IMAGE = types_pb2.ContentPart(image=types_pb2.Image(data=b"x"))
NEW = fake_tensors(1)


def constraint(**kind: Any) -> inference_pb2.GenerateRequest:
    return generate("x", constraint=kind)


def spec(**fields: Any) -> weights_pb2.TensorSpec:
    """Return the tensor model.norm.weight, with other fields."""
    known: dict[str, Any] = {"name": "model.norm.weight", "dtype": weights_pb2.DATA_TYPE_F32, "shape": [8]}
    return weights_pb2.TensorSpec(**known | fields)


def manifest(**fields: Any) -> list[Any]:
    """Make an update of that one tensor."""
    made = begin(partial=True)
    made.begin.manifest.tensors.append(spec(**fields))
    return [made, *steps({"model.norm.weight": NEW["model.norm.weight"]})[1:]]


def only(**fields: Any) -> list[Any]:
    return [begin(NEW, **fields)]


@dataclass(frozen=True)
class Row:
    """A stated error."""

    stated: str
    """The field, the status and the reason."""
    request: Any
    """A request, or the messages of an update."""
    server: str = "plain"
    named: str = ""
    """What the error names, where that is not the field."""


def row(stated: str, request: Any, server: str = "plain", named: str = "") -> Row:
    return Row(stated, request, server, named)


TOKENLESS, GRAMMARLESS = "without a tokenizer", "without grammars"
ELSEWHERE_SERVED = "UNIMPLEMENTED SERVED_ELSEWHERE"
UNSUPPORTED = "UNIMPLEMENTED UNSUPPORTED_FEATURE"
ROWS = (
    row("GenerateRequest.model NOT_FOUND UNKNOWN_MODEL", generate("x", model="y")),
    row("GenerateRequest.prompt INVALID_ARGUMENT PROMPT_TOO_LONG", generate("x" * 64)),
    row(f"GenerateRequest.prompt {UNSUPPORTED}", generate("x"), TOKENLESS),
    row(f"GenerateRequest.adapter {UNSUPPORTED}", generate("x", adapter="a")),
    row(f"GenerateRequest.priority {UNSUPPORTED}", generate("x", priority=-1)),
    row(f"GenerateRequest.media {UNSUPPORTED}", generate("x", media=[types_pb2.Image(data=b"x")])),
    row(
        f"ContentPart.image {UNSUPPORTED}",
        generate(chat={"messages": [types_pb2.ChatMessage(role="user", parts=[IMAGE])]}),
    ),
    row(
        "GenerateRequest.min_weights FAILED_PRECONDITION WEIGHTS_TOO_OLD",
        generate("x", min_weights=types_pb2.WeightsVersion(label="initial", generation=2)),
    ),
    row(
        "TokenIds.ids INVALID_ARGUMENT PROMPT_TOO_LONG",
        inference_pb2.GenerateRequest(prompt_token_ids=types_pb2.TokenIds(ids=[1] * 64)),
    ),
    row(f"Constraint.json_schema {UNSUPPORTED}", constraint(json_schema="{}"), GRAMMARLESS),
    row(
        f"Constraint.json_object {UNSUPPORTED}", constraint(json_object=types_pb2.JsonObject()), GRAMMARLESS
    ),
    row(f"Constraint.regex {UNSUPPORTED}", constraint(regex="a"), GRAMMARLESS),
    row(f"Constraint.ebnf {UNSUPPORTED}", constraint(ebnf='start: "a"'), GRAMMARLESS),
    row(
        f"Constraint.choice {UNSUPPORTED}",
        constraint(choice=types_pb2.ChoiceList(choices=["a"])),
        GRAMMARLESS,
    ),
    row(
        f"OutputOptions.text {UNSUPPORTED}",
        inference_pb2.GenerateRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=[1]), output=types_pb2.OutputOptions(text=True)
        ),
        TOKENLESS,
    ),
    row(
        "OutputOptions.prompt_logprobs INVALID_ARGUMENT RESPONSE_TOO_LARGE",
        generate("x" * 20, stopping={"max_tokens": 1}, output={"prompt_logprobs": 5}),
        "small replies",
    ),
    row(
        f"SamplingParams.bad_words {UNSUPPORTED}",
        inference_pb2.GenerateRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=[1]), sampling=types_pb2.SamplingParams(bad_words=["x"])
        ),
        TOKENLESS,
    ),
    row(
        f"ChatPrompt.tool_choice {UNSUPPORTED}",
        generate(chat={"messages": [TURN], "tools": [TOOL], "tool_choice": "f"}),
        GRAMMARLESS,
    ),
    row(
        f"ToolDefinition.strict {UNSUPPORTED}",
        generate(
            chat={"messages": [TURN], "tools": [types_pb2.ToolDefinition(name="f", strict=True)]}
        ),
        GRAMMARLESS,
    ),
    row(
        f"ChatPrompt.chat_template {UNSUPPORTED}",
        generate(chat={"messages": [TURN], "chat_template": "{{ messages }}"}),
    ),
    row(
        f"AbortRequest.request_id_prefix {ELSEWHERE_SERVED}",
        inference_pb2.AbortRequest(request_id_prefix="a"),
        "with an address for control",
        named="prefix",
    ),
    row(
        f"AbortRequest.all {ELSEWHERE_SERVED}",
        inference_pb2.AbortRequest(all=inference_pb2.AllRequests()),
        "with an address for control",
        named="all requests",
    ),
    row(
        "TokenizeRequest.text INVALID_ARGUMENT PROMPT_TOO_LONG",
        control_pb2.TokenizeRequest(text="x" * 10_000),
    ),
    row(
        f"SetTracingRequest.level {UNSUPPORTED}",
        telemetry_pb2.SetTracingRequest(level=telemetry_pb2.TRACE_LEVEL_REQUESTS),
    ),
    row(
        "CommitWeightsRequest.update_id NOT_FOUND UNKNOWN_UPDATE",
        control_pb2.CommitWeightsRequest(update_id="nothing"),
        named="nothing",
    ),
    row(f"UpdateWeightsBegin.uri {UNSUPPORTED}", [begin(uri="file:///x")]),
    row(f"UpdateWeightsBegin.adapter {UNSUPPORTED}", only(adapter="a")),
    row(
        "UpdateWeightsBegin.partial INVALID_ARGUMENT INVALID_TENSORS",
        [begin({"model.norm.weight": NEW["model.norm.weight"]})],
        named="model.embed_tokens.weight",
    ),
    row(
        "UpdateWeightsBegin.expected_generation ABORTED GENERATION_CHANGED",
        only(expected_generation=7),
        named="generation 7",
    ),
    row("TensorManifest.tensors INVALID_ARGUMENT INVALID_TENSORS", manifest(name="other"), named="other"),
    row(
        "TensorSpec.dtype INVALID_ARGUMENT INVALID_TENSORS", manifest(dtype=weights_pb2.DATA_TYPE_I8),
        named="model.norm.weight",
    ),
    row(
        "TensorSpec.shape INVALID_ARGUMENT INVALID_TENSORS",
        manifest(shape=[4, 2]),
        named="model.norm.weight",
    ),
    row("TensorSpec.crc32c DATA_LOSS CHECKSUM_MISMATCH", manifest(crc32c=1), named="model.norm.weight"),
)  # fmt: skip
UPDATES = "tests/service/servicers/weights"
ADAPTERS = "tests/service/servicers/test_adapters.py"
ELSEWHERE = {
    "GenerateRequest.adapter NOT_FOUND UNKNOWN_ADAPTER": ADAPTERS,
    "GenerateRequest.adapter PERMISSION_DENIED FORBIDDEN": ADAPTERS,
    "LoadAdapterRequest.name FAILED_PRECONDITION ADAPTER_EXISTS": ADAPTERS,
    "LoadAdapterRequest.uri UNIMPLEMENTED UNSUPPORTED_FEATURE": ADAPTERS,
    "PinAdapterRequest.name NOT_FOUND UNKNOWN_ADAPTER": ADAPTERS,
    "PushAdapterBegin.config_json INVALID_ARGUMENT ADAPTER_FORMAT": ADAPTERS,
    "PushAdapterBegin.name FAILED_PRECONDITION ADAPTER_EXISTS": ADAPTERS,
    "UnloadAdapterRequest.name NOT_FOUND UNKNOWN_ADAPTER": ADAPTERS,
    "CommitWeightsRequest.drain_timeout DEADLINE_EXCEEDED DRAIN_TIMEOUT": f"{UPDATES}/test_update_weights.py",
    "Constraint.ebnf RESOURCE_EXHAUSTED COSTLY_GRAMMAR": "tests/service/servicers/chats/test_constraints.py",
    "Constraint.json_schema RESOURCE_EXHAUSTED COSTLY_GRAMMAR":
        "tests/service/servicers/chats/test_constraints.py",
    "Constraint.regex RESOURCE_EXHAUSTED COSTLY_GRAMMAR": "tests/service/servicers/chats/test_constraints.py",
    "GenerateRequest.request_id ALREADY_EXISTS DUPLICATE_REQUEST_ID":
        "tests/service/servicers/test_abort.py",
    "OutputOptions.hidden_states UNIMPLEMENTED UNSUPPORTED_FEATURE":
        "tests/service/servicers/readings/test_hidden_states.py",
    "PauseRequest.drain_timeout DEADLINE_EXCEEDED DRAIN_TIMEOUT": f"{UPDATES}/test_pause.py",
    "TensorChunk.data INVALID_ARGUMENT INVALID_TENSORS": f"{UPDATES}/test_update_weights_refused.py",
    "TensorSpec.sha256 DATA_LOSS CHECKSUM_MISMATCH": f"{UPDATES}/test_update_weights_refused.py",
    "UpdateWeightsBegin.drain_timeout DEADLINE_EXCEEDED DRAIN_TIMEOUT": f"{UPDATES}/test_update_weights.py",
    "UpdateWeightsBegin.partial UNAVAILABLE WEIGHTS_INCOMPLETE": f"{UPDATES}/test_update_weights_refused.py",
    "UpdateWeightsBegin.refuse_non_finite INVALID_ARGUMENT INVALID_TENSORS":
        f"{UPDATES}/test_update_weights_refused.py",
    "WatchLoadRequest.max_requests PERMISSION_DENIED FORBIDDEN": "tests/service/servicers/test_watch.py",
    "WatchLoadRequest.max_requests UNIMPLEMENTED SERVED_ELSEWHERE": "tests/service/servicers/test_watch.py",
}  # fmt: skip
"""Files of tests that show what stands in no row."""


def stated() -> set[str]:
    """Field, status and reason of each error in the comments. Those of StreamRequest are its twin's."""
    return {
        f"{told.name.removeprefix('penstock.v1.')} {status} {reason}"
        for told in SENT
        if not told.name.startswith("penstock.v1.StreamRequest.")
        for status, reason in _PAIR.findall(told.comment.labels.get("Errors", ""))
    }


async def ask(rig: Rig, request: Any) -> Any:
    if isinstance(request, list):
        return await push(rig, request)
    name = type(request).__name__.removesuffix("Request")
    service = rig.inference if name in ("Generate", "Abort") else rig.control
    return await getattr(service, name)(request)


async def test_a_stated_error_is_the_answer() -> None:
    async with AsyncExitStack() as stack:
        rigs = {name: await stack.enter_async_context(make()) for name, make in SERVERS.items()}
        for one in ROWS:
            field, status, reason = one.stated.split()
            failure = await failure_of(ask(rigs[one.server], one.request))
            assert (failure.code.name, failure.reason) == (status, reason), one.stated
            facts = dict(failure.info.metadata)
            if reason == "UNSUPPORTED_FEATURE":
                assert facts["field"].endswith(field.partition(".")[2]), (one.stated, facts)
            assert one.named in f"{facts} {failure.message}", (one.stated, facts, failure.message)


def test_each_stated_error_has_a_row_or_a_test() -> None:
    rows = {one.stated for one in ROWS}
    assert rows <= stated()
    assert stated() - rows == ELSEWHERE.keys()


@pytest.mark.parametrize("stated_error", ELSEWHERE)
def test_what_stands_in_no_row_is_tested_there(stated_error: str) -> None:
    text = (REPOSITORY / ELSEWHERE[stated_error]).read_text()
    reason = stated_error.split()[-1]
    assert f'"{reason}"' in text or f"'{reason}'" in text, f"no test names {reason} there"
