"""Converts the stream of one request to the messages of vLLM's gRPC service."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from penstock.service.gateways import vllm_engine_pb2 as vllm
from penstock.v1 import inference_pb2, types_pb2

FINISH_REASONS: Mapping[int, str] = {
    types_pb2.FINISH_REASON_EOS: "stop",
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_MAX_TOKENS: "length",
    types_pb2.FINISH_REASON_CONTEXT_FULL: "length",
    types_pb2.FINISH_REASON_TIME_LIMIT: "length",
    types_pb2.FINISH_REASON_ABORTED: "abort",
}


class Answer:
    """The answer to one request. It sends what vLLM does: in a stream each delta as a chunk, and at each end
    the last delta once more; otherwise everything at each end.

    The ends are sent when all outputs have ended, because only then is it told how many tokens were cached.
    """

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams
        self._prompt_tokens = 0
        self._input_logprobs: vllm.InputLogProbs | None = None
        self._ends: dict[int, vllm.GenerateComplete] = {}
        """For each output what it has had so far, or in a stream last."""

    def messages(self, event: inference_pb2.StreamResponse) -> Iterator[vllm.GenerateResponse]:
        """Yield what follows from the next event of the contract's stream."""
        kind = event.WhichOneof("event")
        if kind == "started":
            prompt = event.started.prompt
            self._prompt_tokens = prompt.token_count
            if prompt.HasField("logprobs"):
                self._input_logprobs = input_logprobs(prompt)
        elif kind == "delta" and event.delta.token_ids:  # text alone is not sent
            yield from self._take(event.delta)
        elif kind == "finished":
            _finish(self._end_of(event.finished.index), event.finished.finish)
        elif kind == "summary":
            for _, end in sorted(self._ends.items()):
                end.cached_tokens = event.summary.usage.cached_prompt_tokens
                yield vllm.GenerateResponse(complete=end)

    def _take(self, delta: inference_pb2.OutputDelta) -> Iterator[vllm.GenerateResponse]:
        is_first = delta.index not in self._ends
        end = self._end_of(delta.index)
        if self._streams:
            end.ClearField("output_ids")
            end.ClearField("output_logprobs")
        end.output_ids.extend(delta.token_ids)
        end.completion_tokens = len(end.output_ids)
        if delta.HasField("logprobs"):
            end.output_logprobs.MergeFrom(output_logprobs(delta))
        if self._streams:
            chunk = vllm.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(delta.token_ids),
                output_logprobs=end.output_logprobs if delta.HasField("logprobs") else None,
                input_logprobs=self._input_logprobs if is_first else None,
                index=delta.index,
            )
            yield vllm.GenerateResponse(chunk=chunk)

    def _end_of(self, index: int) -> vllm.GenerateComplete:
        if index not in self._ends:
            self._ends[index] = vllm.GenerateComplete(
                index=index, prompt_tokens=self._prompt_tokens, input_logprobs=self._input_logprobs
            )
        return self._ends[index]


def _finish(end: vllm.GenerateComplete, finish: types_pb2.Finish) -> None:
    end.finish_reason = FINISH_REASONS[finish.reason]
    if finish.reason == types_pb2.FINISH_REASON_STOP:  # for EOS vLLM names no token
        if finish.match.WhichOneof("match") == "stop":
            end.matched_stop_str = finish.match.stop
        else:
            end.matched_token_id = finish.match.token_id


def output_logprobs(delta: inference_pb2.OutputDelta) -> vllm.OutputLogProbs:
    """Convert the log-probabilities of a delta's tokens."""
    return vllm.OutputLogProbs(
        token_logprobs=delta.logprobs.sampled,
        token_ids=delta.token_ids,
        top_logprobs=[_top(candidates) for candidates in delta.logprobs.top],
    )


def input_logprobs(prompt: types_pb2.PromptInfo) -> vllm.InputLogProbs:
    """Convert the log-probabilities of the prompt's tokens; the first one has none."""
    return vllm.InputLogProbs(
        token_logprobs=[
            vllm.InputTokenLogProb(value=None if math.isnan(value) else value)
            for value in prompt.logprobs.sampled
        ],
        token_ids=prompt.token_ids,
        top_logprobs=[_top(candidates) for candidates in prompt.logprobs.top],
    )


def _top(candidates: types_pb2.CandidateList) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        values=[one.logprob for one in candidates.candidates],
        token_ids=[one.token_id for one in candidates.candidates],
    )
