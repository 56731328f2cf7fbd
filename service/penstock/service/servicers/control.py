"""ControlService: what operators, routers and trainers ask. Each RPC checks, converts, calls and converts
back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
import zipfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from google.protobuf.duration_pb2 import Duration

from penstock.runtime.errors import ProfileFailed, UnsupportedFeature
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.profiling.profile import Profile, ProfileRun
from penstock.runtime.prompting.prompts import ChatPrompt, Prompt, TextPrompt
from penstock.runtime.prompting.relevance import RelevanceMethod, default_method
from penstock.runtime.text.interface import Text
from penstock.service.access.roles import check_controls
from penstock.service.replies import messages
from penstock.service.replies.messages import PAGE_BYTES, pause_response, timestamp, vocabulary_page
from penstock.service.replies.reply_budget import ID_BYTES, Share
from penstock.service.requests.control import to_page, to_pause, to_profile, to_watch
from penstock.service.requests.generate import Violations, chat_prompt, encode_prompt, message_cost, token_ids
from penstock.service.requests.reading import POOLINGS, RERANK_METHODS, can_rerank
from penstock.service.requests.support import check_supported
from penstock.service.rpcs.interceptors import Undecoded
from penstock.service.servicers.adapters import Adapters
from penstock.service.servicers.serving import Serving
from penstock.service.servicers.weights import Ended, WeightUpdates
from penstock.service.telemetry.options import TraceLevel
from penstock.service.threads.lanes import MESSAGE_BYTES
from penstock.service.watching.feed import LoadFeed
from penstock.service.watching.load_messages import load_response
from penstock.service.watching.snapshot import look
from penstock.v1 import adapters_pb2, control_pb2, control_pb2_grpc, telemetry_pb2, types_pb2

if TYPE_CHECKING:
    from penstock.service.telemetry.otlp.tracing import Tracing
    from penstock.v1.control_pb2_grpc import _ServicerContext as Context


log = logging.getLogger(__name__)

_LEVELS = {
    telemetry_pb2.TRACE_LEVEL_OFF: TraceLevel.OFF,
    telemetry_pb2.TRACE_LEVEL_REQUESTS: TraceLevel.REQUESTS,
    telemetry_pb2.TRACE_LEVEL_STEPS: TraceLevel.STEPS,
    telemetry_pb2.TRACE_LEVEL_DETAILED: TraceLevel.DETAILED,
}
_NUMBERS = {level: number for number, level in _LEVELS.items()}
_LACKING = {"level": (telemetry_pb2.TRACE_LEVEL_OFF,)}
_WHY = {"level": "the server was started without --otlp-endpoint, so spans have nowhere to go"}


def set_tracing(
    request: telemetry_pb2.SetTracingRequest, tracing: Tracing | None
) -> telemetry_pb2.SetTracingResponse:
    """Change the level, if the request has one. Without `tracing` the level is OFF and stays so. Raises
    InvalidRequest and UnsupportedFeature.
    """
    bad = Violations()
    if request.level and request.level not in _LEVELS:
        bad.add("level", f"{request.level} is no value of TraceLevel")
    bad.raise_if_any()
    if tracing is None:
        check_supported(request, _LACKING, _WHY)
        off = telemetry_pb2.TRACE_LEVEL_OFF
        return telemetry_pb2.SetTracingResponse(previous=off, current=off)
    check_supported(request)
    previous = tracing.level
    if request.level:
        tracing.level = _LEVELS[request.level]
    if tracing.level is not previous:
        log.info("traces: level %s from now on, %s until now", tracing.level.name, previous.name)
    return telemetry_pb2.SetTracingResponse(
        previous=_NUMBERS[previous],
        current=_NUMBERS[tracing.level],
        spans_exported=tracing.exported,
        spans_dropped=tracing.dropped,
        spans_failed=tracing.failed,
    )


CHUNK_BYTES = 1024 * 1024
"""The most bytes of a zip file that one message carries."""


class Profiles:
    """Makes the profiles of one server."""

    def __init__(self, serving: Serving, folder: Path | None, *, keep: int) -> None:
        """`folder` is where profiles are written, and the newest `keep` stay; None refuses them."""
        self._engine = serving.engine
        self._lanes = serving.lanes
        self._calls = serving.calls
        self._folder = folder
        self._keep = keep

    @property
    def are_on(self) -> bool:
        """Whether profiles are made."""
        return self._folder is not None

    async def profile(
        self, request: telemetry_pb2.ProfileRequest
    ) -> AsyncIterator[telemetry_pb2.ProfileResponse]:
        """Record the next steps: say when it has begun, then what was written, then send the files if they
        are wanted.

        However the RPC ends, so does the recording. Raises UnsupportedFeature, InvalidRequest,
        ProfileUnderWay, ProfileFailed and Draining.
        """
        if self._folder is None:
            raise UnsupportedFeature(["Profile"], "the server was started without --profile-dir")
        asked = to_profile(request)
        begin = partial(self._engine.profiler.start, self._folder, asked.options, self._keep)
        run: Ended[ProfileRun] = Ended(begin, lambda run: run.stop())
        try:
            async with self._calls.preparing():
                begun = await self._lanes.heavy(run.make)
            yield telemetry_pb2.ProfileResponse(started=telemetry_pb2.ProfileStarted(path=str(begun.folder)))
            async with self._calls.preparing():
                profile = await asyncio.wrap_future(begun.future)
        finally:
            run.end()
        yield telemetry_pb2.ProfileResponse(finished=_finished(profile))
        if asked.include_data:
            with await self._lanes.heavy(partial(_zipped, profile.folder)) as file:
                while data := await self._lanes.heavy(partial(file.read, CHUNK_BYTES)):
                    yield telemetry_pb2.ProfileResponse(chunk=telemetry_pb2.ProfileChunk(data=data))


def _finished(profile: Profile) -> telemetry_pb2.ProfileFinished:
    duration = Duration()
    duration.FromNanoseconds(int(profile.duration_s * 1e9))
    return telemetry_pb2.ProfileFinished(
        path=str(profile.folder), steps=profile.steps, bytes=profile.num_bytes, duration=duration
    )


def _zipped(folder: Path) -> IO[bytes]:
    """Put everything below a folder into a temporary zip file, which is at its beginning. Blocks. Raises
    ProfileFailed if there is nothing any more: a later profile may have taken the place of this one.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    try:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for path in _files(folder):
                archive.write(path, path.relative_to(folder))
        file.seek(0)
    except OSError as error:
        file.close()
        raise ProfileFailed(f"the files of the profile cannot be sent: {error}") from error
    except BaseException:  # whatever it is, the file does not stay open
        file.close()
        raise
    return file


def _files(folder: Path) -> list[Path]:
    """List all files below a folder. Raises OSError if there is none."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    if not files:
        raise FileNotFoundError(f"{folder} is not there any more")
    return files


def _tokenizer_info(text: Text) -> control_pb2.TokenizerInfo:
    return control_pb2.TokenizerInfo(
        special_tokens=text.special_tokens,
        chat_template=text.default_template,
        tokenizer_class=text.tokenizer_class,
    )


CONTRACT_REVISION = 9
_WATCH_LOAD = "penstock.v1.ControlService/WatchLoad"
_TOKEN_COST = 8
"""The cost of turning one token into text, in bytes of a message (see `Lanes.convert`)."""


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Answers questions about one engine, and gives access to its tokenizer."""

    def __init__(
        self,
        serving: Serving,
        updates: WeightUpdates,
        profiles: Profiles,
        adapters: Adapters,
        *,
        version: str,
        instance_id: str,
    ) -> None:
        """`version` is the server's, and `instance_id` tells this start of it from all others."""
        self._updates = updates
        self._profiles = profiles
        self._adapters = adapters
        self._takes_updates = bool(serving.engine.tensor_specs())
        self._engine = serving.engine
        self._access = serving.access
        self._limits = serving.limits
        self._lanes = serving.lanes
        self._calls = serving.calls
        self._budget = serving.budget
        self._max_request_bytes = serving.max_request_bytes
        self._tracing = serving.tracing
        self._feed = LoadFeed(partial(look, serving.engine), serving.calls)
        self._version = version
        self._instance_id = instance_id

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: Context
    ) -> control_pb2.GetModelInfoResponse:
        """Describe the model and the sampling values in force."""
        check_supported(request)
        info = self._engine.info
        sampling = types_pb2.SamplingParams(**dataclasses.asdict(info.defaults), n=1)
        specs = self._engine.tensor_specs() if request.include_tensors else ()
        text = self._engine.text
        method = default_method(info.answer_token_ids, text, info.reader)
        return control_pb2.GetModelInfoResponse(
            model=info.name,
            architecture=info.architecture,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            default_sampling=sampling,
            weights=messages.weights_version(self._engine.weights),
            tensors=[messages.tensor_spec(*spec) for spec in specs],
            features=self._features(),
            weights_digest=self._engine.updater.digest,
            weights_since=timestamp(self._engine.weights_since),
            staged_update_id=self._engine.updater.staged_update_id,
            hidden_size=info.hidden_size,
            default_pooling=POOLINGS[info.pooling],
            template_variables=() if text is None else text.template_variables,
            image_limits=messages.image_limits(self._engine.info.images, self._engine.images),
            default_rerank_method=RERANK_METHODS[method]
            if can_rerank(method, self._limits)
            else types_pb2.RERANK_METHOD_UNSPECIFIED,
            tokenizer=None if text is None or not request.include_tokenizer else _tokenizer_info(text),
        )

    def _features(self) -> list[control_pb2.Feature.ValueType]:
        reader = self._engine.info.reader
        generates = reader is None
        has = {
            control_pb2.FEATURE_CHAT: self._limits.has_chat and generates,
            control_pb2.FEATURE_PROMPT_LOGPROBS: generates,
            control_pb2.FEATURE_JSON_SCHEMA: self._limits.has_grammars,
            control_pb2.FEATURE_REGEX: self._limits.has_grammars,
            control_pb2.FEATURE_ADAPTERS: self._adapters.are_on,
            control_pb2.FEATURE_PRIORITY: self._limits.has_priority,
            control_pb2.FEATURE_UPDATE_WEIGHTS: self._takes_updates,
            control_pb2.FEATURE_BATCH_INVARIANT: self._engine.info.batch_invariant,
            control_pb2.FEATURE_TRACING: self._tracing is not None,
            control_pb2.FEATURE_PROFILE: self._profiles.are_on,
            control_pb2.FEATURE_IMAGES: self._engine.info.images is not None,
            control_pb2.FEATURE_EMBED: self._limits.has_hidden_states,
            control_pb2.FEATURE_SCORE: generates,
            control_pb2.FEATURE_HIDDEN_STATES: self._limits.has_hidden_states and generates,
            control_pb2.FEATURE_NAMES: self._engine.text is not None and self._engine.text.shows_names,
            control_pb2.FEATURE_CLASSIFY: reader is not None and reader.classes is not None,
            control_pb2.FEATURE_RERANK: any(can_rerank(one, self._limits) for one in RelevanceMethod),
        }
        return [feature for feature, there in has.items() if there]

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.GetServerInfoResponse:
        """Tell the limits that are fixed at start."""
        config, info = self._engine.config, self._engine.info
        speculates = config.speculation != "off"
        return control_pb2.GetServerInfoResponse(
            server_version=self._version,
            instance_id=self._instance_id,
            contract_revision=CONTRACT_REVISION,
            max_running_requests=config.max_num_seqs,
            max_queued_requests=config.max_queued_requests,
            kv_page_tokens=info.page_size,
            kv_pages_total=info.num_pages,
            max_chunk_bytes=self._updates.max_chunk_bytes
            if self._takes_updates or self._adapters.are_on
            else 0,
            max_logprobs=config.max_logprobs,
            devices=info.devices,
            max_request_bytes=self._max_request_bytes,
            proposer=config.speculation if speculates else "",
            max_proposed_tokens=config.max_proposed_tokens or 0,
            max_adapters=config.max_adapters,
            max_cached_adapters=config.max_cached_adapters if config.max_adapters else 0,
            max_adapter_rank=config.max_adapter_rank if config.max_adapters else 0,
            adapter_experts=config.adapter_experts,
        )

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: Context
    ) -> control_pb2.GetLoadResponse:
        """Take a snapshot of the load."""
        return load_response(
            self._engine.load(),
            is_paused=self._engine.is_paused,
            weights=self._engine.weights,
            adapters=self._engine.adapters.list(),
        )

    async def LoadAdapter(
        self, request: adapters_pb2.LoadAdapterRequest, context: Context
    ) -> adapters_pb2.LoadAdapterResponse:
        """Read an adapter from the server's disk; see `Adapters.load`."""
        return await self._adapters.load(request)

    async def PushAdapter(  # type: ignore[override]  # the interceptor gives messages undecoded
        self, steps: AsyncIterator[Undecoded], context: Context
    ) -> adapters_pb2.PushAdapterResponse:
        """Take an adapter as a stream; see `Adapters.push`."""
        confirm: Any = partial(context.send_initial_metadata, ())  # a coroutine, whatever its type hint says
        return await self._adapters.push(steps, confirm)

    async def UnloadAdapter(
        self, request: adapters_pb2.UnloadAdapterRequest, context: Context
    ) -> adapters_pb2.UnloadAdapterResponse:
        """Drop an adapter; see `Adapters.unload`."""
        return await self._adapters.unload(request)

    async def PinAdapter(
        self, request: adapters_pb2.PinAdapterRequest, context: Context
    ) -> adapters_pb2.PinAdapterResponse:
        """Keep an adapter in memory, or no longer."""
        return await self._adapters.pin(request)

    async def ListAdapters(
        self, request: adapters_pb2.ListAdaptersRequest, context: Context
    ) -> adapters_pb2.ListAdaptersResponse:
        """Tell the adapters that the caller may use."""
        return self._adapters.list(request)

    def WatchLoad(
        self, request: telemetry_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchLoadResponse]:
        """Tell the load again and again. The requests that it may list are everybody's, so the caller is
        checked before each message.
        """
        watch = to_watch(request)

        def check() -> None:
            caller = self._access.still(_WATCH_LOAD, cast("Any", context))
            if watch.max_requests:
                check_controls(caller, "WatchLoad with max_requests")

        return cast("AsyncIterator[control_pb2.WatchLoadResponse]", self._feed.messages(watch, check))

    async def SetTracing(
        self, request: telemetry_pb2.SetTracingRequest, context: Context
    ) -> telemetry_pb2.SetTracingResponse:
        """Change how much is traced, or tell it."""
        return set_tracing(request, self._tracing)

    def Profile(
        self, request: telemetry_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[telemetry_pb2.ProfileResponse]:
        """Record the next steps; see `Profiles.profile`."""
        return self._profiles.profile(request)

    async def Tokenize(
        self, request: control_pb2.TokenizeRequest, context: Context
    ) -> control_pb2.TokenizeResponse:
        """Return the token ids that Generate would give to the model.

        Ids may take more bytes than their text, and many times that as Python objects. So a token for each
        byte of the request is counted as waiting before they are made, and until the reply has left.
        """
        share = self._hold(ID_BYTES * MESSAGE_BYTES.get())
        max_model_len = self._engine.info.max_model_len
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        async with self._calls.preparing():
            prompt = await self._lanes.convert(partial(self._prompt, request), message_cost(request.chat))
            encoded = await encode_prompt(
                self._engine.text,
                prompt,
                self._lanes,
                room=self._engine.info.room,
                add_special_tokens=special,
                # a text comes without images, also where it has places for some
                reader=self._engine.images if isinstance(prompt, ChatPrompt) else None,
            )
        num_ids = len(encoded.token_ids)
        self._budget.check_ids(request.WhichOneof("input") or "input", num_ids)
        share.add(ID_BYTES * num_ids - share.num_bytes)
        return control_pb2.TokenizeResponse(token_ids=encoded.token_ids, max_context_tokens=max_model_len)

    def _prompt(self, request: control_pb2.TokenizeRequest) -> Prompt:
        check_supported(request, self._limits.lacking_templates, self._limits.why_lacking)
        bad = Violations()
        prompt: Prompt | None = None
        kind = request.WhichOneof("input")
        if kind == "text":
            if self._engine.text is None:
                raise UnsupportedFeature(["text"])
            prompt = TextPrompt(request.text)
        elif kind == "chat":
            prompt = chat_prompt(request.chat, self._engine.text, self._engine.info.images, bad)
        else:
            bad.add("input", "one of text and chat is required")
        bad.raise_if_any()
        assert prompt is not None
        return prompt

    async def Detokenize(
        self, request: control_pb2.DetokenizeRequest, context: Context
    ) -> control_pb2.DetokenizeResponse:
        """Turn any ids of the vocabulary into text."""
        check_supported(request)
        codec = self._engine.text
        if codec is None:
            raise UnsupportedFeature(["token_ids"])
        bad = Violations()
        # One byte of the request may become hundreds of bytes of the reply, so there is a limit.
        ids: tuple[int, ...] = ()
        if bad.allows("token_ids", len(request.token_ids), self._engine.info.max_model_len, "ids"):
            ids = token_ids("token_ids", request.token_ids, self._engine.info.vocab_size, bad)
        bad.raise_if_any()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        work = partial(codec.decode, ids, skip_special_tokens=skip)
        async with self._calls.preparing():
            text = await self._lanes.convert(work, _TOKEN_COST * len(ids))
        return control_pb2.DetokenizeResponse(text=text)

    async def GetVocabulary(
        self, request: control_pb2.GetVocabularyRequest, context: Context
    ) -> control_pb2.GetVocabularyResponse:
        """Tell the bytes of some tokens. The codec is read only, and nothing ever replaces it."""
        vocab_size = self._engine.info.vocab_size
        page = to_page(request, vocab_size)
        codec = self._engine.text
        if codec is None:
            raise UnsupportedFeature(["GetVocabulary"], "the model has no tokenizer")
        self._hold(PAGE_BYTES)
        async with self._calls.preparing():
            return await self._lanes.convert(
                partial(vocabulary_page, codec.token_bytes, page, vocab_size), _TOKEN_COST * len(page)
            )

    def _hold(self, num_bytes: int) -> Share:
        """Count a reply of about so many bytes as waiting until this RPC ends. Raises Busy."""
        share = self._budget.hold(num_bytes)
        task = asyncio.current_task()
        assert task is not None, "gRPC calls handlers in a task"
        task.add_done_callback(lambda _: share.close())
        return share

    async def Pause(self, request: control_pb2.PauseRequest, context: Context) -> control_pb2.PauseResponse:
        """Make no more tokens until Resume, and answer once that is so. A client that does not wait for it
        takes the pause back.
        """
        running = to_pause(request)
        async with self._calls.preparing():
            asked = self._engine.pause(
                running.policy or InFlightPolicy.WAIT,
                drain_timeout_s=running.drain_timeout_s,
                free_kv_cache=request.free_kv_cache,
                offload_weights=request.offload_weights,
            )
            response = pause_response(await asyncio.wrap_future(asked))
        log.info("paused; %d bytes are free", response.freed_bytes)
        return response

    async def Resume(
        self, request: control_pb2.ResumeRequest, context: Context
    ) -> control_pb2.ResumeResponse:
        """End a pause, after what it has freed was restored."""
        async with self._calls.preparing():
            await asyncio.wrap_future(self._engine.resume())
        log.info("resumed")
        return control_pb2.ResumeResponse()

    async def CommitWeights(
        self, request: control_pb2.CommitWeightsRequest, context: Context
    ) -> control_pb2.CommitWeightsResponse:
        """Swap in a staged update."""
        return await self._updates.commit(request)

    async def DiscardWeights(
        self, request: control_pb2.DiscardWeightsRequest, context: Context
    ) -> control_pb2.DiscardWeightsResponse:
        """Drop a staged update."""
        return await self._updates.discard(request)

    async def FlushCache(
        self, request: control_pb2.FlushCacheRequest, context: Context
    ) -> control_pb2.FlushCacheResponse:
        """Forget all cached prefixes. Prefixes in use are not shared with new requests any more."""
        check_supported(request)
        pages_freed, pages_in_use = self._engine.flush_prefix_cache()
        return control_pb2.FlushCacheResponse(pages_freed=pages_freed, pages_in_use=pages_in_use)
