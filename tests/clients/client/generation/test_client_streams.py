"""The order of a stream, and how deltas add up, with messages written by hand."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from penstock.client import (
    FinishReason,
    Logprobs,
    Output,
    ProtocolError,
    ToolCall,
    WeightsSpan,
    WeightsVersion,
)
from penstock.client.generation.streams import Accumulator
from penstock.client.values.results import Finish
from penstock.v1 import inference_pb2

STARTED = 'started { request_id: "r" weights { label: "a" generation: 1 } }'
FINISHED = "finished { index: %d finish { reason: FINISH_REASON_EOS } }"
SUMMARY = "summary { usage { completion_tokens: 4 } timing { total { nanos: 500000000 } } }"


def run(*messages):
    accumulator = Accumulator()
    for message in messages:
        accumulator.feed(text_format.Parse(message, inference_pb2.StreamResponse()))
    return accumulator.end()


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "ended the stream before its summary"),
        ([STARTED], "ended the stream before its summary"),
        ([FINISHED % 0], "finished before started"),
        ([SUMMARY], "summary before started"),
        ([STARTED, STARTED], "started twice"),
        ([STARTED, SUMMARY], "summary before every output had finished"),
        ([STARTED, "delta { index: 1 }", FINISHED % 0, SUMMARY], "summary before every output had finished"),
        ([STARTED, FINISHED % 0, FINISHED % 0], "finished for output 0, which had finished"),
        ([STARTED, FINISHED % 0, "delta {}"], "delta for output 0, which had finished"),
        ([STARTED, FINISHED % 0, SUMMARY, "delta {}"], "delta after the summary"),
        ([STARTED, FINISHED % 0, SUMMARY, SUMMARY], "summary after the summary"),
        ([STARTED, "delta { tool_call_deltas { index: 1 name: 'f' } }"], "piece of call 1 out of order"),
        ([STARTED, ""], "does not know"),
    ],
)
def test_what_breaks_the_order_is_an_error(messages, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        run(*messages)


def test_pieces_of_calls_add_up():
    answer = run(
        STARTED,
        """delta { tool_call_deltas { id: "c" name: "f" arguments_json: "{" } }""",
        """delta { tool_call_deltas { arguments_json: "}" }
        tool_call_deltas { index: 1 id: "d" name: "g" } }""",
        FINISHED % 0,
        SUMMARY,
    )
    assert answer.outputs[0].tool_calls == (ToolCall("c", "f", "{}"), ToolCall("d", "g", ""))


def test_interleaved_outputs_add_up_each_for_itself():
    answer = run(
        STARTED,
        'delta { index: 1 text: "x" token_ids: 7 weights { label: "b" generation: 2 } }',
        'delta { index: 0 text: "a" token_ids: 1 logprobs { sampled: -0.5 top { candidates { token_id: 1 '
        'logprob: -0.5 } } } reasoning: "hm" }',
        'delta { index: 1 text: "y" }',
        'delta { index: 0 text: "b" token_ids: 2 token_ids: 3 logprobs { sampled: -1 sampled: -2 top {} '
        'top {} } weights { label: "b" generation: 2 } reasoning: "m" tool_calls { id: "c" name: "f" } }',
        FINISHED % 1,
        "delta { index: 0 token_ids: 4 logprobs { sampled: -3 top {} } }",
        "finished { index: 0 finish { reason: FINISH_REASON_STOP match { token_id: 4 } } }",
        SUMMARY,
    )
    a, b = WeightsVersion("a", 1), WeightsVersion("b", 2)
    assert answer.outputs == (
        Output(
            index=0,
            text="ab",
            token_ids=(1, 2, 3, 4),
            finish=Finish(FinishReason.STOP, token_id=4),
            logprobs=Logprobs((-0.5, -1.0, -2.0, -3.0), (((1, -0.5),), (), (), ())),
            weights=(WeightsSpan(0, a), WeightsSpan(1, b)),
            reasoning="hmm",
            tool_calls=(ToolCall("c", "f", ""),),
        ),
        Output(
            index=1,
            text="xy",
            token_ids=(7,),
            finish=Finish(FinishReason.EOS),
            weights=(WeightsSpan(0, b),),
        ),
    )


def test_no_token_no_first_token_time():
    answer = run(STARTED, "finished { finish { reason: FINISH_REASON_ABORTED message: 'why' } }", SUMMARY)
    assert answer.timing.time_to_first_token is None
    assert answer.timing.total == 0.5
    assert (answer.text, answer.token_ids) == ("", ())
    assert answer.finish == Finish(FinishReason.ABORTED, message="why")
    assert answer.weights == (WeightsSpan(0, WeightsVersion("a", 1)),)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FINISH_REASON_EOS", FinishReason.EOS),
        ("FINISH_REASON_STOP", FinishReason.STOP),
        ("FINISH_REASON_MAX_TOKENS", FinishReason.MAX_TOKENS),
        ("FINISH_REASON_CONTEXT_FULL", FinishReason.CONTEXT_FULL),
        ("FINISH_REASON_TIME_LIMIT", FinishReason.TIME_LIMIT),
        ("FINISH_REASON_ABORTED", FinishReason.ABORTED),
        ("FINISH_REASON_UNSPECIFIED", FinishReason.UNKNOWN),
        ("99", FinishReason.UNKNOWN),
    ],
)
def test_finish_reasons(name, reason):
    answer = run(STARTED, f"finished {{ finish {{ reason: {name} }} }}", SUMMARY)
    assert answer.finish.reason is reason
