"""What the service needs of an engine, as protocols. `penstock.runtime.engine.Engine` is one; tests use a
toy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.config import ResolvedConfig
from penstock.runtime.grammar.compile.compiler import GrammarCompiler
from penstock.runtime.loop.interface import AbortOutcome, Pulse, WeightsVersion
from penstock.runtime.requests.request import Finish, PreparedPrompt, Request, StepOutput
from penstock.runtime.requests.sampling_defaults import GenerationDefaults
from penstock.runtime.scheduling.pages import FlushedPages
from penstock.runtime.scheduling.scheduler import Load
from penstock.runtime.text.codec import TextCodec


class Info(Protocol):
    """The served model and the values in force."""

    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def defaults(self) -> GenerationDefaults: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def page_size(self) -> int: ...
    @property
    def devices(self) -> tuple[str, ...]: ...


class Backend(Protocol):
    """The engine as the service sees it. Everything may be called on the event loop, except methods that say
    that they block.
    """

    @property
    def config(self) -> ResolvedConfig: ...
    @property
    def info(self) -> Info: ...
    @property
    def text(self) -> TextCodec | None: ...
    @property
    def forms(self) -> ChatForms:
        """The forms in which the model writes tool calls and reasoning."""
        ...

    @property
    def grammars(self) -> GrammarCompiler | None:
        """The compiler of grammars; None if the model has no tokenizer, or one that grammars cannot work
        with.
        """
        ...

    @property
    def weights(self) -> WeightsVersion: ...
    @property
    def ready(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...

    def pulse(self) -> Pulse:
        """Tell whether the engine's thread makes progress. May be called on any thread, and waits for no
        lock.
        """
        ...

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the engine dies, before its requests get their error; at once if it is
        dead already. The callback may run on any thread.
        """
        ...

    def tensor_specs(self) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        """The Hugging Face name, the dtype (such as "bfloat16") and the shape of every tensor."""
        ...

    def start(self) -> None:
        """Compile and start. Blocks until that is done."""
        ...

    def prepare(self, request: Request) -> PreparedPrompt:
        """Do the part of `submit` that takes long for a long prompt. Blocks; may be called on any thread."""
        ...

    def submit(
        self,
        request: Request,
        sink: Callable[[Sequence[StepOutput]], None],
        prepared: PreparedPrompt | None = None,
    ) -> None:
        """Queue a request; refusals are raised at once. `prepared` is what `prepare` returned for its prompt,
        if it was called.
        """
        ...

    def cancel(self, *request_ids: str) -> None:
        """End these requests, whose further outputs nobody wants. Waits for nothing."""
        ...

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason that was found in its text."""
        ...

    def abort(
        self,
        request_ids: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all_requests: bool = False,
        message: str = "",
    ) -> Sequence[tuple[str, AbortOutcome]]:
        """End requests. Their slots and pages are free when this returns."""
        ...

    def load(self) -> Load: ...

    def flush_prefix_cache(self) -> FlushedPages:
        """Forget all cached prefixes. Returns how many pages became free, and how many are still held by
        running requests.
        """
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others, for at most `timeout_s` seconds. Blocks."""
        ...

    def shutdown(self) -> None:
        """Stop for good. Blocks."""
        ...
