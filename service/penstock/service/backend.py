"""What the service needs of an engine. `penstock.runtime.engine.Engine` is one; tests use a toy."""

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
    """The model that is served and the values in force."""

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
    """The engine as the service sees it. All of it may be called on the event loop, but for what says it
    blocks.
    """

    @property
    def config(self) -> ResolvedConfig: ...
    @property
    def info(self) -> Info: ...
    @property
    def text(self) -> TextCodec | None: ...
    @property
    def forms(self) -> ChatForms:
        """How the model writes calls of tools, and what it thinks."""
        ...

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles grammars for the model; None where it has no tokenizer, or one that cannot have them."""
        ...

    @property
    def weights(self) -> WeightsVersion: ...
    @property
    def ready(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...

    def pulse(self) -> Pulse:
        """How its thread gets on. For any thread; waits for no lock."""
        ...

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call this once when the engine dies, before its requests are told; at once if it is dead. It may be
        called on any thread.
        """
        ...

    def tensor_specs(self) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        """(Hugging Face name, dtype such as "bfloat16", shape) of every tensor."""
        ...

    def start(self) -> None:
        """Compile and start; blocks for as long as that takes."""
        ...

    def prepare(self, request: Request) -> PreparedPrompt:
        """The part of `submit` that takes long for a long prompt; blocks, in any thread."""
        ...

    def submit(
        self,
        request: Request,
        sink: Callable[[Sequence[StepOutput]], None],
        prepared: PreparedPrompt | None = None,
    ) -> None:
        """Queue a request; refusals are raised at once. `prepared`: its prompt, if that was prepared."""
        ...

    def cancel(self, *request_ids: str) -> None:
        """Nobody wants the rest of them; waits for nothing."""
        ...

    def finish(self, request_id: str, finish: Finish) -> None:
        """End it for a reason that the text layer found."""
        ...

    def abort(
        self,
        request_ids: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all_requests: bool = False,
        message: str = "",
    ) -> Sequence[tuple[str, AbortOutcome]]:
        """End requests; slot and pages are free when it returns."""
        ...

    def load(self) -> Load: ...

    def flush_prefix_cache(self) -> FlushedPages:
        """Forget all cached prefixes."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others; blocks."""
        ...

    def shutdown(self) -> None:
        """Stop for good; blocks."""
        ...
