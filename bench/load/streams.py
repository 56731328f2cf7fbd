"""Runs requests on a server, as many at once as are wanted, and checks every answer.

Each request asks for greedy tokens of one of a few prompts, whose answers were asked for before, alone and
with Generate. So every stream's tokens, and its text put together, are known: a lost, doubled or reordered
message is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.v1 import inference_pb2, types_pb2

PROMPTS = tuple(
    f"{who} {what}"
    for who in ("Once upon a time a miller", "The lock keeper", "A barge on the canal", "Water")
    for what in ("went to", "said that")
)


class WrongAnswer(Exception):
    """A stream differs from what Generate answered to the same request alone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a prompt."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Seen:
    """What one client has seen so far."""

    messages: int = 0
    """Messages of streams, of any kind, or replies of Generate."""
    tokens: int = 0
    requests: int = 0
    """Requests that were answered to the end."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two messages with tokens of one stream."""

    def copy(self) -> Seen:
        return Seen(self.messages, self.tokens, self.requests, list(self.gaps))

    def since(self, before: Seen) -> Seen:
        """Return what was seen after `before`."""
        return Seen(
            self.messages - before.messages,
            self.tokens - before.tokens,
            self.requests - before.requests,
            self.gaps[len(before.gaps) :],
        )


def asked(prompt: str, tokens: int) -> dict[str, Any]:
    """Make the fields of a request that has exactly so many tokens."""
    return {
        "prompt": prompt,
        "sampling": types_pb2.SamplingParams(temperature=0),
        "stopping": types_pb2.StoppingParams(max_tokens=tokens, ignore_eos=True),
    }


async def references(stub: Any, tokens: int) -> dict[str, Answer]:
    """Ask for the answer to each prompt, one after the other."""
    answers = {}
    for prompt in PROMPTS:
        reply = await stub.Generate(inference_pb2.GenerateRequest(**asked(prompt, tokens)))
        output = reply.outputs[0]
        answers[prompt] = Answer(tuple(output.token_ids), output.text)
    return answers


async def stream_on(stub: Any, number: int, answers: dict[str, Answer], tokens: int, seen: Seen) -> None:
    """Stream one request after the other until cancelled. Raises WrongAnswer."""
    prompt = PROMPTS[number % len(PROMPTS)]
    request = inference_pb2.StreamRequest(**asked(prompt, tokens))
    while True:
        last, ids, text, counted = 0.0, [], [], 0
        async for message in stub.Stream(request):
            seen.messages += 1
            if message.HasField("delta"):
                now, delta = time.perf_counter(), message.delta
                if last:
                    seen.gaps.append(now - last)
                last = now
                seen.tokens += len(delta.token_ids)
                ids += delta.token_ids
                text.append(delta.text)
            elif message.HasField("summary"):
                counted = message.summary.usage.completion_tokens
        _check(Answer(tuple(ids), "".join(text)), answers[prompt], counted)
        seen.requests += 1


async def generate_on(stub: Any, number: int, answers: dict[str, Answer], tokens: int, seen: Seen) -> None:
    """Do the same with Generate."""
    prompt = PROMPTS[number % len(PROMPTS)]
    request = inference_pb2.GenerateRequest(**asked(prompt, tokens))
    while True:
        reply = await stub.Generate(request)
        output = reply.outputs[0]
        _check(Answer(tuple(output.token_ids), output.text), answers[prompt], reply.usage.completion_tokens)
        seen.messages += 1
        seen.requests += 1
        seen.tokens += len(output.token_ids)


async def read_slowly(stub: Any, seconds: float) -> None:
    """Read streams of large messages, one message in so many seconds, until cancelled."""
    request = inference_pb2.StreamRequest(
        **asked(PROMPTS[0], 256) | {"sampling": types_pb2.SamplingParams(temperature=0, n=4)},
        output=types_pb2.OutputOptions(logprobs=20),
    )
    while True:
        async for _ in stub.Stream(request):
            await asyncio.sleep(seconds)


@asynccontextmanager
async def running(callers: Sequence[Any]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines that go on until they are cancelled, which happens at the end. Raises what one of them
    raised.
    """
    tasks = [asyncio.ensure_future(caller) for caller in callers]
    try:
        yield tasks
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check(got: Answer, wanted: Answer, counted: int) -> None:
    """Compare an answer with the reference, and with the number of tokens that the server has counted."""
    if got != wanted or counted != len(wanted.token_ids):
        first = next(
            (i for i, (a, b) in enumerate(zip(got.token_ids, wanted.token_ids, strict=False)) if a != b),
            min(len(got.token_ids), len(wanted.token_ids)),
        )
        raise WrongAnswer(
            f"{len(got.token_ids)} tokens came, {counted} were counted, {len(wanted.token_ids)} are right; "
            f"they differ from token {first} on, or in their text"
        )
