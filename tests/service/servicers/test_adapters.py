"""The RPCs of adapters, and requests that name one, on the fake engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from penstock.runtime.adapters.interface import AdapterTensors
from penstock.service.rpcs.interceptors import Undecoded
from penstock.service.servicers.adapters import Adapters
from penstock.v1 import adapters_pb2, control_pb2, inference_pb2, weights_pb2
from tests.service.adapters_rig import (
    CONFIG,
    NAME,
    TENSORS,
    TOTAL,
    begin,
    chunk,
    chunks,
    commit,
    on_disk,
    push,
    spec,
)
from tests.service.key_rig import CONTROL, INFER, as_, key, serving_keys
from tests.service.rig import Rig, collect, failure_of, fake, generate, serving, stream, until

A, B = NAME.format("A"), NAME.format("B")


def with_adapters(folder: Path | None = None, **options: Any) -> Any:
    return fake(max_adapters=2, adapter_dir=folder, **options)


async def load(rig: Rig, name: str, call: Any = None, **fields: Any) -> adapters_pb2.Adapter:
    request = adapters_pb2.LoadAdapterRequest(name=name, **fields)
    reply: adapters_pb2.LoadAdapterResponse = await rig.control.LoadAdapter(request, **(call or {}))
    return reply.adapter


async def names(rig: Rig, call: Any = None) -> list[str]:
    reply = await rig.control.ListAdapters(adapters_pb2.ListAdaptersRequest(), **(call or {}))
    return [one.name for one in reply.adapters]


async def unload(rig: Rig, name: str, call: Any = None) -> int:
    request = adapters_pb2.UnloadAdapterRequest(name=name)
    return int((await rig.control.UnloadAdapter(request, **(call or {}))).running_requests)


async def pin(rig: Rig, name: str, *, pinned: bool, call: Any = None) -> adapters_pb2.Adapter:
    request = adapters_pb2.PinAdapterRequest(name=name, pinned=pinned)
    reply: adapters_pb2.PinAdapterResponse = await rig.control.PinAdapter(request, **(call or {}))
    return reply.adapter


async def test_a_pushed_adapter_is_what_was_sent() -> None:
    async with serving(with_adapters()) as rig:
        began_s = time.monotonic()
        reply = await push(rig, [begin(pinned=True), *chunks(), commit()])
        assert 0 < reply.loaded_in.ToNanoseconds() / 1e9 < time.monotonic() - began_s
        listed = await rig.control.ListAdapters(adapters_pb2.ListAdaptersRequest())
    (taken,) = rig.engine.adapter_reader.read_from
    assert isinstance(taken, AdapterTensors)
    assert taken.config == {"peft_type": "LORA", "r": 4}
    assert [name for name, _ in taken.tensors] == [A, B]
    for name, array in taken.tensors:
        np.testing.assert_array_equal(array, TENSORS[name])
    assert reply.bytes_received == TOTAL == 256
    assert list(listed.adapters) == [reply.adapter]
    expected = adapters_pb2.Adapter(
        name="sql",
        state=adapters_pb2.ADAPTER_STATE_CACHED,
        rank=4,
        target_modules=["k_proj", "q_proj"],
        size_bytes=TOTAL + len(CONFIG),
        digest=reply.adapter.digest,
        pinned=True,
        source="pushed",
    )
    expected.last_used.CopyFrom(reply.adapter.last_used)
    (known,) = rig.engine.adapters.list()
    assert abs(reply.adapter.last_used.ToNanoseconds() / 1e9 - known.last_used_s) < 1e-3
    assert reply.adapter == expected


async def test_an_adapter_is_read_by_its_name_or_its_uri(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    on_disk(root, "sql"), on_disk(root / "deep", "law", "2")
    async with serving(with_adapters(root)) as rig:
        first = await load(rig, "sql")
        second = await load(rig, "v2", uri=f"file://{root}/deep/law", pinned=True)
        again = await load(rig, "sql")
        again.last_used.CopyFrom(first.last_used)
        assert (first.source, second.source) == (str(root / "sql"), str(root / "deep" / "law"))
        assert (first.pinned, second.pinned, again) == (False, True, first)
        assert await names(rig) == ["sql", "v2"]
        (root / "sql" / "content").write_text("changed")
        failure = await failure_of(load(rig, "sql"))
        assert (failure.code.name, failure.reason) == ("FAILED_PRECONDITION", "ADAPTER_EXISTS")
        assert (await load(rig, "sql", replace=True)).digest != first.digest


async def test_a_name_is_never_a_path(tmp_path: Path) -> None:
    root, outside = tmp_path / "adapters", on_disk(tmp_path, "outside")
    on_disk(root, "inside")
    os.symlink(outside, root / "link")
    async with serving(with_adapters(root)) as rig:
        for name in ("../outside", "a/b", "..", ".", ".hidden", "", "x" * 129, "a\\b", "a:b", 'a"b', "a\nb"):
            failure = await failure_of(load(rig, name))
            assert (failure.reason, list(failure.violations)) == ("INVALID_FIELD", ["name"]), name
            pushed = await failure_of(push(rig, [begin(name)]))
            assert (pushed.reason, list(pushed.violations)) == ("INVALID_FIELD", ["begin.name"]), name
        told = set[str]()
        uris = (f"{outside}", f"{root}/../outside", f"{root}", f"{root}/link", f"{root}/none", "/nowhere")
        for fields in [
            {"name": "none"},
            {"name": "é" * 128},  # 256 bytes, which no file can have
            *({"name": "x", "uri": f"file://{u}"} for u in uris),
        ]:
            failure = await failure_of(load(rig, **fields))
            assert (failure.reason, list(failure.violations)) == ("INVALID_FIELD", [list(fields)[-1]]), fields
            told.add(*failure.violations.values())
        assert len(told) == 1, "what is elsewhere is refused alike, whether it exists or not"
        assert (await failure_of(load(rig, "x", uri="s3://bucket/x"))).info.metadata["field"] == "uri"
        assert await names(rig) == []
        await load(rig, "link")  # which only the operator can have made


@pytest.mark.parametrize(
    ("messages", "reason", "named"),
    [
        ([begin(), *chunks()], "INVALID_FIELD", "step"),
        ([*chunks()], "INVALID_FIELD", "step"),
        ([begin(), begin()], "INVALID_FIELD", "step"),
        ([begin(), *chunks(), commit(), commit()], "INVALID_FIELD", "step"),
        ([begin(config_json="")], "INVALID_FIELD", "begin.config_json"),
        ([begin(config_json="{")], "INVALID_FIELD", "begin.config_json"),
        ([begin(config_json="[]")], "INVALID_FIELD", "begin.config_json"),
        ([begin(config_json="[" * 50_000)], "INVALID_FIELD", "begin.config_json"),
        ([begin(specs=[])], "INVALID_FIELD", "begin.manifest.tensors"),
        ([begin(specs=[spec(A), spec(A)])], "INVALID_FIELD", "begin.manifest.tensors"),
        ([begin(specs=[spec(A, shape=[2**20, 2**20])])], "INVALID_FIELD", "begin.manifest.tensors"),
        ([begin(specs=[spec(A, dtype=weights_pb2.DATA_TYPE_I4)])], "INVALID_TENSORS", A),
        ([begin(specs=[spec(A, sha256=b"x")])], "INVALID_FIELD", "begin.manifest.tensors[0].sha256"),
        ([begin(), chunk(2, 0, b"x")], "INVALID_FIELD", "chunk.tensor_index"),
        ([begin(), chunk(0, 1, b"x")], "INVALID_FIELD", "chunk.offset"),
        ([begin(), chunk(0, 0, b"")], "INVALID_FIELD", "chunk.data"),
        ([begin(), chunk(0, 0, bytes(129))], "INVALID_TENSORS", A),
        ([begin(), *chunks()[:-1], commit()], "INVALID_TENSORS", B),
        ([begin(), *chunks(), commit(TOTAL - 1)], "INVALID_FIELD", "commit.total_bytes"),
        ([begin(specs=[spec(A, crc32c=1), spec(B)]), *chunks(), commit()], "CHECKSUM_MISMATCH", A),
        ([begin(specs=[spec(A), spec(B, sha256=bytes(32))]), *chunks(), commit()], "CHECKSUM_MISMATCH", B),
        ([begin(config_json='{"r": "x"}')], "ADAPTER_FORMAT", "r"),  # before anything of a size is sent
    ],
)
async def test_a_push_that_is_wrong_changes_nothing(messages: Any, reason: str, named: str) -> None:
    async with serving(with_adapters()) as rig:
        failure = await failure_of(push(rig, messages))
        assert failure.reason == reason, failure.message
        if reason == "INVALID_FIELD":
            assert list(failure.violations) == [named]
        elif reason == "ADAPTER_FORMAT":
            assert failure.info.metadata["field"] == named
        else:
            assert list(failure.tensors) == [named]
        assert await names(rig) == []
        await push(rig, [begin(), *chunks(), commit()])  # its place is free


async def test_a_name_that_is_taken_is_pushed_again_only_to_replace_it() -> None:
    other = '{"r": 8}'
    async with serving(with_adapters()) as rig:
        first = await push(rig, [begin(), *chunks(), commit()])
        again = (await push(rig, [begin(), *chunks(), commit()])).adapter
        again.last_used.CopyFrom(first.adapter.last_used)
        assert again == first.adapter
        failure = await failure_of(push(rig, [begin(config_json=other), *chunks(), commit()]))
        assert (failure.code.name, failure.reason) == ("FAILED_PRECONDITION", "ADAPTER_EXISTS")
        second = await push(rig, [begin(config_json=other, replace=True), *chunks(), commit()])
        assert (first.adapter.rank, second.adapter.rank) == (4, 8)


async def test_a_push_that_breaks_off_leaves_its_place() -> None:
    """Two adapters are taken at once. A third one is refused until one of them is gone, however often one
    has gone before.
    """

    async def forever(rig: Rig) -> Any:
        call = rig.control.PushAdapter()
        await call.write(begin())
        await call.write(chunks()[0])
        return call

    async with serving(with_adapters()) as rig:

        async def until_refused(*, is_full: bool) -> None:
            """Push until both places are taken, or until one is free."""
            async with asyncio.timeout(20):
                while True:
                    try:
                        await push(rig, [begin(), *chunks(), commit()])
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017 -- or none
                        if is_full:
                            return
                    else:
                        if not is_full:
                            return

        calls = [await forever(rig)]
        for _ in range(5):  # some of these come after it
            await push(rig, [begin(), *chunks(), commit()])
        calls.append(await forever(rig))
        await until_refused(is_full=True)
        calls.pop().cancel()
        await until_refused(is_full=False)
        calls.append(await forever(rig))
        await until_refused(is_full=True)
        for call in calls:
            call.cancel()
        assert await names(rig) == ["sql"]


async def test_a_push_whose_client_is_gone_when_it_ends_loads_nothing() -> None:
    """For gRPC a lost connection ends the stream of messages, too. This is without gRPC: all messages are
    there, and the client is not.
    """

    class Gone(Exception):
        """What is raised where nothing can be sent to the client any more."""

    async def arrived() -> AsyncIterator[Undecoded]:
        for message in [begin(), *chunks(), commit()]:
            parse = adapters_pb2.PushAdapterRequest.FromString
            yield Undecoded("PushAdapter", parse, message.SerializeToString())

    async def confirm() -> None:
        raise Gone

    async with serving(with_adapters()) as rig:
        with pytest.raises(Gone):
            await Adapters(rig.serving, max_chunk_bytes=1 << 20).push(arrived(), confirm)
        assert await names(rig) == []


async def test_requests_reach_the_engine_with_their_adapter(tmp_path: Path) -> None:
    on_disk(tmp_path, "sql")
    engine = with_adapters(tmp_path)
    async with serving(engine) as rig:
        await load(rig, "sql")
        await rig.inference.Generate(generate("a", adapter="sql", sampling={"n": 2}))
        await collect(rig.inference.Stream(stream("a", adapter="sql")))
        inputs = [inference_pb2.EmbedInput(text="a")]
        await rig.inference.Embed(inference_pb2.EmbedRequest(inputs=inputs, adapter="sql"))
        part = inference_pb2.Continuation(text="b")
        await rig.inference.Score(inference_pb2.ScoreRequest(prompt="a", continuations=[part], adapter="sql"))
        await rig.inference.Rerank(inference_pb2.RerankRequest(query="a", documents=["b"], adapter="sql"))
        await rig.inference.Generate(generate("a"))
    assert [request.adapter for request in engine.seen] == ["sql"] * 7 + [None]


async def test_all_outputs_of_a_call_have_what_the_name_meant_when_it_came(tmp_path: Path) -> None:
    """The engine does not look it up again: it might read a disk on the event loop, or find other content."""
    on_disk(tmp_path, "sql")
    engine = with_adapters(tmp_path)
    async with serving(engine) as rig:
        await load(rig, "sql")
        inputs = [inference_pb2.EmbedInput(text=text) for text in ("a", "b")]
        await rig.inference.Embed(inference_pb2.EmbedRequest(inputs=inputs, adapter="sql"))
        await rig.inference.Generate(generate("a", adapter="sql", sampling={"n": 2}))
    weights = [request.adapter_weights for request in engine.seen]
    assert None not in weights
    assert [len({id(one) for one in weights[call : call + 2]}) for call in (0, 2)] == [1, 1]


async def test_the_first_request_that_names_an_adapter_of_the_directory_loads_it(tmp_path: Path) -> None:
    on_disk(tmp_path, "sql")
    async with serving(with_adapters(tmp_path)) as rig:
        reply = await rig.inference.Generate(generate("a", adapter="sql"))
        assert reply.model == "sql"
        assert await names(rig) == ["sql"]
        for name in ("../sql", "other/model", ".", "x" * 200, "é" * 128):
            failure = await failure_of(rig.inference.Generate(generate("a", adapter=name)))
            assert failure.reason == "UNKNOWN_ADAPTER", name


async def test_an_adapter_that_is_not_there_is_refused_before_anything_is_made() -> None:
    async with serving(with_adapters()) as rig:
        for call in (
            rig.inference.Generate(generate("x" * 1000, adapter="none")),
            rig.inference.Stream(stream("a", adapter="none")).read(),
            rig.control.UnloadAdapter(adapters_pb2.UnloadAdapterRequest(name="none")),
            rig.control.PinAdapter(adapters_pb2.PinAdapterRequest(name="none")),
        ):
            failure = await failure_of(call)
            assert (failure.code.name, failure.reason) == ("NOT_FOUND", "UNKNOWN_ADAPTER")
            assert failure.info.metadata["adapter"] == "none"
        assert rig.engine.seen == []


async def test_a_server_without_adapters_says_so() -> None:
    async with serving() as rig:
        for failure in (
            await failure_of(rig.inference.Generate(generate("a", adapter="x"))),
            await failure_of(load(rig, "x")),
            await failure_of(push(rig, [begin()])),
            await failure_of(unload(rig, "x")),
            await failure_of(pin(rig, "x", pinned=True)),
        ):
            assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
            assert "--max-adapters" in failure.message
        assert await names(rig) == []
        info = await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert (info.max_adapters, info.max_cached_adapters, info.max_adapter_rank) == (0, 0, 0)
    async with serving(with_adapters()) as rig:
        failure = await failure_of(load(rig, "x"))
        assert (failure.reason, "--adapter-dir" in failure.message) == ("UNSUPPORTED_FEATURE", True)


async def test_what_is_configured_and_loaded_is_told(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        on_disk(tmp_path, name, content=name)
    options = {"max_cached_adapters": 7, "max_adapter_rank": 32, "adapter_experts": True}
    async with serving(with_adapters(tmp_path, **options)) as rig:
        for name in ("a", "b", "c"):
            await load(rig, name)
        for name in ("a", "b"):
            await rig.inference.Generate(generate("x", adapter=name))
        server = await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert (server.max_adapters, server.max_cached_adapters, server.max_adapter_rank) == (2, 7, 32)
        assert server.adapter_experts
        model = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_ADAPTERS in model.features
        assert (await rig.control.GetLoad(control_pb2.GetLoadRequest())).loaded_adapters == 2


async def test_metrics_tell_of_the_adapters_in_memory(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        on_disk(tmp_path, name, content=name)
    async with serving(with_adapters(tmp_path)) as rig:

        def shown(name: str) -> dict[str, float]:
            metrics = rig.server.metrics.registry.snapshot().metrics
            (found,) = [one for one in metrics if one.instrument.name == name]
            return {labels[0]: cast("float", value) for labels, value in found.points.items()}

        for name in ("a", "b", "c"):
            await load(rig, name)
        for name in ("a", "c", "c"):
            await rig.inference.Generate(generate("x", adapter=name))
        assert shown("penstock.adapters") == {"loading": 0, "cached": 1, "loaded": 2}
        assert shown("penstock.adapter.requests") == {"a": 1, "b": 0, "c": 2}
        assert shown("penstock.adapter.evictions") == {"device": 0, "host": 0}
        await rig.inference.Generate(generate("x", adapter="b"))
        assert shown("penstock.adapter.evictions") == {"device": 1, "host": 0}
        await unload(rig, "c")
        assert shown("penstock.adapter.requests") == {"a": 1, "b": 1}


async def test_an_adapter_leaves_under_running_streams(tmp_path: Path) -> None:
    on_disk(tmp_path, "sql")
    engine = with_adapters(tmp_path, hold=True, max_num_seqs=4)
    async with serving(engine) as rig:
        await load(rig, "sql")
        shutil.rmtree(tmp_path / "sql")  # a request would load it again
        prompts = [stream(f"a{i}", adapter="sql") for i in range(4)]
        running = [asyncio.create_task(collect(rig.inference.Stream(one))) for one in prompts]
        await until(lambda: len(engine.seen) == 4)
        assert await unload(rig, "sql") == 4
        assert await names(rig) == []
        assert (await failure_of(unload(rig, "sql"))).reason == "UNKNOWN_ADAPTER"
        assert (
            await failure_of(rig.inference.Generate(generate("a", adapter="sql")))
        ).code.name == "NOT_FOUND"
        engine.release()
        await asyncio.gather(*running)


async def test_an_adapter_is_pinned_and_let_go(tmp_path: Path) -> None:
    on_disk(tmp_path, "sql")
    async with serving(with_adapters(tmp_path)) as rig:
        await load(rig, "sql")
        assert (await pin(rig, "sql", pinned=True)).pinned
        assert not (await pin(rig, "sql", pinned=False)).pinned


async def test_a_key_may_be_limited_to_adapters(tmp_path: Path) -> None:
    """It uses these and the model without one, and learns of no other. With the role control it changes no
    other.
    """
    file, root = tmp_path / "keys.json", tmp_path / "adapters"
    on_disk(root, "sql"), on_disk(root, "law")
    entries = (
        key("boss", CONTROL),
        key("tenant", adapters=("sql",)),
        key("trainer", INFER | CONTROL, adapters=("sql",)),
        key("user"),
    )
    async with serving_keys(file, *entries, engine=with_adapters(root)) as rig:
        await load(rig, "sql", as_("trainer")), await load(rig, "law", as_("boss"))
        assert await names(rig, as_("tenant")) == await names(rig, as_("trainer")) == ["sql"]
        assert await names(rig, as_("user")) == ["law", "sql"]
        request = adapters_pb2.ListAdaptersRequest()
        assert not (await rig.control.ListAdapters(request, **as_("user"))).adapters[0].source
        for adapter in ("", "sql"):
            await rig.inference.Generate(generate("a", adapter=adapter), **as_("tenant"))
        refused = [
            rig.inference.Generate(generate("a", adapter=one), **as_("tenant")) for one in ("law", "none")
        ]
        refused += [
            load(rig, "law", as_("trainer")),
            load(rig, "none", as_("trainer")),  # it does not learn that there is none
            *(
                load(rig, "sql", as_("trainer"), uri=f"file://{root}/{one}", replace=True)
                for one in ("law", "none", "sql/../law")
            ),
            unload(rig, "law", as_("trainer")),
            pin(rig, "law", pinned=True, call=as_("trainer")),
            push(rig, [begin("law")], **as_("trainer")),
            load(rig, "sql", as_("tenant")),
            unload(rig, "sql", as_("user")),
        ]
        for call in refused:
            failure = await failure_of(call)
            assert (failure.code.name, failure.reason) == ("PERMISSION_DENIED", "FORBIDDEN")
        assert await names(rig, as_("boss")) == ["law", "sql"]
        own = await load(rig, "sql", as_("trainer"), uri=f"file://{root}/sql")
        assert own.source == str(root / "sql")
