"""The sync client. Each method builds a request, makes the call, and converts the reply."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Self, Unpack

from penstock.client import control
from penstock.client.adapters import Adapters
from penstock.client.connection.channel import TEXT_TIMEOUT, Metadata
from penstock.client.control import TraceLevel, VocabularyPages, received
from penstock.client.generation import messages, requests
from penstock.client.generation.options import ChatOptions, RequestOptions
from penstock.client.generation.receiving import ServerStream
from penstock.client.generation.streams import GenerationStream
from penstock.client.values.results import Generation
from penstock.client.values.server_values import (
    AbortResult,
    FlushedCache,
    Load,
    ModelInfo,
    Profile,
    ServerInfo,
    Tokens,
    TracingStatus,
    Vocabulary,
)
from penstock.client.values.weights_values import CommittedWeights, Paused, WeightsUpdate
from penstock.client.watch import LoadReport, load_report
from penstock.client.weights import update as updates
from penstock.client.weights.sending import send
from penstock.client.weights.tensors import Tensors
from penstock.client.weights.update import InFlightPolicy, UpdateOptions, chunk_bytes_of, described, update_of
from penstock.v1 import control_pb2, inference_pb2


class Client(Adapters):
    """A connection to one server, or to several that serve the same. It may be shared between threads.

    `addr` is host:port or unix:/path; the default is 127.0.0.1:50051. Several servers are given as
    "a:50051,b:50051" or dns:///name:50051; calls go in turn to those whose health is SERVING.

    `tls` (True, or a `Tls` with files) secures the channel; `credentials` of gRPC itself may be given
    instead. `token` is the key that the server asks for. It is sent in plaintext to another machine only if
    `insecure` is true; otherwise that raises ValueError. An existing `channel` takes the place of all these;
    it stays the caller's, and `close` leaves it open. `options` are further gRPC channel arguments.

    `metadata` is sent with every call, before the call's own. `inference` and `control` are the generated
    stubs, for RPCs that have no method here; they need `metadata=client.metadata` if the server asks for a
    key.

    Every method takes `timeout` and `metadata`, and raises the errors of `penstock.client.errors`. `timeout`
    is the hard limit in seconds for all attempts together (math.inf: no limit). Its default is the client's
    `timeout`; if that is None, generation, weight updates and pauses have no limit, tokenizing has 60 s, and
    everything else 10 s. The call's `metadata` is a mapping such as `{"traceparent": "00-..."}`, or pairs.
    `retries` says how often a call is repeated that the server could not take; by default it is not repeated.
    """

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Run a prompt to its end and return all outputs. For options see `RequestOptions`.

        It is not idempotent: calling it again generates again.
        """
        request = requests.fill_request(inference_pb2.GenerateRequest(), prompt, options)
        return messages.generation(self._unary(self.inference.Generate, request, timeout, metadata, None))

    def stream(
        self,
        prompt: str | None = None,
        *,
        min_tokens_per_message: int | None = None,
        tool_call_deltas: bool = False,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Run a prompt and return its events while tokens are generated. For options see `RequestOptions`.

        `min_tokens_per_message` is the least number of tokens in a delta (default 1); higher values make
        fewer and larger messages. With `tool_call_deltas` calls of tools come in pieces while the model
        writes them, as `Delta.tool_call_deltas`, and else whole. Use the stream in a `with` block, or close
        it.
        """
        request = requests.stream_request(
            prompt, min_tokens_per_message, options, tool_call_deltas=tool_call_deltas
        )
        sent = self._sent(metadata)
        return GenerationStream(
            lambda left: self.inference.Stream(request, timeout=left, metadata=sent), self._attempts(timeout)
        )

    def abort(
        self,
        ids: str | Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all: bool = False,
        reason: str = "",
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> tuple[AbortResult, ...]:
        """End requests early, and return what happened to each. Give exactly one of `ids`, `prefix` (of ids)
        and `all=True`; otherwise TypeError or ValueError.

        Returns once their slots and KV pages are free. An unknown id is an outcome, not an error. `reason` is
        sent to whoever waits for the aborted requests.
        """
        request = control.abort_request(ids, prefix, all, reason)
        return messages.abort_results(self._unary(self.inference.Abort, request, timeout, metadata))

    def model_info(
        self,
        *,
        include_tensors: bool = False,
        include_tokenizer: bool = False,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> ModelInfo:
        """Return the served model and the sampling values in force. `include_tensors` adds name, dtype and
        shape of every tensor, and `include_tokenizer` the special tokens and the chat template.
        """
        request = control_pb2.GetModelInfoRequest(
            include_tensors=include_tensors, include_tokenizer=include_tokenizer
        )
        return messages.model_info(self._unary(self.control.GetModelInfo, request, timeout, metadata))

    def server_info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> ServerInfo:
        """Return the server's limits, which are fixed at its start."""
        request = control_pb2.GetServerInfoRequest()
        return messages.server_info(self._unary(self.control.GetServerInfo, request, timeout, metadata))

    def load(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> Load:
        """Return how busy the server is now."""
        return messages.load(
            self._unary(self.control.GetLoad, control_pb2.GetLoadRequest(), timeout, metadata)
        )

    def watch_load(
        self,
        *,
        interval: float | None = None,
        max_requests: int = 0,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> ServerStream[LoadReport]:
        """Report how busy the server is: at once, and then every `interval` seconds (0.1 to 60, default 1),
        until the stream is closed or the server stops. Use it in a `with` block, or close it.

        `max_requests`, up to 1000, adds that many of the requests that the engine has, oldest first; that
        needs the role "control", else Forbidden. There is no default `timeout`.
        """
        request = control.watch_request(interval, max_requests)
        return self._server_stream(self.control.WatchLoad, request, timeout, metadata, load_report)

    def set_tracing(
        self,
        level: TraceLevel | None = None,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> TracingStatus:
        """Change how much the server traces, also of requests that run, and return what became of its spans.
        Without a `level` nothing changes. A server without a collector can only be "off"; any other level
        raises Unsupported there.
        """
        request = control.tracing_request(level)
        reply = self._unary(self.control.SetTracing, request, timeout, metadata)
        return messages.tracing_status(reply)

    def profile(
        self,
        *,
        steps: int | None = None,
        max_time: float | None = None,
        folder: str | PathLike[str] | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Profile:
        """Record what host and device do in the engine's next `steps` steps (1 to 1000, default 100), for at
        most `max_time` seconds (0.1 to 300, default 60). The files stay at the server. With `folder` they are
        also sent, and unpacked to a new folder there. There is no default `timeout`. Raises ProfileUnderWay.
        """
        self._check_one_server()
        request = control.profile_request(steps, max_time, send_files=folder is not None)
        answer = self._server_stream(
            self.control.Profile, request, timeout, metadata, lambda message: message
        )
        return received(answer, folder)

    def flush_cache(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> FlushedCache:
        """Forget all cached prompt prefixes. Running requests keep their pages, which are not shared with new
        requests.
        """
        request = control_pb2.FlushCacheRequest()
        return messages.flushed_cache(self._unary(self.control.FlushCache, request, timeout, metadata))

    def update_weights(
        self,
        tensors: Tensors | None = None,
        *,
        uri: str | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[UpdateOptions],
    ) -> WeightsUpdate:
        """Replace the model's weights while the server goes on serving. For options see `UpdateOptions`.

        `tensors` are arrays by their names in a checkpoint (NumPy's, with the dtypes of ml_dtypes, JAX's, or
        whatever has `__array__` or `__dlpack__`), or the path of a safetensors file or of a directory of
        them. Or give `uri`, such as "file:///models/step-17", which the server reads itself.

        There is no default `timeout`. Raises TensorsRefused with all bad tensors. After an error the old
        weights are in use, unless the staging was "in_place"; only if the answer was lost (Unreachable,
        DeadlineExceeded, Cancelled) the new ones may be. Then call again with the error's `update_id`: the
        update is not applied twice.
        """
        self._check_one_server()
        update = update_of(tensors, uri, options)
        attempts = self._attempts(timeout)
        chunk_bytes = 0
        if update.needs_chunks:
            info = self.server_info(timeout=attempts.timeout(), metadata=metadata)
            chunk_bytes = chunk_bytes_of(info.max_chunk_bytes)
        update = described(update)
        sent = self._sent(metadata)
        reply = self._repeated(
            lambda left: send(
                lambda steps: self.inference.UpdateWeights.future(steps, timeout=left, metadata=sent),
                update,
                chunk_bytes,
            ),
            attempts,
            update.update_id,
        )
        return messages.weights_update(reply, update.update_id)

    def commit_weights(
        self,
        update_id: str,
        *,
        policy: InFlightPolicy | None = None,
        drain_timeout_s: float | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> CommittedWeights:
        """Swap in an update that was sent with `stage_only`. `policy` and `drain_timeout_s` are by default
        those that the update was sent with. There is no default `timeout`. It may be called again if its
        answer was lost. Raises UnknownUpdate, GenerationChanged and DrainTimeout.
        """
        self._check_one_server()
        request = updates.commit_request(update_id, policy, drain_timeout_s)
        reply = self._unary(self.control.CommitWeights, request, timeout, metadata, None)
        return messages.committed_weights(reply, update_id)

    def discard_weights(
        self, update_id: str, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> bool:
        """Drop an update that was sent with `stage_only`, and free its memory. Returns False if no update
        with this id was staged.
        """
        self._check_one_server()
        request = updates.discard_request(update_id)
        return self._unary(self.control.DiscardWeights, request, timeout, metadata).discarded

    def pause(
        self,
        *,
        policy: InFlightPolicy | None = None,
        drain_timeout_s: float | None = None,
        free_kv_cache: bool = False,
        offload_weights: bool = False,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Paused:
        """Stop making tokens until `resume`; new requests queue up. `policy` says what happens to those that
        run (default "wait", for at most `drain_timeout_s` seconds; then DrainTimeout, and nothing is paused).

        `free_kv_cache` frees the memory of the KV cache, and `offload_weights` moves the weights to the
        server's host memory, both until `resume`. There is no default `timeout`.
        """
        self._check_one_server()
        request = updates.pause_request(policy, drain_timeout_s, free_kv_cache, offload_weights)
        return messages.paused(self._unary(self.control.Pause, request, timeout, metadata, None))

    def resume(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> None:
        """End a pause, after what it freed is there again. Does nothing to a server that is not paused."""
        self._check_one_server()
        self._unary(self.control.Resume, control_pb2.ResumeRequest(), timeout, metadata, None)

    def tokenize(
        self,
        text: str | None = None,
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **chat: Unpack[ChatOptions],
    ) -> Tokens:
        """Return the token ids of a text, or of a conversation (`messages=...`) rendered with the chat
        template.

        `add_special_tokens` is true by default for a text, and false for a conversation, whose template
        writes them. Give exactly one of `text` and `messages`; otherwise TypeError.
        """
        request = control.tokenize_request(text, add_special_tokens, chat)
        return messages.tokens(self._unary(self.control.Tokenize, request, timeout, metadata, TEXT_TIMEOUT))

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> str:
        """Return the text of token ids. Special tokens are left out unless `skip_special_tokens` is false."""
        request = control.detokenize_request(token_ids, skip_special_tokens)
        return self._unary(self.control.Detokenize, request, timeout, metadata, TEXT_TIMEOUT).text

    def vocabulary(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> Vocabulary:
        """Return the bytes of all tokens. It makes a few calls, and `timeout` is that of each."""
        pages = VocabularyPages()
        while (request := pages.next_request()) is not None:
            pages.add(self._unary(self.control.GetVocabulary, request, timeout, metadata))
        return pages.joined()

    def is_ready(self, timeout: float = 1.0) -> bool:
        """Say whether the server's health is SERVING now. Also false if nobody answers within `timeout`
        seconds.
        """
        return self._health().why_not(timeout) is None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the server's health is SERVING. Raises NotReady after `timeout` seconds; None waits for
        ever.
        """
        self._health().wait(timeout)

    def close(self) -> None:
        """Close the channel and cancel running calls. A channel that the caller gave stays open."""
        if self._owns_channel:
            self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
