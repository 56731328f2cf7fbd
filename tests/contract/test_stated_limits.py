"""What the contract's comments say of limits and defaults is what the server does.

Each row has a limit as a comment writes it, with the last values on its inside and the first ones on its
outside. A limit that a comment states in numbers and that has no row fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.sampling import FIELDS, GenerationDefaults
from penstock.service.requests.adapters import named_adapter, to_push
from penstock.service.requests.control import (
    check_discard,
    to_begin,
    to_commit,
    to_page,
    to_pause,
    to_profile,
    to_watch,
)
from penstock.service.requests.generate import Features, to_job
from penstock.service.servicers.serving import limits_of, to_target
from penstock.v1 import adapters_pb2, control_pb2, inference_pb2, telemetry_pb2, types_pb2, weights_pb2
from tests.contract.test_comments import MESSAGES, SENT
from tests.service.rig import fake

LIMITS = limits_of(fake(max_model_len=1000), features=Features(request_templates=True))
BEGIN = weights_pb2.UpdateWeightsRequest(
    begin=weights_pb2.UpdateWeightsBegin(update_id="u", version_label="l", uri="file:///x")
)
MANIFEST = weights_pb2.UpdateWeightsRequest(
    begin=weights_pb2.UpdateWeightsBegin(
        update_id="u",
        version_label="l",
        manifest=weights_pb2.TensorManifest(
            tensors=[weights_pb2.TensorSpec(name="t", dtype=weights_pb2.DATA_TYPE_F32)]
        ),
    )
)
JSON_SAYS = "1,048,576 characters, 50,000 values and 100 levels"


def json_of(chars: int = 0, values: int = 0, levels: int = 0) -> str:
    """Make a JSON object with so many characters, values or levels."""
    if chars:
        return '{"a": "' + "x" * (chars - 9) + '"}'
    if levels:
        return '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    return "{" + ", ".join(f'"{i}": 1' for i in range(values)) + "}"


GOOD_JSON = [json_of(chars=2**20), json_of(values=50_000), json_of(levels=100)]
BAD_JSON = [json_of(chars=2**20 + 1), json_of(values=50_001), json_of(levels=101)]


def chat(**fields: Any) -> inference_pb2.GenerateRequest:
    turn = types_pb2.ChatMessage(role="user", content="x")
    return inference_pb2.GenerateRequest(chat=types_pb2.ChatPrompt(**{"messages": [turn], **fields}))


def tool(**fields: Any) -> types_pb2.ToolDefinition:
    return types_pb2.ToolDefinition(**{"name": "f", **fields})


def calls(count: int, **fields: Any) -> types_pb2.ChatMessage:
    call = types_pb2.ToolCall(**{"id": "i", "name": "f", "arguments_json": "{}", **fields})
    return types_pb2.ChatMessage(role="assistant", tool_calls=[call] * count)


def turn_of_parts(count: int) -> types_pb2.ChatMessage:
    return types_pb2.ChatMessage(role="user", parts=[types_pb2.ContentPart(text="x")] * count)


def constraint(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt="x", constraint=types_pb2.Constraint(**fields))


@dataclass(frozen=True)
class Row:
    """A stated limit."""

    name: str
    """The field whose comment states it, with its message."""
    says: str
    """The limit in the comment's words."""
    make: Callable[[Any], Message]
    """The request with this value in the field."""
    inside: Sequence[Any]
    outside: Sequence[Any]
    violated: str = field(default="")
    """How the path begins that the refusal names; by default the name of the field is in it."""


def at(path: str, base: Message | None = None) -> Callable[[Any], Message]:
    """Make requests with a value at this path; without `base` they generate."""

    def make(value: Any) -> Message:
        request = type(base)() if base is not None else inference_pb2.StreamRequest(prompt="x")
        if base is not None:
            request.CopyFrom(base)
        *above, last = path.split(".")
        owner: Any = request
        for name in above:
            owner = getattr(owner, name) if not name.isdigit() else owner[int(name)]
        descriptor = owner.DESCRIPTOR.fields_by_name[last]
        if isinstance(value, Message):
            getattr(owner, last).CopyFrom(value)
        elif descriptor.is_repeated:
            getattr(owner, last).extend(value)
        else:
            setattr(owner, last, value)
        return request

    return make


def s(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def abort(**fields: Any) -> inference_pb2.AbortRequest:
    return inference_pb2.AbortRequest(**fields)


def choices(*texts: str) -> inference_pb2.GenerateRequest:
    return constraint(choice=types_pb2.ChoiceList(choices=texts))


MOST = 262_144
PUSH = adapters_pb2.PushAdapterRequest(
    begin=adapters_pb2.PushAdapterBegin(
        name="a",
        config_json="{}",
        manifest=weights_pb2.TensorManifest(
            tensors=[weights_pb2.TensorSpec(name="t", dtype=weights_pb2.DATA_TYPE_F32)]
        ),
    )
)
COMMIT = control_pb2.CommitWeightsRequest(update_id="u")
ROWS = (
    Row(
        "GenerateRequest.request_id",
        "at most 128 characters, without U+0000",
        at("request_id"),
        ["", "x" * 128, "\u20ac" * 128],
        ["x" * 129, "x\0"],
    ),
    Row("SamplingParams.temperature", "0 to 100", at("sampling.temperature"), [0, 100], [-1e-9, 100.001]),
    Row("SamplingParams.top_p", "above 0, to 1", at("sampling.top_p"), [1e-9, 1], [0, 1.001]),
    Row("SamplingParams.top_k", "0 to 2,147,483,647", at("sampling.top_k"), [0, 2**31 - 1], [2**31]),
    Row("SamplingParams.min_p", "0 to 1", at("sampling.min_p"), [0, 1], [-1e-9, 1.001]),
    Row(
        "SamplingParams.presence_penalty", "-2 to 2", at("sampling.presence_penalty"), [-2, 2], [-2.01, 2.01]
    ),
    Row(
        "SamplingParams.frequency_penalty",
        "-2 to 2",
        at("sampling.frequency_penalty"),
        [-2, 2],
        [-2.01, 2.01],
    ),
    Row(
        "SamplingParams.repetition_penalty",
        "above 0, and finite",
        at("sampling.repetition_penalty"),
        [1e-9, 1e300],
        [0, float("inf")],
    ),
    Row("SamplingParams.seed", "any 64-bit number", at("sampling.seed"), [0, 2**64 - 1], []),
    Row("SamplingParams.n", "1 to 128", at("sampling.n"), [1, 128], [0, 129]),
    Row(
        "SamplingParams.bad_words",
        "at most 1,000 texts, each of 1 to 1,000 characters besides spaces",
        at("sampling.bad_words"),
        [["x"] * 1000, ["x" * 1000 + " "]],
        [["x"] * 1001, [" "], ["x" * 1001]],
    ),
    Row("StoppingParams.max_tokens", "at least 1", at("stopping.max_tokens"), [1, 2**32 - 1], [0]),
    Row(
        "StoppingParams.stop",
        "at most 16 texts, each of 1 to 256 characters",
        at("stopping.stop"),
        [["x"] * 16, ["x" * 256]],
        [["x"] * 17, [""], ["x" * 257]],
    ),
    Row(
        "StoppingParams.stop_token_ids",
        "at most 32 ids less the number of",
        at("stopping.stop_token_ids"),
        [range(32 - len(LIMITS.info.eos_token_ids))],
        [range(33 - len(LIMITS.info.eos_token_ids))],
    ),
    Row("StoppingParams.time_limit", "above 0 s", at("stopping.time_limit"), [s(1e-9)], [s(0), s(-1)]),
    Row(
        "CacheOptions.cache_salt", "at most 256 characters", at("cache.cache_salt"), ["x" * 256], ["x" * 257]
    ),
    Row("GenerateRequest.priority", "any 32-bit number", at("priority"), [0], []),
    Row("GenerateRequest.max_proposed_tokens", "0 to 16", at("max_proposed_tokens"), [0, 16], [17]),
    Row(
        "StreamRequest.min_tokens_per_message",
        "at least 1",
        at("min_tokens_per_message"),
        [1, 2**32 - 1],
        [0],
    ),
    Row(
        "TokenIds.ids",
        "at most 8 times as many or 65,536, whichever is more",
        lambda count: inference_pb2.StreamRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=[1] * count),
            context=types_pb2.ContextOptions(truncation=types_pb2.TRUNCATION_LEFT),
        ),
        [65_536],
        [65_537],
    ),
    Row(
        "ChatPrompt.messages",
        "1 to 10,000 turns",
        lambda count: chat(messages=[types_pb2.ChatMessage(role="user")] * count),
        [1, 10_000],
        [0, 10_001],
    ),
    Row(
        "ChatPrompt.tools",
        "at most 1,000 tools",
        lambda count: chat(tools=[tool(name=f"f{i}") for i in range(count)]),
        [0, 1000],
        [1001],
    ),
    Row(
        "ChatPrompt.chat_template",
        "at most 262,144 characters",
        lambda text: chat(chat_template=text),
        ["", "x" * MOST],
        ["x" * (MOST + 1)],
    ),
    Row(
        "ChatPrompt.template_options_json",
        JSON_SAYS,
        lambda text: chat(template_options_json=text),
        ["", *GOOD_JSON],
        [*BAD_JSON, "[]", '{"messages": 1}'],
    ),
    Row(
        "ChatMessage.tool_calls",
        "at most 10,000 calls in all turns together",
        lambda count: chat(messages=[calls(count - 1), calls(1)]),
        [10_000],
        [10_001],
    ),
    Row(
        "ChatMessage.parts",
        "at most 10,000 parts in all turns together",
        lambda count: chat(messages=[turn_of_parts(count - 1), turn_of_parts(1)]),
        [10_000],
        [10_001],
    ),
    Row(
        "ToolDefinition.parameters_json",
        JSON_SAYS,
        lambda text: chat(tools=[tool(parameters_json=text)]),
        ["", *GOOD_JSON],
        [*BAD_JSON, '{"type": "array"}'],
    ),
    Row(
        "Constraint.json_schema",
        "not empty, at most 262,144 bytes of UTF-8",
        lambda text: constraint(json_schema=text),
        ["{}", "x" * MOST],
        ["", "x" * (MOST + 1), "\u20ac" * (MOST // 2)],
    ),
    Row(
        "Constraint.regex",
        "at most 262,144 bytes of UTF-8",
        lambda text: constraint(regex=text),
        ["", "x" * MOST],
        ["x" * (MOST + 1)],
    ),
    Row(
        "Constraint.ebnf",
        "not empty, at most 262,144 bytes of UTF-8",
        lambda text: constraint(ebnf=text),
        ["x", "x" * MOST],
        ["", "x" * (MOST + 1)],
    ),
    Row(
        "ChoiceList.choices",
        "1 to 10,000 strings of at most 262,144 bytes of UTF-8 together",
        lambda texts: choices(*texts),
        [[""], ["x"] * 10_000, ["x" * (MOST - 1), "y"]],
        [[], ["x"] * 10_001, ["x" * MOST, "y"]],
        violated="constraint.choice",
    ),
    Row(
        "RequestIds.ids",
        "1 to 10,000 ids",
        lambda count: abort(request_ids=inference_pb2.RequestIds(ids=["x"] * count)),
        [1, 10_000],
        [0, 10_001],
    ),
    Row(
        "AbortRequest.reason",
        "at most 1,000 characters",
        lambda text: abort(all=inference_pb2.AllRequests(), reason=text),
        ["", "x" * 1000],
        ["x" * 1001],
    ),
    Row(
        "WatchLoadRequest.interval",
        "0.1 s to 60 s",
        at("interval", telemetry_pb2.WatchLoadRequest()),
        [s(0.1), s(60)],
        [s(0.099), s(60.001)],
    ),
    Row(
        "WatchLoadRequest.max_requests",
        "0 to 1,000",
        at("max_requests", telemetry_pb2.WatchLoadRequest()),
        [0, 1000],
        [1001],
    ),
    Row(
        "ProfileRequest.steps",
        "1 to 1,000",
        at("steps", telemetry_pb2.ProfileRequest()),
        [1, 1000],
        [0, 1001],
    ),
    Row(
        "ProfileRequest.timeout",
        "0.1 s to 300 s",
        at("timeout", telemetry_pb2.ProfileRequest()),
        [s(0.1), s(300)],
        [s(0.099), s(300.001)],
    ),
    Row(
        "GetVocabularyRequest.max_tokens",
        "1 to 32,768",
        at("max_tokens", control_pb2.GetVocabularyRequest()),
        [1, 32_768],
        [0, 32_769],
    ),
    Row(
        "UpdateWeightsBegin.update_id",
        "1 to 128 characters",
        at("begin.update_id", BEGIN),
        ["x", "x" * 128],
        ["", "x" * 129],
    ),
    Row(
        "UpdateWeightsBegin.version_label",
        "1 to 256 characters",
        at("begin.version_label", BEGIN),
        ["x", "x" * 256],
        ["", "x" * 257],
    ),
    Row(
        "UpdateWeightsBegin.drain_timeout",
        "at least 0 s",
        at("begin.drain_timeout", BEGIN),
        [s(0)],
        [s(-0.1)],
    ),
    Row(
        "TensorManifest.tensors",
        "at most 20,000 tensors",
        at("begin.manifest.tensors", MANIFEST),
        [MANIFEST.begin.manifest.tensors[:1] * 19_999],
        [MANIFEST.begin.manifest.tensors[:1] * 20_000],
    ),
    Row(
        "TensorSpec.name",
        "1 to 512 characters",
        at("begin.manifest.tensors.0.name", MANIFEST),
        ["x", "x" * 512],
        ["", "x" * 513],
    ),
    Row(
        "TensorSpec.shape",
        "at most 8 dimensions",
        at("begin.manifest.tensors.0.shape", MANIFEST),
        [[], [1] * 8],
        [[1] * 9],
    ),
    Row(
        "TensorSpec.sha256",
        "32 bytes or none",
        at("begin.manifest.tensors.0.sha256", MANIFEST),
        [b"", b"x" * 32],
        [b"x", b"x" * 31, b"x" * 33],
    ),
    Row(
        "LoadAdapterRequest.name",
        "1 to 128 printable characters, none of them a slash, a backslash, a colon or a double quote, and "
        "the first no dot",
        at("name", adapters_pb2.UnloadAdapterRequest()),
        ["x", "\u20ac" * 128, "a.b", "a b'"],
        ["", "x" * 129, ".x", "a/b", "a\\b", "a:b", 'a"b', "a\nb"],
    ),
    Row(
        "PushAdapterBegin.config_json",
        "a JSON object of at most 65,536 bytes",
        at("begin.config_json", PUSH),
        ["{}", json_of(chars=65_536)],
        ["", "[]", "{", json_of(chars=65_537)],
    ),
    Row(
        "PauseRequest.drain_timeout",
        "at least 0 s",
        at("drain_timeout", control_pb2.PauseRequest()),
        [s(0)],
        [s(-0.1)],
    ),
    Row(
        "CommitWeightsRequest.update_id",
        "1 to 128 characters",
        at("update_id", COMMIT),
        ["x", "x" * 128],
        ["", "x" * 129],
    ),
    Row("CommitWeightsRequest.drain_timeout", "at least 0 s", at("drain_timeout", COMMIT), [s(0)], [s(-0.1)]),
    Row(
        "DiscardWeightsRequest.update_id",
        "1 to 128 characters",
        at("update_id", control_pb2.DiscardWeightsRequest()),
        ["x", "x" * 128],
        ["", "x" * 129],
    ),
)
ELSEWHERE = {
    "GenerateRequest.prompt": "tests/service/requests/test_bounds_on_requests.py",
    "StreamRequest.prompt": "tests/service/requests/test_bounds_on_requests.py",
    "StreamRequest.request_id": "a twin of GenerateRequest's",
    "StreamRequest.priority": "a twin of GenerateRequest's",
    "StreamRequest.max_proposed_tokens": "a twin of GenerateRequest's",
    "EmbedRequest.priority": "as GenerateRequest's",
    "ScoreRequest.priority": "as GenerateRequest's",
    "RerankRequest.priority": "as GenerateRequest's",
    "ClassifyRequest.priority": "as GenerateRequest's",
    "RerankRequest.documents": "tests/service/servicers/readings/test_rerank.py",
    "ScoreRequest.continuations": "tests/service/servicers/readings/test_score.py",
    "UpdateWeightsCommit.total_bytes": "tests/service/servicers/weights/test_update_weights_refused.py",
    "PushAdapterBegin.manifest": "tests/service/servicers/test_adapters.py",
    "TensorChunk.data": "tests/service/servicers/weights/test_update_weights_refused.py",
    "TensorChunks.chunks": "tests/service/servicers/weights/test_update_weights_refused.py",
}
"""Fields with a number in their limits that other tests look at, or none need to."""
CONVERT: dict[str, Callable[[Any], object]] = {
    "GenerateRequest": lambda message: to_job(message, LIMITS),
    "StreamRequest": lambda message: to_job(message, LIMITS),
    "AbortRequest": to_target,
    "WatchLoadRequest": to_watch,
    "ProfileRequest": to_profile,
    "GetVocabularyRequest": lambda message: to_page(message, LIMITS.info.vocab_size),
    "UpdateWeightsRequest": to_begin,
    "UnloadAdapterRequest": named_adapter,
    "PushAdapterRequest": to_push,
    "PauseRequest": to_pause,
    "CommitWeightsRequest": to_commit,
    "DiscardWeightsRequest": check_discard,
}
LABELS = {
    told.name.removeprefix("penstock.v1."): told.comment.labels
    for fields in MESSAGES.values()
    for told in fields
}


def converted(message: Message) -> object:
    return CONVERT[message.DESCRIPTOR.name](message)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_stated_limit_is_the_limit(row: Row) -> None:
    assert row.says in LABELS[row.name]["Limits"]
    for value in row.inside:
        converted(row.make(value))
    for value in row.outside:
        with pytest.raises(InvalidRequest) as refused:
            converted(row.make(value))
        named = [violation.field for violation in refused.value.violations]
        expected = row.violated or row.name.partition(".")[2]
        assert all(expected in path for path in named), (str(value)[:40], named)


def test_each_limit_that_is_stated_in_numbers_has_a_row() -> None:
    stated = {
        name
        for told in SENT
        if re.search(r"\d", told.comment.labels.get("Limits", ""))
        for name in [told.name.removeprefix("penstock.v1.")]
    }
    assert stated - {row.name for row in ROWS} - ELSEWHERE.keys() == set()
    assert ELSEWHERE.keys() <= stated, "what is listed is needed"


BASES: dict[str, tuple[Message, str]] = {
    "SamplingParams": (inference_pb2.StreamRequest(prompt="x", request_id="r"), "sampling."),
    "StoppingParams": (inference_pb2.StreamRequest(prompt="x", request_id="r"), "stopping."),
    "OutputOptions": (inference_pb2.StreamRequest(prompt="x", request_id="r"), "output."),
    "StreamRequest": (inference_pb2.StreamRequest(prompt="x", request_id="r"), ""),
    "ChatPrompt": (
        inference_pb2.StreamRequest(
            chat=types_pb2.ChatPrompt(
                messages=[types_pb2.ChatMessage(role="user", content="x")], tools=[tool()]
            ),
            request_id="r",
        ),
        "chat.",
    ),
    "WatchLoadRequest": (telemetry_pb2.WatchLoadRequest(), ""),
    "ProfileRequest": (telemetry_pb2.ProfileRequest(), ""),
}
_LITERAL = re.compile(r"(?:(?P<flag>true|false)|(?P<seconds>[\d.]+) s|(?P<number>\d+))(?=[.,]).*")


def literal(told: str) -> Any:
    """Return the value that a default is said to have, None if it is said in words."""
    found = _LITERAL.fullmatch(told)
    if found is None:
        return None
    if found["flag"]:
        return found["flag"] == "true"
    return s(float(found["seconds"])) if found["seconds"] else int(found["number"])


def stated_defaults() -> list[tuple[str, str, Any]]:
    return [
        (message, name, value)
        for told in SENT
        for message, name in [told.name.removeprefix("penstock.v1.").split(".")]
        if (value := literal(told.comment.labels.get("Default", ""))) is not None
    ]


def test_a_stated_default_is_the_default() -> None:
    """A request that leaves the field out is converted as one that sets it to its default."""
    looked_at = set()
    for message, name, value in stated_defaults():
        where = f"{message}.{name}"
        if not _has_presence(message, name):  # protobuf does not tell such a field from one that is not set
            assert not value, where
            continue
        if message in ("DetokenizeRequest", "TokenizeRequest", "EmbedRequest"):
            continue  # no function converts these; tests/service/servicers/test_control.py asks a server
        base, prefix = BASES[message]
        assert converted(at(prefix + name, base)(value)) == converted(base), where
        looked_at.add(where)
    assert looked_at == {
        "SamplingParams.n", "StreamRequest.min_tokens_per_message", "OutputOptions.text",
        "OutputOptions.token_ids", "OutputOptions.skip_special_tokens", "WatchLoadRequest.interval",
        "ProfileRequest.steps", "ProfileRequest.timeout", "ChatPrompt.parallel_tool_calls",
    }  # fmt: skip


def _has_presence(message: str, name: str) -> bool:
    (module,) = [one for one in (adapters_pb2, control_pb2, inference_pb2, telemetry_pb2, types_pb2,
                                   weights_pb2)
                 if message in one.DESCRIPTOR.message_types_by_name]  # fmt: skip
    presence: bool = module.DESCRIPTOR.message_types_by_name[message].fields_by_name[name].has_presence
    return presence


def test_the_neutral_values_of_sampling_are_those_that_the_comments_tell() -> None:
    neutral = GenerationDefaults()
    told = {
        name: float(found[1])
        for name in FIELDS
        if (found := re.match(r"GetModelInfoResponse.default_sampling, (\S+) where neither",
                              LABELS[f"SamplingParams.{name}"]["Default"]))
    }  # fmt: skip
    assert told == {name: getattr(neutral, name) for name in FIELDS}
