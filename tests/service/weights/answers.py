"""What servers answer, in a form that is compared bit for bit, and what explains an answer that several
versions of the weights made.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.v1 import inference_pb2, types_pb2, weights_pb2
from tests.service.rig import Rig, collect, generate, joined, stream

TOP = 2
"""Candidates per token whose log-probabilities are compared beside the token's own."""


@dataclass(frozen=True)
class Ask:
    """One request: greedy, or drawn with a seed."""

    prompt: tuple[int, ...]
    num_tokens: int
    seed: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """As `generate` and `stream` of the rig take them."""
        sampling = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {
            "prompt_token_ids": types_pb2.TokenIds(ids=self.prompt),
            "sampling": sampling,
            "stopping": {"max_tokens": self.num_tokens, "ignore_eos": True},
            "output": {"text": False, "logprobs": TOP},
        }

    def after(self, tokens: Sequence[int], num_tokens: int) -> Ask:
        """Return what asks for the tokens after these. A draw depends on the seed and the position in the
        whole text, so it is the same whether tokens before it are prompt or output.
        """
        return dataclasses.replace(self, prompt=(*self.prompt, *tokens), num_tokens=num_tokens)


def asks(count: int, *, vocab: int, num_tokens: int, seed: int = 0, longest: int = 40) -> list[Ask]:
    """Make requests with random prompts of different lengths; every other one is drawn."""
    rng = random.Random(seed)
    return [
        Ask(
            tuple(rng.randrange(vocab) for _ in range(rng.randint(1, longest))),
            num_tokens,
            seed=None if i % 2 else 100 + i,
        )
        for i in range(count)
    ]


@dataclass(frozen=True)
class Span:
    """Tokens that one version made: their places in the output, and the bits of their log-probabilities."""

    start: int
    version: str
    generation: int
    tokens: tuple[int, ...]
    logprobs: tuple[Any, ...]


def bits(logprobs: types_pb2.Logprobs, start: int, end: int) -> tuple[Any, ...]:
    """Return the log-probabilities of these tokens and of their candidates. On the wire they are float32, so
    equal values have equal bits.
    """
    tops = [[(c.token_id, c.logprob) for c in top.candidates] for top in logprobs.top[start:end]]
    return tuple(zip(logprobs.sampled[start:end], map(tuple, tops), strict=True))


def spans(output: inference_pb2.Output) -> list[Span]:
    """Return the output cut at its weights spans, which must begin at 0, rise, and tell generations that
    rise.

    Of a stream, what its messages tell first is what served when it started: without tokens, if it had to
    wait for newer weights. Such a span is left out.
    """
    starts = [span.first_output_token for span in output.weights]
    generations = [span.version.generation for span in output.weights]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert generations == sorted(set(generations)), "each span has newer weights than the one before"
    ends = [*starts[1:], len(output.token_ids)]
    cut = [
        Span(
            start,
            span.version.label,
            span.version.generation,
            tuple(output.token_ids[start:end]),
            bits(output.logprobs, start, end),
        )
        for start, end, span in zip(starts, ends, output.weights, strict=True)
    ]
    return cut[1:] if len(cut) > 1 and not cut[0].tokens else cut


async def ask_one(rig: Rig, ask: Ask, **fields: Any) -> inference_pb2.Output:
    """Ask for the one output of a request."""
    reply = await rig.inference.Generate(generate(**{**ask.fields, **fields}))
    (output,) = reply.outputs
    return output  # type: ignore[no-any-return]  # the stubs of messages are not typed here


async def stream_one(rig: Rig, ask: Ask, **fields: Any) -> inference_pb2.Output:
    """Ask for the one output of a stream, put together from its messages."""
    messages = await collect(rig.inference.Stream(stream(**{**ask.fields, **fields})))
    (output,) = joined(messages).outputs
    return output


async def answers(rig: Rig, all_asks: Sequence[Ask]) -> list[tuple[Any, ...]]:
    """Tokens, log-probabilities and version of each, one request after the other."""
    found: list[tuple[Any, ...]] = []
    for ask in all_asks:
        cut = spans(await ask_one(rig, ask))
        found.append(tuple((s.version, s.generation, s.tokens, s.logprobs) for s in cut))
    return found


async def explain(references: Mapping[str, Rig], ask: Ask, output: inference_pb2.Output) -> list[Span]:
    """Check that each span has the tokens and the log-probabilities, bit for bit, that a server which has
    only ever had the weights of that label generates after the tokens before it. Returns the spans.
    """
    cut = spans(output)
    for span in cut:
        if not span.tokens:
            continue
        before = output.token_ids[: span.start]
        told = await ask_one(references[span.version], ask.after(before, len(span.tokens)))
        assert tuple(told.token_ids) == span.tokens, f"tokens of {span.version} from {span.start} on"
        assert bits(told.logprobs, 0, len(span.tokens)) == span.logprobs
    return cut


def counts(report: weights_pb2.InFlightReport) -> tuple[int, int, int, int]:
    """Count the requests that were waited for, aborted, kept and recomputed."""
    return report.waited, report.aborted, report.kept, report.recomputed
