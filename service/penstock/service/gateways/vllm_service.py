"""vLLM's gRPC service on a Penstock server, for gateways that speak to vLLM: `vllm.grpc.engine.VllmEngine`.

It stands on the contract's own servicer, so that a request runs, is limited, is counted and fails as any
other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from penstock.runtime.errors import RequestError, UnsupportedFeature
from penstock.service.access.callers import CURRENT_CALLER, Role
from penstock.service.gateways import smg_common_pb2
from penstock.service.gateways import vllm_engine_pb2 as vllm
from penstock.service.gateways.vllm_replies import Answer
from penstock.service.gateways.vllm_requests import renamed, to_stream_request
from penstock.service.servicers.inference import InferenceServicer
from penstock.service.servicers.serving import Serving
from penstock.service.threads.lanes import MESSAGE_BYTES
from penstock.v1 import inference_pb2

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
SERVER_TYPE = "penstock"
_PART_BYTES = 64 * 1024
_TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
_TOKENIZER_SUFFIXES = frozenset({".jinja", ".model", ".tiktoken"})


class VllmServicer:
    """Answers for one engine. Each method raises what the contract's would, with vLLM's names of fields."""

    def __init__(self, serving: Serving, inference: InferenceServicer, *, version: str) -> None:
        self._serving = serving
        self._engine = serving.engine
        self._inference = inference
        self._version = version
        self._began_s = time.monotonic()

    async def Generate(
        self, request: vllm.GenerateRequest, context: Any
    ) -> AsyncIterator[vllm.GenerateResponse]:
        """Run a request; see `Answer` for what is sent."""
        async with self._serving.calls.preparing():
            asked = await self._serving.lanes.convert(
                partial(to_stream_request, request, self._engine.info.max_model_len), MESSAGE_BYTES.get()
            )
        answer = Answer(streams=request.stream)
        del request  # it would otherwise live as long as this RPC
        replies: Any = self._inference.Stream(asked, context)
        del asked
        try:
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    event = (
                        inference_pb2.StreamResponse.FromString(reply) if isinstance(reply, bytes) else reply
                    )
                    for message in answer.messages(event):
                        yield message
        except RequestError as error:
            raise renamed(error) from None

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        """End the caller's own requests. What is unknown has ended already."""
        caller = CURRENT_CALLER.get()
        CURRENT_CALLER.set(dataclasses.replace(caller, roles=caller.roles - {Role.CONTROL}))
        if request.request_ids:
            try:
                await self._inference.Abort(_ids(request), context)
            except RequestError as error:
                raise renamed(error) from None
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Any) -> vllm.HealthCheckResponse:
        """Say whether the engine takes requests. Before there is an engine the answer is NOT_READY."""
        is_ready = self._engine.ready
        return vllm.HealthCheckResponse(
            healthy=is_ready, message="" if is_ready else "the engine is not ready"
        )

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Any
    ) -> vllm.GetModelInfoResponse:
        """Describe the model. Where its files lie is nobody's business, so the paths are its name."""
        info = self._engine.info
        defaults = {
            name: value for name, value in dataclasses.asdict(info.defaults).items() if value is not None
        }
        return vllm.GetModelInfoResponse(
            model_path=info.name,
            is_generation=True,
            max_context_length=info.max_model_len,
            vocab_size=info.vocab_size,
            served_model_name=info.name,
            tokenizer_path=info.name,
            architectures=[info.architecture],
            eos_token_ids=info.eos_token_ids,
            max_req_input_len=info.max_model_len,
            default_sampling_params_json=json.dumps(defaults),
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Any
    ) -> vllm.GetServerInfoResponse:
        """Tell the state and the limits."""
        load = self._engine.load()
        return vllm.GetServerInfoResponse(
            active_requests=load.num_running + load.num_waiting,
            is_paused=self._engine.is_paused,
            uptime_seconds=time.monotonic() - self._began_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            block_size=self._engine.info.page_size,
            max_num_seqs=self._engine.config.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Any) -> vllm.GetLoadsResponse:
        """Tell the load of the only rank."""
        load, info, most = self._engine.load(), self._engine.info, self._engine.config.max_num_seqs
        told = vllm.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=load.pages_used * info.page_size,
            max_total_num_tokens=load.pages_total * info.page_size,
            token_usage=load.pages_used / load.pages_total if load.pages_total else 0.0,
            utilization=load.num_running / most,
            max_running_requests=most,
            num_waiting_uncached_tokens=load.waiting_prompt_tokens,
        )
        now = dt.datetime.now(dt.UTC).isoformat()
        loads = [] if request.dp_rank else [told]
        return vllm.GetLoadsResponse(timestamp=now, version=self._version, dp_rank_count=1, loads=loads)

    async def GetTokenizer(
        self, request: smg_common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[smg_common_pb2.GetTokenizerChunk]:
        """Send the files that a tokenizer is made of. Raises UnsupportedFeature if the model has none."""
        directory = self._engine.info.directory
        if directory is None or self._engine.text is None:
            raise UnsupportedFeature(["GetTokenizer"], "the model has no files of a tokenizer")
        archive = await self._serving.lanes.heavy(partial(tokenizer_archive, directory))
        digest = hashlib.sha256(archive).hexdigest()
        for at in range(0, len(archive), _PART_BYTES):
            part = archive[at : at + _PART_BYTES]
            is_last = at + _PART_BYTES >= len(archive)
            yield smg_common_pb2.GetTokenizerChunk(data=part, sha256=digest if is_last else "")


def tokenizer_archive(directory: Path) -> bytes:
    """Make a zip archive of the files of a checkpoint that a tokenizer is made of. The same files give the
    same bytes.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(directory.iterdir()):
            if path.is_file() and (path.name in _TOKENIZER_FILES or path.suffix in _TOKENIZER_SUFFIXES):
                file.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def _ids(request: vllm.AbortRequest) -> inference_pb2.AbortRequest:
    return inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=request.request_ids))


def add_vllm_service(servicer: object, server: grpc.aio.Server) -> None:
    """Register the service. `servicer` has its methods, or is a stand-in for one that has."""
    handlers = {}
    for method in SERVICE.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_registered_method_handlers(SERVICE.full_name, handlers)
