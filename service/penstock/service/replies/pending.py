"""Buffers what an output generated until its reader takes it: deltas merged into few, in the wire's form.

Log-probabilities are encoded when they come, one step's at a time. So what waits takes about as much memory
as its message will have bytes, a twentieth of what it takes as Python objects; no large amount must be
encoded at once when a slow reader comes; and the size of the message is known.
"""

from __future__ import annotations

import io
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.runtime.chat.messages import ToolCall
from penstock.runtime.requests.request import Finish, RequestTiming, TokenLogprobs
from penstock.runtime.text.assembler import Delta
from penstock.service.replies.reply_budget import logprobs_bytes

Encode = Callable[[Sequence[TokenLogprobs]], bytes]
"""Serializes log-probabilities to a `Logprobs` message. Messages of consecutive tokens may be joined as
bytes.
"""
MAX_DELTA_BYTES = 1024 * 1024
"""About the largest size of a merged delta: gRPC's clients refuse messages above 4 MiB by default."""
_TOKEN_BYTES = 3
"""Bytes of a token id on the wire, below 2^21."""
_CALL_BYTES = 16
"""Bytes of the field headers of a tool call."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A merged delta that a reader takes. The last one of an output has `finish` and `timing`."""

    text: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    token_ids: Sequence[int]
    logprobs: bytes
    """A serialized `Logprobs`; empty if the request asked for none."""
    weights_generation: int
    """The generation of the weights that generated the tokens."""
    finish: Finish | None
    timing: RequestTiming | None
    prompt_logprobs: tuple[TokenLogprobs, ...]
    num_bytes: int
    """About the size of the message."""
    num_merged: int = 0
    """How many further deltas were merged with the first."""


class _Merged:
    """Deltas that the same weights generated, merged into one."""

    def __init__(self, weights_generation: int) -> None:
        self.weights_generation = weights_generation
        self.num_bytes = 0
        self._num_deltas = 0
        self._ids = array("I")
        self._logprobs = bytearray()
        self._text = io.StringIO()
        self._reasoning = io.StringIO()
        self._calls: list[ToolCall] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._finish: Finish | None = None
        self._timing: RequestTiming | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def is_last(self) -> bool:
        return self._finish is not None

    def add(self, delta: Delta, logprobs: bytes, num_bytes: int) -> None:
        self._num_deltas += 1
        self._ids.extend(delta.token_ids)
        self._logprobs += logprobs
        self._text.write(delta.delta)
        self._reasoning.write(delta.reasoning)
        self._calls += delta.tool_calls
        self._prompt_logprobs += delta.prompt_logprobs
        self._finish, self._timing = delta.finish, delta.timing
        self.num_bytes += num_bytes

    def taken(self) -> Taken:
        return Taken(
            self._text.getvalue(),
            self._reasoning.getvalue(),
            self._calls,
            self._ids,
            bytes(self._logprobs),
            self.weights_generation,
            self._finish,
            self._timing,
            self._prompt_logprobs,
            self.num_bytes,
            self._num_deltas - 1,
        )


class Pending:
    """The merged deltas of one output. A new one begins after MAX_DELTA_BYTES, and with new weights."""

    def __init__(self, encode: Encode | None = None) -> None:
        """`encode` is None if no log-probabilities are sent."""
        self._encode = encode
        self._merged: deque[_Merged] = deque()

    def __bool__(self) -> bool:
        return bool(self._merged)

    def has(self, min_tokens: int) -> bool:
        """Whether there is a delta of at least `min_tokens` tokens, or one that nothing more can be merged
        into.
        """
        if len(self._merged) > 1:
            return True
        return bool(self._merged) and (self._merged[0].is_last or self._merged[0].num_tokens >= min_tokens)

    def add(self, delta: Delta) -> int:
        """Add a delta. Returns about how many bytes it adds to messages.

        The prompt's log-probabilities are included, but not in `Taken.num_bytes`: a stream sends them in its
        first message, not in a delta.
        """
        if not (
            delta.token_ids or delta.delta or delta.reasoning or delta.tool_calls or delta.finish is not None
        ):
            return 0
        logprobs = self._encode(delta.logprobs) if self._encode is not None and delta.logprobs else b""
        size = _text_bytes(delta.delta) + _text_bytes(delta.reasoning)
        size += len(logprobs) + _TOKEN_BYTES * len(delta.token_ids)
        for call in delta.tool_calls:
            size += _CALL_BYTES + sum(map(_text_bytes, (call.id, call.name, call.arguments_json)))
        if not self._merged or self._ends(self._merged[-1], delta, size):
            self._merged.append(_Merged(delta.weights_generation))
        self._merged[-1].add(delta, logprobs, size)
        return size + prompt_bytes(delta.prompt_logprobs)

    @staticmethod
    def _ends(last: _Merged, delta: Delta, size: int) -> bool:
        """Whether `delta` must begin a new merged delta."""
        if delta.token_ids and last.weights_generation != delta.weights_generation:
            return True
        return last.num_bytes + size > MAX_DELTA_BYTES and last.num_bytes > 0

    def pop(self) -> Taken:
        """Remove and return the oldest merged delta."""
        return self._merged.popleft().taken()

    def clear(self) -> None:
        """Drop everything, because nobody wants it any more."""
        self._merged.clear()


def prompt_bytes(values: Sequence[TokenLogprobs]) -> int:
    """About the size of a prompt's log-probabilities on the wire. All entries have equally many
    candidates.
    """
    return logprobs_bytes(len(values), len(values[-1].top)) if values else 0


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
