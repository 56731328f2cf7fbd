"""Callers that do nothing wrong: their answers in the storm must equal, bit for bit, those without it."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.v1 import inference_pb2, inference_pb2_grpc, types_pb2

PROMPTS = (
    "Once upon a time",
    "The little fox ran",
    "One day, a bear and a bird",
    "In the garden there was a tree that",
    "Rain fell on the roof, and the cat",
    "It was morning. The sun",
)
SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 24},
"age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": false}"""
MAX_TOKENS = 40
TYPED = "typed"
BARE = "bare"


@dataclass(frozen=True, slots=True)
class Question:
    """One greedy request."""

    prompt: str
    schema: str = ""
    """The schema that the answer must match; if it is empty, the answer has MAX_TOKENS."""


QUESTIONS = (*map(Question, PROMPTS), Question("A bear:", SCHEMA))


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one greedy request, with log-probabilities as bits."""

    token_ids: tuple[int, ...]
    logprob_bits: tuple[int, ...]


def request(question: Question) -> inference_pb2.StreamRequest:
    return inference_pb2.StreamRequest(
        prompt=question.prompt,
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=not question.schema),
        output=types_pb2.OutputOptions(logprobs=1),
        constraint=types_pb2.Constraint(json_schema=question.schema) if question.schema else None,
    )


async def ask(stub: Any, question: Question, metadata: Sequence[tuple[str, str]]) -> tuple[Answer, float]:
    """Return the answer, and the seconds to its first token. Raises AioRpcError."""
    began = time.monotonic()
    first: float | None = None
    ids: list[int] = []
    bits: list[int] = []
    async for message in stub.Stream(request(question), metadata=metadata, timeout=300):
        delta = message.delta
        if delta.token_ids and first is None:
            first = time.monotonic() - began
        ids += delta.token_ids
        bits += (struct.unpack("<I", struct.pack("<f", value))[0] for value in delta.logprobs.sampled)
    if first is None or len(bits) != len(ids) or (len(ids) != MAX_TOKENS and not question.schema):
        raise AssertionError(f"an answer of {len(ids)} tokens with {len(bits)} log-probabilities")
    return Answer(tuple(ids), tuple(bits)), first


def kind_of(error: grpc.aio.AioRpcError) -> tuple[str, float]:
    """Return the name of the reason in ErrorInfo if the status has one, and the seconds after which to try
    again.
    """
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(retry)
    if not info.reason:
        return f"{BARE} {error.code().name}: {error.details()}", 0.0
    return f"{TYPED} {info.reason}", retry.retry_delay.ToNanoseconds() / 1e9


@dataclass
class Honest:
    """Several callers at once, each of which asks again and again."""

    address: str
    secret: str
    num_callers: int = 3
    alone: dict[Question, Answer] = field(default_factory=dict)
    """The answer to each question when nothing else runs."""
    first_token_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.secret}"),)

    async def learn(self) -> None:
        """Ask one question after the other on a quiet server, each twice: without and with a
        cached prefix.
        """
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for question in QUESTIONS:
                answer, _ = await ask(stub, question, self.metadata)
                again, _ = await ask(stub, question, self.metadata)
                assert again == answer, f"{question} is answered in two ways on a quiet server"
                self.alone[question] = answer

    async def go_on(self, until: asyncio.Event) -> None:
        """Ask until told to stop; fills the lists above."""
        self.first_token_s.clear()
        await asyncio.gather(*(self._caller(number, until) for number in range(self.num_callers)))

    async def _caller(self, number: int, until: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            count = number
            while not until.is_set():
                question = QUESTIONS[count % len(QUESTIONS)]
                count += 1
                waited = await self._ask_until_answered(stub, question, until)
                if waited is not None:
                    self.first_token_s.append(waited)

    async def _ask_until_answered(self, stub: Any, question: Question, until: asyncio.Event) -> float | None:
        """Ask with retries. Returns the seconds to the first token, including those of refusals."""
        began = time.monotonic()
        while not until.is_set():
            asked = time.monotonic()
            try:
                answer, first_s = await ask(stub, question, self.metadata)
            except grpc.aio.AioRpcError as error:
                kind, retry_s = kind_of(error)
                self.refused[kind] += 1
                await asyncio.sleep(retry_s or 0.1)
                continue
            if answer != self.alone[question]:
                self.wrong.append(question.prompt)
            return asked - began + first_s
        return None


def p99(values: Sequence[float]) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)]
