"""Runs one call of Embed or Score: its prompts become requests of the engine that generate nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.generation.preparing import PreparedJob
from penstock.runtime.generation.prompts import Prompt
from penstock.runtime.generation.readings import Score, VectorForm, fit_inputs, join, naming
from penstock.runtime.requests.context import Fitted, Truncation
from penstock.runtime.requests.fanout import PreparedPrompt, output_id
from penstock.runtime.requests.reading.prompt_reading import PromptReading
from penstock.runtime.requests.request import FinishReason, Request
from penstock.service.errors import RequestAborted
from penstock.service.replies.outputs import Taken
from penstock.service.requests.prompts import encode_prompt
from penstock.service.requests.reading import ReadingJob
from penstock.service.servicers.generation import TOKEN_COST, ServedRequest, in_turns
from penstock.service.servicers.serving import Serving
from penstock.v1 import inference_pb2, types_pb2

MAX_JOINED_TOKENS = 16 * 1024 * 1024
"""The most tokens of all continuations of one call of Score, with the prompt before each. A message of half a
megabyte could otherwise ask for a thousand prompts of a hundred thousand tokens, which take gigabytes before
the first of them runs.
"""


class ServedReading(ServedRequest):
    """A request in the engine whose outputs end with their prompts, as an async context."""

    def __init__(self, job: ReadingJob, serving: Serving) -> None:
        super().__init__(job, serving)
        self._reading_job = job
        self.fitted: Sequence[Fitted] = ()
        """What the engine reads for each output. Of scores, the prompt and the continuation."""

    async def prepare(self) -> PreparedJob:
        """Tokenize everything, and make a request of each part."""
        job, room = self._reading_job, self.serving.engine.info.max_model_len
        special = job.pooling is not None  # a continuation gets no special tokens
        parts = await self._tokens_of_all(job, special=special)
        if job.pooling is not None:
            fitted = fit_inputs(parts, job.truncation, room)
            self.num_prompt_tokens = sum(len(one.token_ids) for one in fitted)
            readings = [PromptReading(pooling=job.pooling)] * len(fitted)
        else:
            prompt = await self._tokens_of(job.prompt, Truncation.REJECT, special=True)
            self.prompt = Fitted(prompt, job.stopping)
            num_joined = len(prompt) * len(parts) + sum(map(len, parts))
            if num_joined > MAX_JOINED_TOKENS:
                described = f"{num_joined} tokens, with the prompt before each; at most {MAX_JOINED_TOKENS}"
                raise InvalidRequest([Violation("continuations", described)])
            work = partial(join, prompt, parts, room)
            joined = await self.serving.lanes.convert(work, TOKEN_COST * num_joined)
            fitted = [Fitted(one, job.stopping) for one in joined]
            self.num_prompt_tokens = len(prompt) + sum(map(len, parts))
            readings = [PromptReading(scores_from=len(prompt))] * len(fitted)
        self._trace.tokenized(self.num_prompt_tokens)
        self.fitted = fitted
        requests = [
            self._request(i, one.token_ids, reading)
            for i, (one, reading) in enumerate(zip(fitted, readings, strict=True))
        ]
        self._trace.enters("submit")
        shared = [await self._prepared(request) async for request in in_turns(requests)]
        self._reading_job = job.without_load()
        return PreparedJob(job=self.job, requests=requests, shared=shared, prompt=self.prompt, text="")

    async def _tokens_of_all(self, job: ReadingJob, *, special: bool) -> list[tuple[int, ...]]:
        """The tokens of each part. Short texts are tokenized on the event loop, so other tasks have a turn
        between some of them. InvalidRequest names all parts that are too long to be tokenized.
        """
        name, bad = "inputs" if job.pooling is not None else "continuations", list[Violation]()
        parts: list[tuple[int, ...]] = []
        async for i, part in in_turns(list(enumerate(job.parts))):
            with naming(f"{name}[{i}]", bad):
                parts.append(await self._tokens_of(part, job.truncation, special=special))
        if bad:
            raise InvalidRequest(bad)
        return parts

    async def _tokens_of(self, prompt: Prompt, truncation: Truncation, *, special: bool) -> tuple[int, ...]:
        encoded = await encode_prompt(
            self.serving.engine.text,
            prompt,
            self.serving.lanes,
            room=self.serving.engine.info.max_model_len,
            cuts=truncation is not Truncation.REJECT,
            add_special_tokens=special,
        )
        return encoded.token_ids

    def _request(self, index: int, token_ids: tuple[int, ...], reading: PromptReading) -> Request:
        job = self.job
        return Request(
            output_id(job.engine_id, index),
            token_ids,
            prompt_logprobs=None if reading.scores_from is None else 0,
            reading=reading,
            cache=job.cache,
            priority=job.priority,
            min_generation=job.min_generation,
            received_ns=job.received_ns,
            operation=job.operation,
            trace_id=job.trace_id,
            span_id=job.span_id,
        )

    async def _prepared(self, request: Request) -> PreparedPrompt:
        work = partial(self.serving.engine.prepare, request)
        return await self.serving.lanes.convert(work, TOKEN_COST * len(request.prompt_token_ids))

    async def take_all(self) -> list[Taken]:
        """Wait for all outputs, and return what each has. RequestAborted where one was ended before."""
        taken: dict[int, Taken] = {}
        while not self.is_done:
            index, one = await self.take()
            if one.finish is not None and one.finish.reason is not FinishReason.PROMPT_READ:
                raise RequestAborted(one.finish.message)
            taken[index] = one
        return [taken[index] for index in range(len(taken))]


def embedding(
    form: VectorForm, fitted: Fitted, taken: Taken, weights: types_pb2.WeightsVersion
) -> inference_pb2.Embedding:
    """The vector of one input."""
    pooled = np.frombuffer(taken.hidden, "<f4").astype(np.float32)
    return inference_pb2.Embedding(
        values=form.vector(pooled).astype("<f4", copy=False).tobytes(),
        token_count=len(fitted.token_ids),
        truncated_tokens=fitted.num_truncated,
        weights=weights,
    )


def score(
    token_ids: tuple[int, ...], taken: Taken, weights: types_pb2.WeightsVersion
) -> inference_pb2.ContinuationScore:
    """The score of one continuation with these tokens."""
    made = Score.of(token_ids, taken.prompt_logprobs)
    return inference_pb2.ContinuationScore(
        token_ids=made.token_ids, logprobs=made.logprobs, total_logprob=made.total, weights=weights
    )
