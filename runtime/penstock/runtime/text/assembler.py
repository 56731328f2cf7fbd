"""Turns the engine's outputs of one request into deltas: text, stop strings, and which tokens are kept. Pure.

The service calls it as outputs arrive, and so does an embedded engine, so both give the same tokens and text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass

from penstock.runtime.chat.messages import ToolCall, mint_call_id
from penstock.runtime.chat.parser import ChatParser
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    RequestTiming,
    StepOutput,
    StoppingParams,
    TokenLogprobs,
)
from penstock.runtime.text.codec import TextCodec, TextStream


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
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that became complete; they are not in `delta`."""


class Assembler:
    """Builds one output from the engine's steps.

    Token ids are those generated, up to the one that completed a stop string. A matched stop token id is left
    out unless `include_stop` is set. An end-of-sequence token stays, because it is the model's own and
    trainers need it, but has no text while special tokens are skipped.
    """

    def __init__(
        self,
        stopping: StoppingParams,
        codec: TextCodec | None,
        *,
        index: int = 0,
        skip_special_tokens: bool = True,
        parser: ChatParser | None = None,
        visible: Set[str] = frozenset(),
    ) -> None:
        """`codec` None: token ids only, no text and no stop strings. `parser` takes reasoning and calls out
        of the text, after stop strings were searched in all of it; `visible` are special tokens that it must
        see.
        """
        self._index = index
        self._parser = parser
        self._stopping = stopping
        self._skip_special = skip_special_tokens
        self._text: TextStream | None = None
        self._stop: Finish | None = None
        if codec is not None:
            self._text = TextStream(
                codec,
                stop=stopping.stop,
                include_stop=stopping.include_stop,
                skip_special_tokens=skip_special_tokens,
                min_tokens=stopping.min_tokens,
                visible=visible,
            )

    @property
    def stop(self) -> Finish | None:
        """The finish, once a stop string was found: the caller must end the request in the engine."""
        return self._stop

    def add(self, output: StepOutput) -> Delta:
        """The delta of one engine output. Raises the output's error."""
        delta = self._add(output)
        if self._parser is None:
            return delta
        parsed = [self._parser.push(delta.delta)]
        if delta.finish is not None:
            parsed.append(self._parser.flush())
        return dataclasses.replace(
            delta,
            delta="".join(part.text for part in parsed),
            reasoning="".join(part.reasoning for part in parsed),
            tool_calls=tuple(
                ToolCall(mint_call_id(), call.name, call.arguments) for part in parsed for call in part.calls
            ),
        )

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
        )

    def _drops_last(self, output: StepOutput, finish: Finish) -> bool:
        """Whether the last token is a stop token id that the caller did not ask to keep."""
        return (
            finish.reason is FinishReason.STOP
            and finish.token_id is not None
            and output.token_ids[-1:] == (finish.token_id,)
            and not self._stopping.include_stop
        )

    def _mutes_last(self, output: StepOutput, finish: Finish) -> bool:
        """Whether the last token is an end-of-sequence token. It has no text, even if the tokenizer does not
        count it as special.
        """
        return (
            finish.reason is FinishReason.EOS
            and self._skip_special
            and output.token_ids[-1:] == (finish.token_id,)
        )
