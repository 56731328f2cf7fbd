"""The server behind the front: its client, and what is known of its model.

Facts of the model are asked for with the key of the caller who needs them, and `/v1/models` always asks, so
that nobody learns from what others may know. The vocabulary, which shows what tokens look like without a
tokenizer, is fetched once for as long as the same server runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from penstock.client import (
    Adapter,
    AsyncClient,
    ModelInfo,
    PenstockClientError,
    SamplingDefaults,
    Unsupported,
    Vocabulary,
)
from penstock.openai.calls import Call, Shared
from penstock.openai.failures import ApiError
from penstock.openai.settings import Settings

CHECK_S: Final = 10.0
"""For how long a vocabulary is used before the server is asked whether it still runs."""
MOST_INSTANCES: Final = 64
"""How many starts of servers with the same vocabulary are remembered: there are several where the address
names several servers.
"""
_TIMEOUT_S: Final = 10.0


class Vocabularies:
    """Keeps one vocabulary. It belongs to one event loop."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._client = client
        self._clock = clock
        self._kept: Vocabulary | None = None
        self._instances: dict[str, None] = {}
        """The starts of servers that have the kept vocabulary, the oldest ones first."""
        self._until = 0.0
        self._asking = Shared(self._ask)

    async def of(self, call: Call) -> Vocabulary:
        """Return the vocabulary, asked for with the caller's key where it is not known. Raises the client's
        errors.
        """
        if self._kept is not None and self._clock() < self._until:
            return self._kept
        return await self._asking.of(call)

    def forget(self) -> None:
        """Look at the next request whether the same server still runs."""
        self._until = 0.0

    async def close(self) -> None:
        """End what is under way."""
        await self._asking.close()

    async def _ask(self, call: Call) -> Vocabulary:
        server = await self._client.server_info(timeout=_TIMEOUT_S, metadata=call.metadata)
        kept = self._kept
        if kept is None or server.instance_id not in self._instances:
            new = await self._client.vocabulary(timeout=_TIMEOUT_S, metadata=call.metadata)
            if kept is None or new != kept:
                kept = self._kept = new
                self._instances.clear()
            self._instances[server.instance_id] = None
            if len(self._instances) > MOST_INSTANCES:
                del self._instances[next(iter(self._instances))]
        self._until = self._clock() + CHECK_S
        return kept


FACTS_S: Final = 10.0
"""For how long facts are used before they are asked for again."""
HEALTH_S: Final = 0.5
"""For how long an answer of the health check is used again."""
_HEALTH_TIMEOUT_S: Final = 2.0
_FACTS_TIMEOUT_S: Final = 10.0


class Asked(TypedDict):
    """The client's keyword arguments for who shall answer."""

    model: str | None
    adapter: str | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are made with: the served model, and what it can."""

    model: str
    features: frozenset[str]
    """As in the client's `ModelInfo.features`."""
    template_variables: frozenset[str]
    """The names that its chat template reads beside the standard ones."""
    max_context_tokens: int
    vocab_size: int
    default_sampling: SamplingDefaults
    created: int
    """Since when its weights serve, in seconds of Unix time."""

    @property
    def has_adapters(self) -> bool:
        """Whether requests may ask for adapters, which are named as models are."""
        return "adapters" in self.features

    @property
    def only_model(self) -> str | None:
        """What the `model` of each request must be; None where it may be an adapter, too."""
        return None if self.has_adapters else self.model

    def asked_for(self, model: str | None) -> Asked:
        """Say what a request asks the server for that names this model. A name that is not the model's is
        that of an adapter, if there are any.
        """
        if model is None or model == self.model or not self.has_adapters:
            return Asked(model=model, adapter=None)
        return Asked(model=None, adapter=model)


class Backend:
    """The client of the server, for one event loop. Make it inside a coroutine."""

    def __init__(self, settings: Settings) -> None:
        """Raise ValueError for files of TLS that cannot be used, and for a token that is none."""
        self.client = AsyncClient(
            settings.addr, tls=settings.tls, token=settings.token, insecure=settings.insecure
        )
        self._vocabularies = Vocabularies(self.client)
        self._started = int(time.time())
        self._facts: ModelFacts | None = None
        self._facts_until = 0.0
        self._asking = Shared(self._ask)
        self._is_ready = False
        self._ready_until = 0.0
        self._checking: asyncio.Task[bool] | None = None

    async def facts(self, call: Call, *, fresh: bool = False) -> ModelFacts:
        """Return what is known of the model, asked for with the caller's key where it is not known yet.
        `fresh` asks the server in any case, which refuses callers that may not know it. Raises the client's
        errors.
        """
        if self._facts is not None and not fresh and time.monotonic() < self._facts_until:
            return self._facts
        return await self._asking.of(call)

    async def adapters(self, call: Call) -> Sequence[Adapter]:
        """List the adapters that the server has in memory and the caller may use. Raises the client's
        errors.
        """
        if not (await self.facts(call)).has_adapters:
            return ()
        return await self.client.list_adapters(timeout=_FACTS_TIMEOUT_S, metadata=call.metadata)

    async def vocabulary(self, call: Call, param: str = "logprobs") -> Vocabulary:
        """Return what the model's tokens look like, for the sake of this field. Raises ApiError if it has no
        tokenizer, and the client's errors.
        """
        try:
            return await self._vocabularies.of(call)
        except Unsupported:
            message = f"Unsupported parameter: '{param}': the served model has no tokenizer."
            raise ApiError(400, message, param=param, code="unsupported_parameter") from None

    def forget(self) -> None:
        """Ask for the facts again at the next request: the server has said that they are wrong."""
        self._facts = None
        self._vocabularies.forget()

    async def is_ready(self) -> bool:
        """Say whether the server takes requests. Never raises."""
        if time.monotonic() >= self._ready_until:
            if self._checking is None:
                self._checking = asyncio.create_task(self._check())
                self._checking.add_done_callback(self._checked)
            return await asyncio.shield(self._checking)
        return self._is_ready

    async def close(self) -> None:
        """End what is under way, and close the connection."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await self._asking.close()
        await self._vocabularies.close()
        await self.client.close()

    async def _ask(self, call: Call) -> ModelFacts:
        info = await self.client.model_info(timeout=_FACTS_TIMEOUT_S, metadata=call.metadata)
        self._facts = self._facts_of(info)
        self._facts_until = time.monotonic() + FACTS_S
        return self._facts

    def _facts_of(self, info: ModelInfo) -> ModelFacts:
        since = info.weights_since
        return ModelFacts(
            model=info.model,
            features=frozenset(info.features),
            template_variables=frozenset(info.template_variables),
            max_context_tokens=info.max_context_tokens,
            vocab_size=info.vocab_size,
            default_sampling=info.default_sampling,
            created=self._started if since is None else int(since.timestamp()),
        )

    async def _check(self) -> bool:
        try:
            self._is_ready = await self.client.is_ready(_HEALTH_TIMEOUT_S)
        except PenstockClientError:  # the server answered that it has no such health, or wants another key
            self._is_ready = False
        self._ready_until = time.monotonic() + HEALTH_S
        return self._is_ready

    def _checked(self, task: asyncio.Task[bool]) -> None:
        self._checking = None
