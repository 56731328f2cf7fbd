"""What the handwritten server answers to Generate and Stream, and what clients make of it."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from penstock.client import (
    Finish,
    FinishReason,
    Generation,
    Output,
    PromptInfo,
    Timing,
    Usage,
    WeightsSpan,
    WeightsVersion,
)
from penstock.v1 import inference_pb2, types_pb2

EXPECTED = Generation(
    request_id="r-1",
    model="toy",
    prompt=PromptInfo(token_count=3),
    outputs=(
        Output(
            index=0,
            text="Hello",
            token_ids=(5, 6, 7, 8),
            finish=Finish(FinishReason.STOP, stop="END"),
            weights=(
                WeightsSpan(0, WeightsVersion("initial", 0)),
                WeightsSpan(2, WeightsVersion("step-1", 1)),
            ),
        ),
    ),
    usage=Usage(prompt_tokens=3, cached_prompt_tokens=1, completion_tokens=4, reasoning_tokens=2),
    timing=Timing(queue=0.25, time_to_first_token=0.5, total=1.5, preemptions=2),
)
"""The answer of both RPCs of the fake server, written out by hand."""

INITIAL = types_pb2.WeightsVersion(label="initial", generation=0)
STEP_1 = types_pb2.WeightsVersion(label="step-1", generation=1)
_FINISH = types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP, match=types_pb2.StopMatch(stop="END"))
_USAGE = types_pb2.Usage(prompt_tokens=3, cached_prompt_tokens=1, completion_tokens=4, reasoning_tokens=2)
_TIMING = types_pb2.Timing(
    queue=Duration(nanos=250_000_000),
    time_to_first_token=Duration(nanos=500_000_000),
    total=Duration(seconds=1, nanos=500_000_000),
    preemptions=2,
)


def generate_reply() -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id="r-1",
        model="toy",
        prompt=types_pb2.PromptInfo(token_count=3),
        outputs=[
            inference_pb2.Output(
                index=0,
                text="Hello",
                token_ids=[5, 6, 7, 8],
                finish=_FINISH,
                weights=[
                    types_pb2.WeightsSpan(first_output_token=0, version=INITIAL),
                    types_pb2.WeightsSpan(first_output_token=2, version=STEP_1),
                ],
            )
        ],
        usage=_USAGE,
        timing=_TIMING,
    )


def stream_replies() -> list[inference_pb2.StreamResponse]:
    event = inference_pb2.StreamResponse
    delta = inference_pb2.OutputDelta
    return [
        event(
            started=inference_pb2.StreamStarted(
                request_id="r-1", model="toy", prompt=types_pb2.PromptInfo(token_count=3), weights=INITIAL
            )
        ),
        event(delta=delta(index=0, text="Hel", token_ids=[5])),
        event(delta=delta(index=0, text="", token_ids=[6])),
        event(delta=delta(index=0, text="lo", token_ids=[7, 8], weights=STEP_1)),
        event(finished=inference_pb2.OutputFinished(index=0, finish=_FINISH)),
        event(summary=inference_pb2.StreamSummary(usage=_USAGE, timing=_TIMING)),
    ]
