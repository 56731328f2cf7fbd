"""A delta that is written by hand is the message that protobuf reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.chat.messages import ToolCall
from penstock.runtime.prompting.prompts import TokenPrompt
from penstock.runtime.requests.request import StoppingParams, TokenLogprobs
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.service.replies.messages import encode_logprobs, stream_delta
from penstock.service.replies.outputs import Taken
from penstock.service.requests.generate import ServedJob
from penstock.v1 import inference_pb2, types_pb2

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
IDS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300), max_size=70)
CALL = st.builds(ToolCall, TEXTS, TEXTS, TEXTS)
VERSION = types_pb2.WeightsVersion(label="step 2", generation=2)


JOBS = {
    wanted: ServedJob(
        request_id="a",
        prompt=TokenPrompt((1,)),
        sampling=ResolvedSampling(),
        stopping=StoppingParams(),
        return_token_ids=wanted,
    )
    for wanted in (False, True)
}


@given(
    st.integers(0, 300),
    TEXTS,
    TEXTS,
    st.lists(CALL, max_size=2),
    IDS,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_delta_has_its_fields(
    index: int,
    text: str,
    reasoning: str,
    calls: list[ToolCall],
    ids: list[int],
    with_ids: bool,
    with_logprobs: bool,
    with_version: bool,
) -> None:
    with_logprobs = with_logprobs and with_ids and bool(ids)
    logprobs = encode_logprobs([TokenLogprobs(-0.5, ((1, -0.5),))] * len(ids), 1) if with_logprobs else b""
    taken = Taken(text, reasoning, calls, ids, logprobs, 2, None, None, (), 0)
    data = stream_delta(index, taken, JOBS[with_ids], VERSION if with_version else None)
    expected = inference_pb2.OutputDelta(index=index, text=text, reasoning=reasoning)
    for call in calls:
        expected.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments_json)
    if with_ids:
        expected.token_ids.extend(ids)
    if with_logprobs:
        expected.logprobs.ParseFromString(logprobs)
    if with_version:
        expected.weights.CopyFrom(VERSION)
    says_something = any(field.name != "index" for field, _ in expected.ListFields())
    assert (data is not None) == says_something
    if data is not None:
        assert inference_pb2.StreamResponse.FromString(data) == inference_pb2.StreamResponse(delta=expected)


def test_a_delta_without_anything_new_is_no_message() -> None:
    taken = Taken("", "", (), (5,), b"", 1, None, None, (), 0)
    assert stream_delta(3, taken, JOBS[False], None) is None, "its token ids were not asked for"
    assert stream_delta(3, taken._replace(token_ids=()), JOBS[True], None) is None
