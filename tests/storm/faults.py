"""The faults. Each is one misdeed or accident of one peer: it does its harm and is gone, or holds on for a
while, and returns a word for how it ended. The server may answer, or refuse with a typed error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import sys
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from grpc_health.v1 import health_pb2

from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.h2peer import PREFACE, SETTINGS, Peer, frame
from tests.storm.attack import Attack, ended
from tests.storm.half_updates import half_update

HOLD_S = 3.0
"""Seconds that faults hold on, if they do: longer than the stall limit."""
STREAM = "/penstock.v1.InferenceService/Stream"
GENERATE = "/penstock.v1.InferenceService/Generate"
HUGE = 200_000


async def cancel(attack: Attack) -> str:
    call = attack.inference.Stream(attack.stream(), metadata=attack.bearer())
    asyncio.get_running_loop().call_later(attack.rng.expovariate(5), call.cancel)
    how = await ended(call)
    # gRPC raises its own status instead of CancelledError if nobody was reading at that moment.
    return "cancelled by us" if "Locally cancelled by application" in how else how


async def deadline(attack: Attack) -> str:
    """Make a call with a short deadline. Its status is gRPC's own, made on this side."""
    request, limit = attack.stream(), attack.rng.uniform(0.0005, 0.3)
    how = await ended(attack.inference.Stream(request, metadata=attack.bearer(), timeout=limit))
    return how.removeprefix("bare ").split(":")[0]


async def stall(attack: Attack) -> str:
    """Streams and unary calls of one connection whose windows stay shut."""
    async with Peer(attack.address) as peer:
        for method in (STREAM, GENERATE):
            request = attack.stream()
            data = request.SerializeToString()
            await peer.call(method, data, metadata=attack.raw_bearer())
        await asyncio.sleep(HOLD_S * attack.rng.random() * 2)
    return "gone"


async def watch(attack: Attack) -> str:
    """Watches of health, which need no key."""
    async with Peer(attack.address) as peer:
        message = health_pb2.HealthCheckRequest().SerializeToString()
        for _ in range(attack.rng.randint(1, 20)):
            await peer.call("/grpc.health.v1.Health/Watch", message)
        await asyncio.sleep(HOLD_S * attack.rng.random())
    return "gone"


async def vanish(attack: Attack) -> str:
    """Reset the connection in the middle of a message or of an answer."""
    peer = Peer(attack.address, initial_window=attack.rng.choice((0, 100, 60_000)))
    await peer.__aenter__()
    await peer.call(STREAM, attack.stream().SerializeToString(), metadata=attack.raw_bearer())
    await asyncio.sleep(attack.rng.expovariate(10))
    raw = peer.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await peer.close()
    return "reset"


KILLED = """
import sys, grpc
from penstock.v1 import inference_pb2, inference_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])
stub = inference_pb2_grpc.InferenceServiceStub(channel)
request = inference_pb2.StreamRequest(prompt="The cat")
request.stopping.max_tokens = 200
for message in stub.Stream(request, metadata=[("authorization", sys.argv[2])]):
    print("got", flush=True)
"""


async def kill(attack: Attack) -> str:
    """Kill a real client with SIGKILL while it reads."""
    command = [sys.executable, "-c", KILLED, attack.address, attack.bearer()[0][1]]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        began = await process.stdout.readline()
    finally:  # also where the storm ends meanwhile
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
        await process.communicate()
    return "killed" if began else "refused before it read anything"


async def garbage(attack: Attack) -> str:
    """Bytes that are not HTTP/2, or cease to be."""
    host, _, port = attack.address.rpartition(":")
    rng = attack.rng
    starts = (
        b"",
        PREFACE,
        PREFACE + frame(SETTINGS, 0, 0),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        PREFACE
        + frame(SETTINGS, 0, 0)
        + frame(rng.randrange(12), rng.randrange(256), rng.randrange(5), b"x"),
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(rng.choice(starts) + rng.randbytes(rng.randint(0, 2000)))
        await writer.drain()
        async with asyncio.timeout(rng.random()):
            while await reader.read(65536):
                pass
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()
    return "gone"


async def undecodable(attack: Attack) -> str:
    """Send a message that cannot be parsed, or a path that is not UTF-8, which no client of gRPC would
    send.
    """
    if attack.rng.random() < 0.3:
        async with Peer(attack.address) as peer:
            path = attack.rng.choice((b"/\xff", b"/penstock.v1.InferenceService/Gen\xc3", b"\xff"))
            stream = await peer.call(path, b"x")
            async with asyncio.timeout(60):
                await peer.until(lambda: peer.ended(stream))
        return "no such path"
    method = attack.rng.choice((GENERATE, "/penstock.v1.ControlService/Tokenize", "/penstock.v1.Nothing/At"))
    call: Any = attack.rng.choice(attack.channels).unary_unary(method)
    how = await ended(call(attack.rng.randbytes(attack.rng.randint(1, 300)), metadata=attack.bearer()))
    return "no such method" if how.startswith("bare UNIMPLEMENTED") else how


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


BOMBS: Mapping[str, Callable[[], inference_pb2.StreamRequest]] = {
    "bad_words": lambda: inference_pb2.StreamRequest(
        prompt="x", sampling=types_pb2.SamplingParams(bad_words=[""] * HUGE)
    ),
    "logit_bias": lambda: inference_pb2.StreamRequest(
        prompt="x", sampling=types_pb2.SamplingParams(logit_bias={10**8 + i: 1.0 for i in range(HUGE // 4)})
    ),
    "prompt_token_ids": lambda: inference_pb2.StreamRequest(
        prompt_token_ids=types_pb2.TokenIds(ids=[1] * (4 * HUGE)),
        context=types_pb2.ContextOptions(truncation=types_pb2.TRUNCATION_LEFT),
    ),
    "text": lambda: inference_pb2.StreamRequest(
        prompt="the cat " * (HUGE // 2),
        context=types_pb2.ContextOptions(truncation=types_pb2.TRUNCATION_LEFT),
    ),
    "allowed_token_ids": lambda: inference_pb2.StreamRequest(
        prompt="x", sampling=types_pb2.SamplingParams(allowed_token_ids=[5] * HUGE)
    ),
    "json": lambda: inference_pb2.StreamRequest(
        chat=types_pb2.ChatPrompt(
            messages=[types_pb2.ChatMessage(role="user", content="x")],
            template_options_json=json.dumps({"a": json.loads(_nested(500))}) + " " * HUGE,
        )
    ),
    "outputs": lambda: inference_pb2.StreamRequest(
        prompt="x",
        sampling=types_pb2.SamplingParams(n=128, logit_bias=dict.fromkeys(range(300), -1.0)),
        stopping=types_pb2.StoppingParams(max_tokens=2),
    ),
}


async def bomb(attack: Attack) -> str:
    name = attack.rng.choice(tuple(BOMBS))
    call = attack.inference.Stream(BOMBS[name](), metadata=attack.bearer(), timeout=60)
    return f"{name}: {await ended(call)}"


async def compressed(attack: Attack) -> str:
    """Send a small message that inflates to 64 MiB."""
    body = zlib.compress(bytes(64 << 20), wbits=31)
    async with Peer(attack.address, initial_window=1 << 16) as peer:
        data = struct.pack(">BI", 1, len(body)) + body
        stream = await peer.call(
            GENERATE, None, metadata=[*attack.raw_bearer(), ("grpc-encoding", b"gzip")], end=False
        )
        await peer.send(frame(0, 0, stream, data[:16000]))
        for at in range(16000, len(data), 16000):
            await peer.send(frame(0, 0, stream, data[at : at + 16000]))
        await peer.send(frame(0, 1, stream))
        await asyncio.sleep(0.5)
    return "sent"


GRAMMARS = (
    'start: s\ns: s s s | s s | t\nt: /[a-z]/ | /[a-y]/ | /[ a-z]/ | ""',
    "start: /(a|aa|aaa|aaaa)*b{1,400}/",
    "start: a\na: a a | /[a-z ]*/",
)


async def grammar(attack: Attack, source: str | None = None) -> str:
    """Send a grammar: this one, or one of GRAMMARS."""
    # The comment makes it a grammar that the server has not seen.
    source = f"{source or attack.rng.choice(GRAMMARS)}\n// {attack.rng.getrandbits(64):x}\n"
    request = attack.stream(constraint=types_pb2.Constraint(ebnf=source))
    return await ended(attack.inference.Stream(request, metadata=attack.bearer(), timeout=30))


TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 999999999 }}",
    "{{ ''.__class__.__mro__ }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages[0].content }}",
)


async def template(attack: Attack, source: str | None = None) -> str:
    """Send a template: this one, or one of TEMPLATES."""
    request = inference_pb2.StreamRequest(
        chat=types_pb2.ChatPrompt(
            messages=[types_pb2.ChatMessage(role="user", content="hello")],
            chat_template=source or attack.rng.choice(TEMPLATES),
        ),
        stopping=types_pb2.StoppingParams(max_tokens=5),
    )
    return await ended(attack.inference.Stream(request, metadata=attack.bearer(), timeout=60))


async def burst(attack: Attack) -> str:
    """Many calls at the same moment, of a kind that costs little each."""
    count = attack.rng.randint(50, 600)
    one = inference_pb2.GenerateRequest(prompt="x", stopping=types_pb2.StoppingParams(max_tokens=1))
    stub = attack.inference
    calls = [stub.Generate(one, metadata=attack.bearer(), timeout=60) for _ in range(count)]
    found = {how.split(":")[0] for how in await asyncio.gather(*map(ended, calls))}
    return f"{', '.join(sorted(found))}"


async def bad_key(attack: Attack) -> str:
    """Make calls with expired, revoked, unknown, malformed and missing keys."""
    rng = attack.rng
    metadata: Any = rng.choice(
        (
            attack.bearer("expired"),
            attack.bearer("revoked"),
            (("authorization", f"Bearer psk_x_{rng.getrandbits(256):x}"),),
            (("authorization", "Basic eHh4"),),
            (("authorization", "Bearer " + "x" * 5000),),
            (),
        )
    )
    return await ended(attack.inference.Stream(attack.stream(), metadata=metadata))


async def not_allowed(attack: Attack) -> str:
    """Try what only the role control may do, and aborts of other callers' requests."""
    rng = attack.rng
    if rng.random() < 0.5:
        call = attack.control.FlushCache(control_pb2.FlushCacheRequest(), metadata=attack.bearer())
        return f"flush: {await ended(call)}"
    # `all` and a prefix refer to the caller's own requests.
    target: dict[str, Any] = rng.choice(
        ({"all": {}}, {"request_id_prefix": "a"}, {"request_ids": {"ids": ["r", "s"]}})
    )
    call = attack.inference.Abort(inference_pb2.AbortRequest(**target), metadata=attack.bearer())
    return f"abort: {await ended(call)}"


FAULTS: Mapping[Callable[[Attack], Awaitable[str]], int] = {
    cancel: 30,
    deadline: 20,
    vanish: 14,
    bad_key: 12,
    garbage: 10,
    undecodable: 8,
    not_allowed: 6,
    stall: 3,
    watch: 3,
    bomb: 3,
    grammar: 2,
    template: 2,
    burst: 1,
    compressed: 1,
    half_update: 3,
    kill: 1,
}
"""How often each fault comes, relative to the others."""
