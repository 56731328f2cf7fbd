"""Measures how long one request keeps a server's event loop, and so everybody else, waiting.

    python -m bench.loop_hold                      # this tree, the demo model
    python -m bench.loop_hold --tree ../other      # another commit's worktree

Each message of `rows` is sent to a server in its own process, which watches its event loop: how long every
other stream, health check and RPC had to wait. On a busy machine a part of that time belongs to other
processes; a second column leaves out the time in which the server did not run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
    weights_pb2,
)

_ROOTS = ("protos", "service", "runtime", "clients/python")
_READY = "penstock: ready on "
_CALL_S = 300.0
_MIB = 2**20
_BYTES = {weights_pb2.DATA_TYPE_F32: 4, weights_pb2.DATA_TYPE_BF16: 2, weights_pb2.DATA_TYPE_F16: 2}


@dataclass(frozen=True)
class Row:
    """One message."""

    name: str
    make: Callable[[], Any]


class Upload:
    """A weight update that sets every tensor of the served model to zeros, in chunks of the largest size.
    Each time that it is iterated over it has another id, so that it is an update again.
    """

    def __init__(self, tensors: Sequence[weights_pb2.TensorSpec], chunk_bytes: int) -> None:
        self._tensors, self._chunk_bytes = tensors, chunk_bytes
        self._sizes = [_BYTES[one.dtype] * math.prod(one.shape) for one in tensors]

    def ByteSize(self) -> int:
        return sum(self._sizes)

    def __iter__(self) -> Iterator[weights_pb2.UpdateWeightsRequest]:
        begin = weights_pb2.UpdateWeightsBegin(update_id=uuid.uuid4().hex, version_label="zeros")
        begin.manifest.tensors.extend(self._tensors)
        yield weights_pb2.UpdateWeightsRequest(begin=begin)
        for index, size in enumerate(self._sizes):
            for at in range(0, size, self._chunk_bytes):
                data = bytes(min(self._chunk_bytes, size - at))
                chunk = weights_pb2.TensorChunk(tensor_index=index, offset=at, data=data)
                yield weights_pb2.UpdateWeightsRequest(chunk=chunk)
        commit = weights_pb2.UpdateWeightsCommit(total_bytes=self.ByteSize())
        yield weights_pb2.UpdateWeightsRequest(commit=commit)


class Server:
    """A watched server in its own process."""

    def __init__(self, tree: Path, arguments: Sequence[str], log: Path) -> None:
        """Start the server; its log goes to `log`. Raises RuntimeError if it does not come up."""
        script = Path(__file__).with_name("hold_server.py")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / root) for root in _ROOTS)}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(script), "serve", *arguments, "--port", "0"],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        line = self._line_with(_READY)
        if line is None:
            raise RuntimeError(f"the server ended with {self._process.wait()}; see {log}")
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(line.removeprefix(_READY).strip(), options=options)
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self.control: Any = control_pb2_grpc.ControlServiceStub(self._channel)
        self.info = self.control.GetModelInfo(control_pb2.GetModelInfoRequest(include_tensors=True))
        self.chunk_bytes = self.control.GetServerInfo(control_pb2.GetServerInfoRequest()).max_chunk_bytes

    def _line_with(self, start: str) -> str | None:
        assert self._process.stdout is not None
        return next((line for line in self._process.stdout if line.startswith(start)), None)

    def longest(self) -> dict[str, float]:
        """Return the longest times since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told: dict[str, float] = json.loads(self._line_with("{") or "{}")
        return told

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits."""
        while True:
            load = self.control.GetLoad(control_pb2.GetLoadRequest(), timeout=_CALL_S)
            if not (load.running_requests or load.queued_requests):
                return
            time.sleep(0.05)

    def send(self, request: Any) -> str:
        """Send the request and return "OK" or the reason of the error."""
        method = {
            Upload: lambda upload, **options: self.inference.UpdateWeights(iter(upload), **options),
            inference_pb2.GenerateRequest: self.inference.Generate,
            inference_pb2.AbortRequest: self.inference.Abort,
            control_pb2.TokenizeRequest: self.control.Tokenize,
            control_pb2.DetokenizeRequest: self.control.Detokenize,
        }[type(request)]
        try:
            method(request, timeout=_CALL_S)
        except grpc.RpcError as error:
            return _reason(error)
        return "OK"

    def close(self) -> None:
        self._channel.close()
        self._process.terminate()
        self._process.wait(60)


def _reason(error: Any) -> str:
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return str(info.reason)
    return str(error.code().name)


def rows(info: Any, chunk_bytes: int) -> Iterator[Row]:
    """Return messages that held the loop for long once, and the largest of their kinds that are accepted."""
    vocab, context = info.vocab_size, info.max_context_tokens
    left = types_pb2.ContextOptions(truncation=types_pb2.TRUNCATION_LEFT)
    one = types_pb2.StoppingParams(max_tokens=1)

    def ask(prompt: str | None = "a", **fields: Any) -> inference_pb2.GenerateRequest:
        given = (
            {"stopping": one, **fields} if prompt is None else {"prompt": prompt, "stopping": one, **fields}
        )
        return inference_pb2.GenerateRequest(**given)

    def sampled(**fields: Any) -> inference_pb2.GenerateRequest:
        return ask(sampling=types_pb2.SamplingParams(**fields))

    def ids(count: int) -> types_pb2.TokenIds:
        return types_pb2.TokenIds(ids=[5] * count)

    def chat(text: str = "a", turns: int = 1, **fields: Any) -> inference_pb2.GenerateRequest:
        messages = [types_pb2.ChatMessage(role="user", content=text) for _ in range(turns)]
        return ask(None, chat=types_pb2.ChatPrompt(messages=messages, **fields), context=left)

    def lists(count: int) -> str:
        return '{"a": [' + "[]," * (count - 1) + "[]]}"

    yield Row("a short prompt", ask)
    yield Row("1 M empty bad words", lambda: sampled(bad_words=[""] * 10**6))
    yield Row("3.5 M empty bad words", lambda: sampled(bad_words=[""] * (7 * 10**6 // 2)))
    yield Row("0.5 M unknown biases", lambda: sampled(logit_bias={vocab + i: 1.0 for i in range(500_000)}))
    yield Row("5 M allowed ids", lambda: sampled(allowed_token_ids=[5] * (5 * 10**6)))
    yield Row("20 M ids, to be cut", lambda: ask(None, prompt_token_ids=ids(20 * 10**6), context=left))
    yield Row("7 M ids, to be cut", lambda: ask(None, prompt_token_ids=ids(7 * 10**6), context=left))
    most = max(8 * context, 65_536)
    yield Row(f"{most:,} ids, to be cut", lambda: ask(None, prompt_token_ids=ids(most), context=left))
    yield Row("20 MB of nested lists", lambda: chat(template_options_json=lists(6_600_000)))
    yield Row("1 MB of nested lists", lambda: chat(template_options_json=lists(330_000)))
    yield Row("24,000 nested lists", lambda: chat(template_options_json=lists(24_000)))
    yield Row("3.5 M empty turns", lambda: chat("", 10_000 * 350))
    yield Row("10,000 turns", lambda: chat("a", 10_000))
    yield Row("16 MB of words, to be cut", lambda: ask("word " * (16 * _MIB // 5), context=left))
    yield Row("4 MB of words, to be cut", lambda: ask("word " * (4 * _MIB // 5), context=left))
    yield Row("500 kB of words, to be cut", lambda: ask("word " * 100_000, context=left))
    whole = dict.fromkeys(range(vocab), 0.5)
    yield Row("a bias for every token", lambda: sampled(logit_bias=whole))
    yield Row("the same, 128 outputs", lambda: sampled(logit_bias=whole, n=128))
    words = [f"word{i}" for i in range(1000)]
    yield Row("1,000 bad words, 128 outputs", lambda: sampled(bad_words=words, n=128))
    long = ids(context - 2)
    yield Row("a whole context, 128 outputs", lambda: ask(
        None, prompt_token_ids=long, sampling=types_pb2.SamplingParams(n=128)))  # fmt: skip
    yield Row("log-probabilities of a whole context, 20 each", lambda: ask(
        None, prompt_token_ids=long, output=types_pb2.OutputOptions(prompt_logprobs=20)))  # fmt: skip
    yield Row("10,000 ids to abort", lambda: inference_pb2.AbortRequest(
        request_ids=inference_pb2.RequestIds(ids=[f"request-{i}" for i in range(10_000)])))  # fmt: skip
    yield Row("tokenize 500 kB", lambda: control_pb2.TokenizeRequest(text="word " * 100_000))
    yield Row("detokenize a whole context", lambda: control_pb2.DetokenizeRequest(token_ids=long.ids))
    yield Row("a weight update", lambda: Upload(info.tensors, chunk_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="demo", help='default: "%(default)s"')
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="default: this one")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s; the median counts")
    parser.add_argument("--only", default="", help="rows whose names hold this")
    parser.add_argument("--serve", action="append", default=[], metavar="ARGUMENT", help="of penstock serve")
    parser.add_argument("--log", type=Path, default=Path("bench/out/loop_hold.log"))
    options = parser.parse_args()
    server = Server(options.tree.resolve(), [options.checkpoint, *options.serve], options.log)
    columns = ("message", "bytes", "answer", "s", "event loop, ms", "of it at work, ms", "GetLoad, ms")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    try:
        for row in rows(server.info, server.chunk_bytes):
            if options.only in row.name:
                print(_measured(server, row, options.repeats), flush=True)
    finally:
        server.close()


def _measured(server: Server, row: Row, repeats: int) -> str:
    request = row.make()
    seconds: list[float] = []
    told: list[dict[str, float]] = []
    for _ in range(repeats):
        server.wait_until_idle()
        time.sleep(0.2)
        server.longest()
        before = time.perf_counter()
        answer = server.send(request)
        seconds.append(time.perf_counter() - before)
        server.wait_until_idle()
        told.append(server.longest())
    times = [statistics.median(one[name] for one in told) for name in ("loop_ms", "busy_ms", "load_ms")]
    figures = " | ".join(f"{ms:.1f}" for ms in times)
    taken = statistics.median(seconds)
    return f"| {row.name} | {request.ByteSize():,} | {answer} | {taken:.2f} | {figures} |"


if __name__ == "__main__":
    main()
