"""Engine: one model, ready to generate. The service stands on it, and it can be embedded without a server.

>>> with Engine.from_pretrained("demo", EngineConfig(max_num_seqs=4)) as engine:
...     print(engine.generate("Once upon a time", stopping=StoppingParams(max_tokens=40)).text)

`TokenEngine` loads the model and works on token ids; `penstock.runtime.generation` puts text around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.chat.parser import ChatForms, choose_forms
from penstock.runtime.embedding.active_ids import ActiveIds
from penstock.runtime.embedding.batch import generate_all
from penstock.runtime.embedding.options import (
    ChatOptions,
    Messages,
    PromptOptions,
    Prompts,
    chat_job,
    is_list_of_prompts,
    jobs_of,
    prompt_job,
)
from penstock.runtime.embedding.readings import ReadingOptions, embed, score
from penstock.runtime.embedding.stream import GenerationStream
from penstock.runtime.generation.readings import Score, VectorForm
from penstock.runtime.generation.results import Generation
from penstock.runtime.profiling.profile import (
    DEFAULT_STEPS,
    DEFAULT_TIMEOUT_S,
    ProfileOptions,
    ProfileRun,
)
from penstock.runtime.requests.context import Truncation
from penstock.runtime.requests.reading.prompt_reading import Pooling
from penstock.runtime.token_engine import TokenEngine


class Engine(TokenEngine):
    """A served model that goes on with texts, token ids and conversations.

    `generate`, `stream` and `chat` may be called by any number of threads at once; `AsyncEngine` has them for
    coroutines. All take the keyword arguments of `RequestOptions`, and raise RequestError where the caller
    can mend the request, UnavailableError where it may be tried again later, GenerationError where the model
    cannot go on, and EngineFailure where the engine is dead.
    """

    @cached_property
    def active_ids(self) -> ActiveIds:
        """The ids of the requests that are read here."""
        return ActiveIds()

    @cached_property
    def forms(self) -> ChatForms:
        """How the model writes calls of tools, and what it thinks."""
        if self.text is None:
            return ChatForms()
        return choose_forms(
            self.text.chat_template,
            self.text.added_tokens,
            tools=self.config.tool_call_parser,
            reasoning=self.config.reasoning_parser,
        )

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is one prompt, though it is a sequence of texts
        self, prompt: str | Sequence[int], **options: Unpack[PromptOptions]
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        show_progress: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: Prompts,
        *,
        show_progress: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> Generation | list[Generation]:
        """Goes on with a prompt, a text or token ids, and returns when its outputs have ended.

        Of a list of prompts it returns as many generations, in the same order. As many prompts as keep the
        engine busy run at once, so a list may be longer than the engine's queue. The first error ends them
        all and is raised. A bar shows how many have ended, where stderr is a terminal and `show_progress`
        says so; None: what `EngineConfig.show_progress` says.
        """
        if is_list_of_prompts(prompt):
            return generate_all(self, jobs_of(self, prompt, options), show_progress)
        if show_progress is not None:
            raise TypeError("show_progress goes with a list of prompts")
        with GenerationStream(self, prompt_job(self, prompt, options)) as stream:
            return stream.result()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[PromptOptions]) -> GenerationStream:
        """Goes on with one prompt, and yields what is new as it comes. Use it in a `with` block, or close it:
        that ends the request. What is refused raises here, before the first delta.
        """
        return GenerationStream(self, prompt_job(self, prompt, options))

    def embed(
        self,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling | str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncation: Truncation | str = Truncation.REJECT,
        **options: Unpack[ReadingOptions],
    ) -> NDArray[np.float32]:
        """Makes a vector of each text, or of each sequence of token ids: float32[inputs, numbers].

        `pooling` says what a vector is made of: "last_token" or "mean"; None: what the model is made for.
        Only the first `dimensions` numbers are kept (None: all), and then each vector is divided by its
        length if `normalize` says so. `truncation` says what is cut of inputs that are too long.
        """
        form = VectorForm(normalize=normalize, dimensions=dimensions)
        return embed(self, inputs, pooling=pooling, form=form, truncation=truncation, options=options)

    def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str] | Sequence[Sequence[int]],
        **options: Unpack[ReadingOptions],
    ) -> list[Score]:
        """Tells how likely the model finds each continuation of a prompt, token by token. Nothing is
        generated. A continuation of text is tokenized alone, without special tokens.
        """
        return score(self, prompt, continuations, options)

    def profile(
        self,
        folder: str | Path,
        *,
        steps: int = DEFAULT_STEPS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        keep: int | None = None,
    ) -> ProfileRun:
        """Begins to record what host and device do in the next `steps` steps, or until `timeout_s` seconds
        have passed. Returns when the recording has begun; `ProfileRun.result` waits for the files.

        They are written to a folder of their own in `folder`, of which the newest `keep` stay; None: all.
        Raises InvalidRequest, ProfileUnderWay where this program records already, ProfileFailed, and Draining
        after `shutdown`.
        """
        options = ProfileOptions(steps=steps, timeout_s=timeout_s)
        return self.profiler.start(Path(folder), options, keep)

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Generation: ...
    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> GenerationStream: ...
    def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Generation | GenerationStream:
        """Generates the assistant's next turn of a conversation: whole, or with `stream` as it comes.

        `messages` are turns, or mappings with "role" and "content". The model's chat template, or
        `chat_template`, makes the prompt. What the model thinks and which tools it calls is taken out of the
        text, in `reasoning` and `tool_calls`. `Generation.message` is the turn to go on with.
        """
        running = GenerationStream(self, chat_job(self, messages, options))
        if stream:
            return running
        with running:
            return running.result()
