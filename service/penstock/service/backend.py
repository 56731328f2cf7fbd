"""What the service needs of an engine, as protocols, because what needs no JAX is to load none.
`penstock.runtime.engine.Engine` is one; tests use its core on a runner without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Protocol

from penstock.runtime.adapters.registry import AdapterRegistry
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.config import ResolvedConfig
from penstock.runtime.errors import EngineFailure
from penstock.runtime.grammar.compile.compiler import GrammarCompiler
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.loop.interface import AbortOutcome, InFlightPolicy, Paused, Pulse, WeightsVersion
from penstock.runtime.loop.journal import Journal
from penstock.runtime.measuring.engine_metrics import EngineMetrics
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.profiling.profile import ProfileOptions, ProfileRun
from penstock.runtime.requests.request import Finish, PreparedPrompt, Request, StepOutput
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.pages import FlushedPages
from penstock.runtime.scheduling.status import OutputStatus
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.text.interface import Text
from penstock.runtime.updating.interface import UpdateOptions, UpdateReport


class Upload(Protocol):
    """A weight update whose tensors come in chunks. All methods block, and are called one after the other;
    only `close` may be called at any time, on any thread.
    """

    def write(self, tensor_index: int, offset: int, data: bytes) -> None:
        """Take the next bytes of a tensor."""
        ...

    def commit(self, total_bytes: int) -> Future[UpdateReport]:
        """Check that everything has come, and have the update go live. Cancelling the future takes the update
        back, unless it is being applied.
        """
        ...

    def stage(self, total_bytes: int) -> UpdateReport:
        """Check that everything has come, and keep the update until it is committed or discarded."""
        ...

    def close(self) -> None:
        """End the upload; what was neither committed nor staged is dropped. May be called twice."""
        ...


class FileUpload(Upload, Protocol):
    """A weight update whose tensors are read from files."""

    def read(self) -> None:
        """Read them all. Ends soon if the upload is closed meanwhile."""
        ...


class Updater(Protocol):
    """Takes weight updates, one at a time. Any thread may call any method."""

    @property
    def digest(self) -> bytes:
        """The digest of the update that serves; empty for the weights of the start."""
        ...

    @property
    def staged_update_id(self) -> str:
        """The update that waits to be committed or discarded; empty: none does."""
        ...

    def already_committed(self, update_id: str) -> UpdateReport | None:
        """Return what came of an update that was committed, or is staged; None: it is not known."""
        ...

    def validate(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> None:
        """Raise what `begin` would, but for another update that is under way. Blocks."""
        ...

    def validate_uri(self, options: UpdateOptions, uri: str, *, roots: Sequence[Path]) -> None:
        """Raise what `open_uri` would, but for another update that is under way. Blocks."""
        ...

    def begin(self, options: UpdateOptions, sent: Sequence[SentTensor]) -> Upload:
        """Begin an update whose tensors come in chunks. Blocks."""
        ...

    def open_uri(self, options: UpdateOptions, uri: str, *, roots: Sequence[Path]) -> FileUpload:
        """Begin an update whose tensors are in files below `roots`. Blocks."""
        ...

    def commit_staged(
        self,
        update_id: str,
        *,
        in_flight: InFlightPolicy | None = None,
        drain_timeout_s: float | None = None,
    ) -> Future[UpdateReport]:
        """Have a staged update go live; what is None is as the update began. Raises UnknownUpdate and, if the
        update is not complete yet or is about to go live, UpdateUnderWay.
        """
        ...

    def discard(self, update_id: str) -> bool:
        """Drop a staged update. Returns whether there was one with this id. Blocks."""
        ...


class Profiler(Protocol):
    """Records what host and device do in the next steps of the engine."""

    def start(self, folder: Path, options: ProfileOptions, keep: int | None = None) -> ProfileRun:
        """Begin, and return when the recording has begun. The files go to a folder of their own in `folder`,
        of which the newest `keep` stay. Blocks.
        """
        ...


class Backend(Protocol):
    """The engine as the service sees it. Everything may be called on the event loop, except methods that say
    that they block.
    """

    @property
    def config(self) -> ResolvedConfig: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def text(self) -> Text | None: ...
    @property
    def images(self) -> ImageReader | None:
        """Reads the images of prompts; None for a model that takes none."""
        ...

    @property
    def forms(self) -> ChatForms:
        """The forms in which the model writes tool calls and reasoning."""
        ...

    @property
    def has_grammars(self) -> bool:
        """Whether `grammars` is not None; asking does not make it."""
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
    def weights_since(self) -> datetime:
        """When the weights in use went live."""
        ...

    def version_of(self, generation: int) -> WeightsVersion:
        """Return the version that has or had this generation; the label is empty if it is too old to be
        known.
        """
        ...

    @property
    def journal(self) -> Journal:
        """Tells its readers of every output and every step."""
        ...

    @property
    def updater(self) -> Updater: ...
    @property
    def registry(self) -> Registry:
        """The values of the engine's metrics."""
        ...

    def metrics(self, *, flush: bool = True) -> EngineMetrics:
        """Say what the engine does and has done; without `flush` until a moment ago. ConfigError where its
        metrics are off. Blocks, with `flush` until the engine's thread has handed over its step.
        """
        ...

    @property
    def profiler(self) -> Profiler: ...
    @property
    def adapters(self) -> AdapterRegistry: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...

    def pulse(self) -> Pulse:
        """Tell whether the engine's thread makes progress. May be called on any thread, and waits for no
        lock.
        """
        ...

    def give_up(self, failure: EngineFailure) -> None:
        """End the engine because of something that its own thread cannot notice, and tell every request."""
        ...

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the engine dies, before its requests get their error; at once if it is
        dead already. The callback may run on any thread.
        """
        ...

    def on_ready_changed(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a failed update has left no whole weights, so that the engine is not
        `ready`, and whenever another update has mended that. The callback may run on any thread.
        """
        ...

    def tensor_specs(self) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        """Return the Hugging Face name, the dtype (such as "bfloat16") and the shape of every tensor."""
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

    def oldest_outputs(self, most: int) -> Sequence[OutputStatus]:
        """Tell where the outputs stand that arrived first, at most so many."""
        ...

    def flush_prefix_cache(self) -> FlushedPages:
        """Forget all cached prefixes. Returns how many pages became free, and how many are still held by
        running requests.
        """
        ...

    def pause(
        self,
        in_flight: InFlightPolicy,
        *,
        drain_timeout_s: float | None = None,
        free_kv_cache: bool = False,
        offload_weights: bool = False,
    ) -> Future[Paused]:
        """Make no more tokens until `resume`. Cancelling the future takes the pause back, unless it has
        begun.
        """
        ...

    def resume(self) -> Future[None]:
        """End a pause, if there is one."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others, for at most `timeout_s` seconds. Blocks."""
        ...

    def shutdown(self) -> None:
        """Stop for good. Blocks."""
        ...
