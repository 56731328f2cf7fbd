"""What generating needs of an engine. `Engine` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.config import ResolvedConfig
from penstock.runtime.grammar.compile.compiler import GrammarCompiler
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.requests.request import Finish, PreparedPrompt, Request, StepOutput
from penstock.runtime.text.interface import Text


class RequestQueue(Protocol):
    """Where requests go."""

    def submit(
        self,
        request: Request,
        sink: Callable[[Sequence[StepOutput]], None],
        prepared: PreparedPrompt | None = None,
    ) -> None:
        """Queue a request; refusals raise at once. Its outputs go to `sink`, on the engine's thread."""
        ...

    def finish(self, request_id: str, finish: Finish) -> None:
        """End a request for a reason that was found in its text."""
        ...

    def cancel(self, *request_ids: str) -> None:
        """Free requests that nobody reads any more; waits for nothing."""
        ...


class TextEngine(RequestQueue, Protocol):
    """An engine with the tokenizer of its model."""

    @property
    def config(self) -> ResolvedConfig: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def text(self) -> Text | None:
        """The model's tokenizer; None for a model without one."""
        ...

    @property
    def images(self) -> ImageReader | None:
        """What reads the images of prompts; None for a model that reads none."""
        ...

    @property
    def forms(self) -> ChatForms:
        """How the model writes calls of tools, and what it thinks."""
        ...

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles grammars; None where the model has no tokenizer, or one that cannot have them."""
        ...

    def prepare(self, request: Request) -> PreparedPrompt:
        """Do the part of `submit` that takes long for a long prompt, once for all its outputs."""
        ...
