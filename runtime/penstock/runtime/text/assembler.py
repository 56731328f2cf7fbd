"""Turns the engine's outputs of one request into deltas: text, stop strings, and which tokens are kept. Pure.

The service calls an `Assembler` as outputs arrive, and so does an embedded engine, so both give the same
tokens and text. Its `TextStream` turns the generated tokens of one output into text, and finds stop strings
in it.

The engine knows no text. When a stop string was found, the request is ended in the engine by its id, and
tokens past the match are dropped. Parsers of reasoning and calls come after that, and read characters and
never pieces: how the text was cut into steps cannot change what they find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.chat.messages import ToolCall, ToolCallDelta, mint_call_id
from penstock.runtime.chat.tool_formats.events import CallPiece, OutputParser
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    RequestTiming,
    StepOutput,
    StoppingParams,
    TokenLogprobs,
)
from penstock.runtime.text.interface import Text


class TextDelta(NamedTuple):
    """The text that one push made certain. It is a named tuple because that is cheap to make."""

    text: str
    stop: str | None = None
    """The stop string that ended the text, if one did."""
    num_tokens: int = 0
    """How many of the pushed tokens belong to the output: all, or those up to the one that completed the stop
    string."""


class TextStream:
    """The text of one output, with stop strings.

    Generation ends where a stop string is first complete; if several are complete at the same character, the
    longest counts. The result does not depend on how tokens are grouped into pushes. Text that may still
    become part of a stop string is held back. A match is cut out of the text, with everything after it;
    `include_stop` keeps the match itself. A stop string counts only if the token that completes it is at
    least the `min_tokens`-th.

    Token ids are never held back, so the tokens in which a stop string was found stay in the output; those
    after the one that completed it are dropped (`TextDelta.num_tokens`).
    """

    def __init__(
        self,
        text: Text,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        visible: Set[str] = frozenset(),
        min_tokens: int = 0,
        after: Sequence[int] = (),
    ) -> None:
        """Let the text go on from that of the tokens `after`."""
        self._decoder = text.decoder(skip_special_tokens=skip_special_tokens, visible=visible, after=after)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pending = ""
        """Text that is decoded and not handed out yet; it starts at character `_sent` of the whole text."""
        self._sent = 0
        self._decoded = 0
        self._search_from: int | None = None
        """A match must end after this character; None while `min_tokens` is not reached."""
        self._ended = False

    def push(
        self, token_ids: Sequence[int], *, final: bool = False, mute_last_token: bool = False
    ) -> TextDelta:
        """Add tokens. `final`: no more follow. `mute_last_token`: the last token, such as EOS, has no
        text.
        """
        if self._ended:
            return TextDelta("")
        self._ended = final
        spoken = token_ids[:-1] if mute_last_token else token_ids
        if not self._stop:
            text = self._decoder.push(spoken) + (self._decoder.flush() if final else "")
            return TextDelta(text, num_tokens=len(token_ids))
        searched = self._decoded
        ends = self._decode(spoken, final)
        match = self._find(searched)
        if match is None:
            keep = 0 if final else self._held_back()
            return TextDelta(self._take(len(self._pending) - keep), num_tokens=len(token_ids))
        self._ended = True
        start, stop = match
        end = start + len(stop)
        num_tokens = next((i for i, e in enumerate(ends, 1) if e >= self._sent + end), len(token_ids))
        return TextDelta(self._take(end if self._include_stop else start), stop, num_tokens)

    def _decode(self, token_ids: Sequence[int], final: bool) -> list[int]:
        """Append the tokens' text to `_pending`. Returns the length of the whole text after each token."""
        ends: list[int] = []
        parts: list[str] = []
        for token_id in token_ids:
            self._num_tokens += 1
            if self._search_from is None and self._num_tokens >= self._min_tokens:
                self._search_from = self._decoded
            parts.append(self._decoder.push((token_id,)))
            self._decoded += len(parts[-1])
            ends.append(self._decoded)
        if final:
            parts.append(self._decoder.flush())
            self._decoded += len(parts[-1])
            if ends:  # what was held back until now belongs to the last token
                ends[-1] = self._decoded
        self._pending += "".join(parts)
        return ends

    def _find(self, searched: int) -> tuple[int, str] | None:
        """Find the first complete stop string, as (start in `_pending`, stop string), among those that end
        after character `searched`; None if there is none.
        """
        if self._search_from is None:
            return None
        first_end = max(searched, self._search_from) + 1 - self._sent
        found = []
        for stop in self._stop:
            start = self._pending.find(stop, max(0, first_end - len(stop)))
            if start >= 0:
                found.append((start + len(stop), -len(stop), start, stop))
        if not found:
            return None
        _, _, start, stop = min(found)
        return start, stop

    def _held_back(self) -> int:
        """Return the length of the longest tail of `_pending` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._sent += length
        return text


@dataclass(slots=True, kw_only=True)
class Delta:
    """What was added to an output since the delta before. The last delta has `finish` and `timing`.

    It is not frozen, because there is one for each step of each output, and a frozen one takes three times as
    long to make.
    """

    index: int = 0
    """Of the output, among those of its request."""
    delta: str = ""
    """The new text. It may be empty while text is held back because it may still become a stop string or a
    call of a tool; token ids are never held back.
    """
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    weights_generation: int = 0
    """Generation of the weights that made these tokens."""
    finish: Finish | None = None
    timing: RequestTiming | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, with the first tokens, if they were asked
    for."""
    reasoning: str = ""
    """What the model thought; it is not in `delta`."""
    reasoning_tokens: int = 0
    """How many further tokens, of this delta or of those before, are known to belong to the reasoning: all up
    to the one that completes its closing tag.
    """
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that became complete, or were cut off; they are not in `delta`."""
    tool_call_deltas: tuple[ToolCallDelta, ...] = ()
    """The same calls in pieces, as they are made."""
    hidden: NDArray[np.float32] | None = None
    """The hidden states from which the tokens were chosen, float32[tokens, E], if they were asked for. Of a
    request that pools, in the last delta, the pooled one, float32[E]."""


class CallsInTheMaking:
    """Makes the calls of one output from their pieces, and gives them ids."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._id = self._name = ""
        """Those of the call that has begun and not ended."""
        self._arguments: list[str] = []

    def add(self, pieces: Sequence[CallPiece]) -> tuple[tuple[ToolCallDelta, ...], tuple[ToolCall, ...]]:
        """Return what the pieces add to calls, and the calls that end with them."""
        deltas: list[ToolCallDelta] = []
        calls: list[ToolCall] = []
        for piece in pieces:
            call_id = ""
            if piece.name:
                call_id = self._id = mint_call_id()
                self._name = piece.name
            self._arguments.append(piece.arguments)
            if piece.name or piece.arguments:
                deltas.append(ToolCallDelta(self._num_calls, call_id, piece.name, piece.arguments))
            if piece.is_last:
                calls.append(ToolCall(self._id, self._name, "".join(self._arguments)))
                self._arguments.clear()
                self._num_calls += 1
        return tuple(deltas), tuple(calls)


class Assembler:
    """Builds one output from the engine's steps.

    Token ids are those generated, up to the one that completed a stop string. A matched stop token id is left
    out unless `include_stop` is set. An end-of-sequence token stays, because it is the model's own and
    trainers need it, but has no text while special tokens are skipped.
    """

    def __init__(
        self,
        stopping: StoppingParams,
        codec: Text | None,
        *,
        index: int = 0,
        skip_special_tokens: bool = True,
        parser: OutputParser | None = None,
        visible: Set[str] = frozenset(),
        ends_at_call: bool = False,
        after: Sequence[int] = (),
    ) -> None:
        """`codec` None: token ids only, no text and no stop strings. `parser` takes reasoning and calls out
        of the text, after stop strings were searched in all of it; `visible` are special tokens that it must
        see. `ends_at_call`: the output ends with the token that completes its first call. `after` are the
        tokens from which the text goes on.
        """
        self._index = index
        self._ends_at_call = ends_at_call
        self._parser = parser
        self._stopping = stopping
        self._skip_special = skip_special_tokens
        self._text: TextStream | None = None
        self._stop: Finish | None = None
        self._undecided_tokens = 0
        """How many tokens there are of which it is not known yet whether they belong to the reasoning."""
        self._counts_reasoning = parser is not None and not parser.is_past_reasoning
        self._has_called = False
        """Whether the call at which the output ends was found."""
        self._calls = CallsInTheMaking()
        if codec is not None:
            self._text = TextStream(
                codec,
                stop=stopping.stop,
                include_stop=stopping.include_stop,
                skip_special_tokens=skip_special_tokens,
                min_tokens=stopping.min_tokens,
                visible=visible,
                after=after,
            )

    @property
    def stop(self) -> Finish | None:
        """The finish, once a stop string was found, or the call at which the output ends: the caller must end
        the request in the engine.
        """
        return self._stop

    def add(self, output: StepOutput) -> Delta:
        """Return the delta of one engine output. Raises the output's error."""
        if self._parser is None:
            return self._add(output)
        if (self._ends_at_call or self._counts_reasoning) and len(output.token_ids) > 1:
            # One token after the other shows which one completes the call, or the reasoning.
            return _joined([self._parse(part, self._parser) for part in _tokens_of(output)])
        return self._parse(output, self._parser)

    def _parse(self, output: StepOutput, parser: OutputParser) -> Delta:
        delta = self._add(output)
        if self._has_called:
            return delta
        parsed = [parser.push(delta.delta)]
        self._has_called = self._ends_at_call and any(piece.is_last for piece in parsed[0].calls)
        if delta.finish is not None and not self._has_called:
            parsed.append(parser.flush())
        pieces = [piece for part in parsed for piece in part.calls]
        finish = delta.finish
        if self._ends_at_call:  # a form may tell several calls at once
            pieces = pieces[: next((i for i, piece in enumerate(pieces, 1) if piece.is_last), None)]
        deltas, calls = self._calls.add(pieces) if pieces else ((), ())
        if self._has_called:
            self._stop = self._stop or Finish(FinishReason.EOS)
            finish = self._stop if finish is not None else None
        return dataclasses.replace(
            delta,
            delta="".join(part.text for part in parsed),
            reasoning="".join(part.reasoning for part in parsed),
            reasoning_tokens=self._count(len(delta.token_ids), parser) if self._counts_reasoning else 0,
            tool_calls=calls,
            tool_call_deltas=deltas,
            finish=finish,
        )

    def _count(self, num_tokens: int, parser: OutputParser) -> int:
        """Tell how many more tokens are known to belong to the reasoning, after the parser has had the text
        of so many more.
        """
        self._undecided_tokens += num_tokens
        if parser.thinks is None:
            return 0
        self._counts_reasoning = not parser.is_past_reasoning
        found, self._undecided_tokens = self._undecided_tokens, 0
        return found if parser.thinks else 0

    def _add(self, output: StepOutput) -> Delta:
        if output.error is not None:
            raise output.error.with_traceback(None)  # all requests that it ended share this object
        ids, logprobs, finish, text = output.token_ids, output.logprobs, output.finish, ""
        if self._stop is not None:  # tokens made before the engine heard of the stop
            return Delta(
                index=self._index,
                finish=self._stop if finish is not None else None,
                timing=output.timing,
                weights_generation=output.weights_generation,
            )
        if finish is not None and self._drops_last(output, finish):
            ids, logprobs = ids[:-1], logprobs[:-1]
        if self._text is not None:
            mutes = finish is not None and self._mutes_last(output, finish)
            pushed = self._text.push(ids, final=finish is not None, mute_last_token=mutes)
            text = pushed.text
            if pushed.stop is not None:
                self._stop = Finish(FinishReason.STOP, stop=pushed.stop)
                ids, logprobs = ids[: pushed.num_tokens], logprobs[: pushed.num_tokens]
                finish = self._stop if finish is not None else None
        return Delta(
            index=self._index,
            delta=text,
            token_ids=ids,
            logprobs=logprobs,
            weights_generation=output.weights_generation,
            finish=finish,
            timing=output.timing,
            prompt_logprobs=output.prompt_logprobs,
            hidden=None if output.hidden is None else _of_tokens(output.hidden, len(ids)),
        )

    def _drops_last(self, output: StepOutput, finish: Finish) -> bool:
        """Say whether the last token is a stop token id that the caller did not ask to keep."""
        return (
            finish.reason is FinishReason.STOP
            and finish.token_id is not None
            and output.token_ids[-1:] == (finish.token_id,)
            and not self._stopping.include_stop
        )

    def _mutes_last(self, output: StepOutput, finish: Finish) -> bool:
        """Say whether the last token is an end-of-sequence token. It has no text, even if the tokenizer does
        not count it as special.
        """
        return (
            finish.reason is FinishReason.EOS
            and self._skip_special
            and output.token_ids[-1:] == (finish.token_id,)
        )


def _of_tokens(hidden: NDArray[np.float32], num_tokens: int) -> NDArray[np.float32]:
    """Return the hidden states of the first so many tokens; what was pooled is whole."""
    return hidden if hidden.ndim == 1 else hidden[:num_tokens]


def _joined_states(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32] | None:
    return np.concatenate(parts) if parts else None


def _tokens_of(output: StepOutput) -> Iterator[StepOutput]:
    """Yield the output in parts of one token each, of which the last has what tells its end."""
    last = len(output.token_ids) - 1
    for i, token_id in enumerate(output.token_ids):
        yield output._replace(
            token_ids=(token_id,),
            logprobs=output.logprobs[i : i + 1],
            hidden=None if output.hidden is None else output.hidden[i : i + 1],
            prompt_logprobs=() if i else output.prompt_logprobs,
            finish=output.finish if i == last else None,
            timing=output.timing if i == last else None,
            error=output.error if i == last else None,
        )


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Join several deltas that follow one another in an output."""
    return dataclasses.replace(
        deltas[-1],
        delta="".join(one.delta for one in deltas),
        reasoning="".join(one.reasoning for one in deltas),
        reasoning_tokens=sum(one.reasoning_tokens for one in deltas),
        token_ids=tuple(chain.from_iterable(one.token_ids for one in deltas)),
        logprobs=tuple(chain.from_iterable(one.logprobs for one in deltas)),
        tool_calls=tuple(chain.from_iterable(one.tool_calls for one in deltas)),
        tool_call_deltas=tuple(chain.from_iterable(one.tool_call_deltas for one in deltas)),
        hidden=_joined_states([one.hidden for one in deltas if one.hidden is not None]),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
