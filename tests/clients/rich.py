"""Two outputs with everything that an output can have: as the unary reply, as a stream, and as the client's
value.
"""

from __future__ import annotations

import math
from dataclasses import replace

from google.protobuf import text_format

from penstock.client import (
    Finish,
    FinishReason,
    Generation,
    HiddenStates,
    Logprobs,
    Output,
    PromptInfo,
    Timing,
    ToolCall,
    Usage,
    WeightsSpan,
    WeightsVersion,
)
from penstock.v1 import inference_pb2

# Values such as -0.5 and -1.25 are exact in float32, which the wire uses.
PROMPT = """
    token_count: 3 token_ids: 4 token_ids: 5 token_ids: 6 truncated_tokens: 7
    logprobs {
      sampled: nan sampled: -0.5 sampled: -1.25
      top {}
      top { candidates { token_id: 5 logprob: -0.5 } }
      top { candidates { token_id: 9 logprob: -0.25 } }
    }
"""
USAGE = "prompt_tokens: 3 completion_tokens: 5 image_tokens: 2 proposed_tokens: 6 accepted_tokens: 4"
# The floats 1, -2, 0.5, 0, 0.25 and 4 with their lowest byte first.
STATES = (b"\0\0\x80\x3f\0\0\0\xc0", b"\0\0\0\x3f\0\0\0\0\0\0\x80\x3e\0\0\x80\x40")


def _states(values: bytes) -> str:
    escaped = "".join(f"\\{byte:03o}" for byte in values)
    return f'hidden_states {{ size: 2 values: "{escaped}" }}'


TIMING = "total { seconds: 1 } time_to_first_token { nanos: 500000000 }"
CALL = 'tool_calls { id: "call-1" name: "get_weather" arguments_json: "{\\"city\\": \\"Oslo\\"}" }'
LAST_LOGPROBS = "logprobs { sampled: -2 sampled: -0.125 top {} top {} }"
EOS = "finish { reason: FINISH_REASON_EOS match { token_id: 2 } }"
FULL = "finish { reason: FINISH_REASON_MAX_TOKENS }"
SPAN = 'weights { version { label: "initial" } }'

ANSWER = text_format.Parse(
    f"""
    request_id: "r-2" model: "toy" prompt {{ {PROMPT} }} usage {{ {USAGE} }} timing {{ {TIMING} }}
    outputs {{
      index: 0 text: "Let me see." token_ids: 10 token_ids: 11 token_ids: 2 reasoning: "Hm, a city." {CALL}
      logprobs {{ sampled: -0.5 sampled: -2 sampled: -0.125 top {{}} top {{}} top {{}} }} {EOS} {SPAN}
      {_states(b"".join(STATES))}
    }}
    outputs {{ index: 1 text: "No idea" token_ids: 12 token_ids: 13 {FULL} {SPAN} }}
    """,
    inference_pb2.GenerateResponse(),
)

STREAM = [
    text_format.Parse(message, inference_pb2.StreamResponse())
    for message in (
        f'started {{ request_id: "r-2" model: "toy" prompt {{ {PROMPT} }} weights {{ label: "initial" }} }}',
        (
            'delta { index: 0 reasoning: "Hm, " token_ids: 10 logprobs { sampled: -0.5 top {} } '
            f"{_states(STATES[0])} }}"
        ),
        'delta { index: 1 text: "No" token_ids: 12 }',
        'delta { index: 0 reasoning: "a city." text: "Let me" }',
        'delta { index: 1 text: " idea" token_ids: 13 }',
        f"finished {{ index: 1 {FULL} }}",
        (
            f'delta {{ index: 0 text: " see." token_ids: 11 token_ids: 2 {CALL} {LAST_LOGPROBS} '
            f"{_states(STATES[1])} }}"
        ),
        f"finished {{ index: 0 {EOS} }}",
        f"summary {{ usage {{ {USAGE} }} timing {{ {TIMING} }} }}",
    )
]

INITIAL = (WeightsSpan(0, WeightsVersion("initial", 0)),)
WEATHER_CALL = ToolCall("call-1", "get_weather", '{"city": "Oslo"}')
PROMPT_LOGPROBS = Logprobs((math.nan, -0.5, -1.25), ((), ((5, -0.5),), ((9, -0.25),)))

OUTPUTS = (
    Output(
        index=0,
        text="Let me see.",
        token_ids=(10, 11, 2),
        finish=Finish(FinishReason.EOS, token_id=2),
        logprobs=Logprobs((-0.5, -2.0, -0.125), ((), (), ())),
        weights=INITIAL,
        reasoning="Hm, a city.",
        tool_calls=(WEATHER_CALL,),
        hidden_states=HiddenStates(2, b"".join(STATES)),
    ),
    Output(
        index=1, text="No idea", token_ids=(12, 13), finish=Finish(FinishReason.MAX_TOKENS), weights=INITIAL
    ),
)


def without_nan(answer: Generation) -> Generation:
    """Check that the prompt's first log-probability is NaN, which is equal to nothing, and remove the
    prompt's log-probabilities.
    """
    found = answer.prompt.logprobs
    assert found is not None
    assert math.isnan(found.sampled[0])
    assert (found.sampled[1:], found.top) == (PROMPT_LOGPROBS.sampled[1:], PROMPT_LOGPROBS.top)
    return replace(answer, prompt=replace(answer.prompt, logprobs=None))


EXPECTED = Generation(
    request_id="r-2",
    model="toy",
    prompt=PromptInfo(token_count=3, truncated_tokens=7, token_ids=(4, 5, 6)),
    outputs=OUTPUTS,
    usage=Usage(
        prompt_tokens=3,
        cached_prompt_tokens=0,
        completion_tokens=5,
        image_tokens=2,
        proposed_tokens=6,
        accepted_tokens=4,
    ),
    timing=Timing(queue=0.0, time_to_first_token=0.5, total=1.0, preemptions=0),
)
