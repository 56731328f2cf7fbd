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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class Taken(NamedTuple):
    """A merged delta that a reader takes. The last one of an output has `finish` and `timing`. It is a named
    tuple because that is cheap to make.
    """

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
    hidden: bytes = b""
    """The hidden states of the tokens, or the pooled one, float32 with the lowest byte first; empty if the
    request asked for none."""
    num_merged: int = 0
    """How many further deltas were merged with the first."""


class _Joined:
    """The text, ids and log-probabilities of several deltas, packed."""

    __slots__ = ("hidden", "ids", "logprobs", "reasoning", "text")

    def __init__(self, first: _Merged) -> None:
        self.ids = array("I", first.token_ids)
        self.logprobs = bytearray(first.logprobs)
        self.hidden = bytearray(first.hidden)
        self.text, self.reasoning = io.StringIO(), io.StringIO()
        self.text.write(first.text)
        self.reasoning.write(first.reasoning)


class _Merged:
    """Deltas that the same weights generated, merged into one. Where the reader keeps up there is only one
    delta, and nothing is packed.
    """

    __slots__ = (
        "_calls", "_finish", "_joined", "_num_merged", "_prompt_logprobs", "_timing", "hidden", "logprobs",
        "num_bytes", "num_tokens", "reasoning", "text", "token_ids", "weights_generation",
    )  # fmt: skip

    def __init__(self, delta: Delta, logprobs: bytes, num_bytes: int) -> None:
        self.weights_generation = delta.weights_generation
        self.num_bytes = num_bytes
        self.num_tokens = len(delta.token_ids)
        self.text, self.reasoning, self.token_ids = delta.delta, delta.reasoning, delta.token_ids
        """Those of the first delta."""
        self.logprobs = logprobs
        self.hidden = b"" if delta.hidden is None else hidden_bytes(delta.hidden)
        self._calls = delta.tool_calls
        self._prompt_logprobs = delta.prompt_logprobs
        self._finish, self._timing = delta.finish, delta.timing
        self._joined: _Joined | None = None
        """Those of all deltas, if there are several."""
        self._num_merged = 0

    @property
    def is_last(self) -> bool:
        return self._finish is not None

    def add(self, delta: Delta, logprobs: bytes, num_bytes: int) -> None:
        joined = self._joined
        if joined is None:
            joined = self._joined = _Joined(self)
        self._num_merged += 1
        joined.ids.extend(delta.token_ids)
        joined.logprobs += logprobs
        if delta.hidden is not None:
            joined.hidden += hidden_bytes(delta.hidden)
        joined.text.write(delta.delta)
        joined.reasoning.write(delta.reasoning)
        self._calls += delta.tool_calls
        self._prompt_logprobs += delta.prompt_logprobs
        self._finish, self._timing = delta.finish, delta.timing
        self.num_bytes += num_bytes
        self.num_tokens += len(delta.token_ids)

    def taken(self) -> Taken:
        text, reasoning, logprobs, hidden = self.text, self.reasoning, self.logprobs, self.hidden
        ids: Sequence[int] = self.token_ids
        if (joined := self._joined) is not None:
            text, reasoning, ids = joined.text.getvalue(), joined.reasoning.getvalue(), joined.ids
            logprobs, hidden = bytes(joined.logprobs), bytes(joined.hidden)
        return Taken(
            text,
            reasoning,
            self._calls,
            ids,
            logprobs,
            self.weights_generation,
            self._finish,
            self._timing,
            self._prompt_logprobs,
            self.num_bytes,
            hidden,
            self._num_merged,
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
        merged = self._merged
        if not merged:
            return False
        return merged[0].num_tokens >= min_tokens or merged[0].is_last or len(merged) > 1

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
        size = len(logprobs) + _TOKEN_BYTES * len(delta.token_ids)
        if delta.hidden is not None:
            size += delta.hidden.nbytes
        for text in (delta.delta, delta.reasoning):
            if text:
                size += _text_bytes(text)
        for call in delta.tool_calls:
            size += _CALL_BYTES + sum(map(_text_bytes, (call.id, call.name, call.arguments_json)))
        if not self._merged or self._ends(self._merged[-1], delta, size):
            self._merged.append(_Merged(delta, logprobs, size))
        else:
            self._merged[-1].add(delta, logprobs, size)
        return size + prompt_bytes(delta.prompt_logprobs)

    @staticmethod
    def _ends(last: _Merged, delta: Delta, size: int) -> bool:
        """Whether `delta` must begin a new merged delta."""
        if delta.token_ids and last.weights_generation != delta.weights_generation:
            return True
        return last.num_bytes + size > MAX_DELTA_BYTES and last.num_bytes > 0

    def pop(self, min_tokens: int) -> Taken | None:
        """Remove and return the oldest merged delta, if `has` finds one."""
        return self._merged.popleft().taken() if self.has(min_tokens) else None

    def clear(self) -> None:
        """Drop everything, because nobody wants it any more."""
        self._merged.clear()


def hidden_bytes(states: NDArray[np.float32]) -> bytes:
    """Hidden states as they are sent: each number with its lowest byte first."""
    return states.astype("<f4", copy=False).tobytes()


def prompt_bytes(values: Sequence[TokenLogprobs]) -> int:
    """About the size of a prompt's log-probabilities on the wire. All entries have equally many
    candidates.
    """
    return logprobs_bytes(len(values), len(values[-1].top)) if values else 0


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
