"""Leader and followers of a group, over a real server with a fake engine: facts are compared, calls come in
order and whole, and whoever is lost ends the group on both sides.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.runtime.errors import ConfigError, GroupEnded, WeightsError
from penstock.runtime.following.interface import (
    Call,
    GroupOptions,
    Kind,
    Piece,
    Prepared,
    Taken,
    UpdateBegin,
    UpdateEnd,
    UpdateOver,
    UpdateRecord,
    differences,
)
from penstock.runtime.loop.interface import Pulse
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import Staging
from penstock.service.access.key_file import KeyEntry
from penstock.service.group import group_pb2
from penstock.service.group.leader import SERVICE, GroupLeader
from penstock.service.group.link import FollowerLink
from penstock.service.group.messages import call_bytes, call_of, record_of, update_bytes
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.threads.lanes import in_thread
from tests.service.key_rig import CONTROL, INFER, as_, key, serving_keys, write
from tests.service.rig import WAIT_S, Rig, failure_of, fake, generate, serving, until
from tests.service.tls_rig import CA, CERTS, listening

FACTS = {"page_size": "64", "the version of jax": "0.10.2"}
MIB = 1 << 20
SIZES = {"the pages of the KV cache": "256"}


def options(process_id: int = 0, processes: int = 2, timeout_s: float = 30.0) -> GroupOptions:
    return GroupOptions(
        processes=processes, process_id=process_id, coordinator="127.0.0.1:1", group_timeout_s=timeout_s
    )


def never(error: GroupEnded) -> None:
    """In place of the end of the process, which comes only after the test."""


class Follower:
    """A follower whose calls are kept. It runs on a thread of its own."""

    def __init__(
        self, rig: Rig, number: int = 1, *, facts: Any = None, sizes: Any = None, **more: Any
    ) -> None:
        self.lost: list[GroupEnded] = []
        self.calls: list[Any] = []
        self.stays = bool(more.get("stays"))
        """Whether the connection stays when the calls have ended, until somebody closes it."""
        self.error: Exception | None = None
        credentials = more.get("credentials")
        self.channel = (
            grpc.insecure_channel(rig.server.address)
            if credentials is None
            else grpc.secure_channel(rig.server.address, credentials)
        )
        self.link = FollowerLink(
            self.channel,
            more.get("metadata", ()),
            options(number, max(2, number + 1), more.get("timeout_s", 30.0)),
            self.lost.append,
        )
        self.thread = threading.Thread(target=self._run, args=(facts or FACTS, sizes or SIZES), daemon=True)
        self.thread.start()

    def _run(self, facts: Any, sizes: Any) -> None:
        try:
            self.link.meet(facts)
            self.link.begin(sizes)
            self.calls.extend(self.link.calls())
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            self.error = error
        finally:
            if not self.stays:
                self.channel.close()  # as at the end of a process

    async def ended(self) -> Exception | None:
        """How it ended; None: as the leader wanted."""
        await until(lambda: not self.thread.is_alive())
        return self.error


@pytest.fixture
def leader() -> Iterator[GroupLeader]:
    made = GroupLeader(options(), never)
    yield made
    made.stop()


async def met(leader: GroupLeader) -> None:
    await in_thread(lambda: leader.meet(FACTS))
    await in_thread(lambda: leader.begin(SIZES))


async def test_calls_come_in_order_and_end_with_the_leader(leader: GroupLeader) -> None:
    """More calls than fit a window of HTTP/2, from another thread than the event loop's."""
    sent = [Call(Kind.FORWARD, f"forward{i}", (np.full(2000, i, np.int32),)) for i in range(100)]
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await met(leader)

        def append() -> None:
            for call in sent:
                leader.append(call)

        await in_thread(append)
        await in_thread(leader.stop)
        assert await follower.ended() is None
    assert [call.program for call in follower.calls] == [call.program for call in sent]
    assert all(
        (ours.arrays[0] == theirs.arrays[0]).all() for ours, theirs in zip(sent, follower.calls, strict=True)
    )
    assert follower.lost == []
    assert leader.failure is None


@given(
    kind=st.sampled_from(Kind),
    program=st.text(max_size=20).filter(lambda text: text.isprintable()),
    values=st.lists(
        arrays.arrays(
            st.sampled_from([np.int32, np.float32, np.bool_, np.uint8]),
            arrays.array_shapes(min_dims=0, min_side=0),
        ),
        max_size=3,
    ),
)
def test_a_call_is_what_it_was_behind_the_wire(kind: Kind, program: str, values: list[Any]) -> None:
    message = group_pb2.FollowResponse.FromString(call_bytes(Call(kind, program, tuple(values))))
    read = call_of(message.call)
    assert (read.kind, read.program) == (kind, program)
    for ours, theirs in zip(values, read.arrays, strict=True):
        assert (theirs.dtype, theirs.shape, theirs.tobytes()) == (ours.dtype, ours.shape, ours.tobytes())


@given(
    st.one_of(
        st.builds(
            UpdateBegin,
            number=st.integers(1, 2**60),
            tensors=st.lists(
                st.builds(
                    SentTensor,
                    name=st.text(),
                    dtype=st.sampled_from(["F32", "BF16"]),
                    shape=st.lists(st.integers(0, 2**40)).map(tuple),
                    crc32c=st.just(0),
                    sha256=st.just(b""),
                )
            ).map(tuple),
            staging=st.sampled_from(Staging),
            uri=st.text(),
        ),
        st.builds(
            Piece, number=st.integers(1), tensor_index=st.integers(0, 2**31 - 1), data=st.binary()
        ).filter(lambda piece: piece.number < 2**60),
        st.builds(UpdateEnd, st.integers(1, 2**60)),
        st.builds(UpdateOver, st.integers(1, 2**60)),
    )
)
def test_a_part_of_an_update_is_what_it_was_behind_the_wire(record: UpdateRecord) -> None:
    assert record_of(group_pb2.FollowResponse.FromString(update_bytes(record))) == record


@pytest.mark.parametrize(
    "message",
    [
        group_pb2.Call(),
        group_pb2.Call(kind=group_pb2.KIND_ADMIT, arrays=[group_pb2.Array(dtype="object")]),
        group_pb2.Call(
            kind=group_pb2.KIND_ADMIT, arrays=[group_pb2.Array(dtype="int32", shape=[2], values=b"abcd")]
        ),
    ],
    ids=["no kind", "objects", "too short"],
)
def test_a_message_that_means_no_call_is_refused(message: group_pb2.Call) -> None:
    with pytest.raises(ValueError, match=r"kind|object|reshape"):
        call_of(message)


def test_differences_name_both_values() -> None:
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == [
        "b is 3, and the leader's 2",
        "c is 4, and the leader's absent",
    ]


@pytest.mark.parametrize("at", ["meet", "begin"])
async def test_differing_facts_are_named_on_both_sides(leader: GroupLeader, at: str) -> None:
    other: dict[str, Any] = (
        {"facts": {**FACTS, "page_size": "16"}}
        if at == "meet"
        else {"sizes": {**SIZES, "max_model_len": "7"}}
    )
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig, **other)
        what = (
            "page_size is 16, and the leader's 64"
            if at == "meet"
            else "max_model_len is 7, and the leader's absent"
        )
        with pytest.raises(ConfigError, match=what):
            await met(leader)
        error = await follower.ended()
        assert isinstance(error, ConfigError)
        assert what in str(error)


@pytest.mark.parametrize("number", [2, 0])
async def test_a_process_with_a_wrong_number_is_refused_by_name(leader: GroupLeader, number: int) -> None:
    async with serving(fake(), group=leader) as rig:
        channel: Any = rig.channel.stream_stream(f"/{SERVICE}/Follow")
        call = channel()
        await call.write(
            group_pb2.FollowRequest(hello=group_pb2.Hello(process_id=number)).SerializeToString()
        )
        answer = group_pb2.FollowResponse.FromString(await call.read())
        assert "process_id: a follower's is from 1 to 1" in answer.refused.reasons[0]


async def test_a_follower_that_comes_late_ends_and_the_group_goes_on(leader: GroupLeader) -> None:
    async with serving(fake(), group=leader) as rig:
        first = Follower(rig)
        await met(leader)
        error = await Follower(rig).ended()
        assert isinstance(error, GroupEnded)
        assert first.thread.is_alive()
        assert leader.failure is None


async def test_only_a_key_with_the_role_control_may_follow(tmp_path: Any) -> None:
    entries = (key("user", INFER), key("group", CONTROL))
    leader = GroupLeader(options(), never)
    async with serving_keys(tmp_path / "keys", *entries, group=leader) as rig:
        for name, refusal in (("user", "PERMISSION_DENIED"), ("nobody", "UNAUTHENTICATED")):
            error = await Follower(rig, metadata=as_(name)["metadata"]).ended()
            assert isinstance(error, ConfigError)
            assert refusal in str(error)
        follower = Follower(rig, metadata=as_("group")["metadata"])
        await met(leader)
        await in_thread(leader.stop)
        assert await follower.ended() is None


def certificates(ca: str, client: str = "") -> grpc.ChannelCredentials:
    """Those of a follower that trusts `ca`, and shows `client`."""
    key_of, chain = (
        (CERTS.joinpath(f"{client}.{end}").read_bytes() for end in ("key", "pem")) if client else (None, None)
    )
    return grpc.ssl_channel_credentials(CERTS.joinpath(ca).read_bytes(), key_of, chain)


async def test_a_group_meets_over_tls_and_names_a_certificate_that_is_wrong() -> None:
    """The server takes certificates of its own authority alone."""
    leader = GroupLeader(options(), never)
    wrong = (
        (certificates("other_ca.pem", "client"), "group_ca: the leader's certificate is not from these"),
        (certificates("ca.pem", "stranger"), "tls_cert: the leader closes every connection"),
        (certificates("ca.pem"), "tls_cert: the leader closes every connection"),
        (None, "tls_cert: the leader closes every connection"),
    )
    async with serving(fake(), group=leader, listen=listening(client_ca=CA)) as rig:
        followers = [Follower(rig, credentials=credentials, timeout_s=2.0) for credentials, _ in wrong]
        for follower, (_, message) in zip(followers, wrong, strict=True):
            error = await follower.ended()
            assert isinstance(error, ConfigError)
            assert message in str(error)
        follower = Follower(rig, credentials=certificates("ca.pem", "client"))
        await met(leader)
        leader.append(Call(Kind.WINDOW, "w"))
        await in_thread(leader.stop)
        assert await follower.ended() is None
        assert follower.calls == [Call(Kind.WINDOW, "w")]


async def test_tls_to_a_leader_that_has_none_is_named(leader: GroupLeader) -> None:
    async with serving(fake(), group=leader) as rig:
        error = await Follower(rig, credentials=certificates("ca.pem")).ended()
        assert isinstance(error, ConfigError)
        assert "leader: TLS with it fails" in str(error)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (key("group", CONTROL, revoked=True), "the key is not known here, or was revoked"),
        (key("group", INFER), "Follow needs a key with the role control"),
    ],
    ids=["revoked", "another role"],
)
async def test_a_key_that_may_not_follow_any_more_ends_the_group(
    tmp_path: Any, now: KeyEntry, why: str
) -> None:
    """As it would be if the key had been changed before: whoever has it must not see the calls."""
    file = tmp_path / "keys"
    leader = GroupLeader(options(), never)
    async with serving_keys(file, key("group", CONTROL), group=leader) as rig:
        follower = Follower(rig, metadata=as_("group")["metadata"])
        await met(leader)
        write(file, [now])
        await rig.server.reload_keys()
        error = await follower.ended()
        assert isinstance(error, GroupEnded)
        assert f"process 1 may not follow any more: {why}" in str(error)
        assert leader.failure is not None


async def test_a_leader_whose_calls_nobody_reads_waits_before_it_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images may bring more calls than the network takes at a time."""
    monkeypatch.setattr("penstock.service.group.leader._MOST_WAITING_BYTES", 4 * MIB)
    leader = GroupLeader(options(timeout_s=2.0), never)
    appended: list[int] = []

    def append() -> None:
        for number in range(40):
            leader.append(Call(Kind.ENCODE, str(number), (np.zeros(MIB, np.uint8),)))
            appended.append(number)

    async with serving(fake(), group=leader) as rig:
        stream: Any = rig.channel.stream_stream(f"/{SERVICE}/Follow")
        call = stream()
        hello = group_pb2.Hello(process_id=1, facts=FACTS)
        await call.write(group_pb2.FollowRequest(hello=hello).SerializeToString())
        await call.write(group_pb2.FollowRequest(ready=group_pb2.Ready(facts=SIZES)).SerializeToString())
        await met(leader)
        appending = asyncio.ensure_future(in_thread(append))
        read: list[str] = []
        while len(read) < 20:
            answer = group_pb2.FollowResponse.FromString(await call.read())
            read += [answer.call.program] if answer.HasField("call") else []
            await call.write(group_pb2.FollowRequest(alive=group_pb2.Alive()).SerializeToString())
        assert read == [str(number) for number in range(20)]
        assert len(appended) < 40
        with pytest.raises(GroupEnded, match="nothing for 1 s"):
            await appending
        call.cancel()


async def test_a_control_port_is_where_followers_are_taken_in() -> None:
    """Whoever reaches only the main address can do no more than use the model, and needs no key here."""
    leader = GroupLeader(options(), never)
    async with serving(fake(), group=leader, listen=ListenOptions(control_port=0)) as rig:
        error = await Follower(rig).ended()
        assert isinstance(error, ConfigError)
        assert "UNIMPLEMENTED: Follow is not served at this address, but at the control port" in str(error)
        server = type("Server", (), {"address": rig.server.addresses.control_address})
        control: Any = type("Control", (), {"server": server})
        follower = Follower(control)
        await met(leader)
        await in_thread(leader.stop)
        assert await follower.ended() is None


async def test_a_lost_follower_ends_the_group_with_health_first() -> None:
    """Its connection breaks, as when it is killed. The running request learns why."""
    forced: list[GroupEnded] = []
    # It waits half of this before it forces the end, and may not take a busy machine's pause for silence.
    leader = GroupLeader(options(timeout_s=5.0), forced.append)
    async with serving(fake(hold=True), group=leader) as rig:
        follower = Follower(rig, timeout_s=5.0)
        await met(leader)
        request = rig.inference.Generate(generate("a"))
        await until(lambda: bool(rig.engine.seen))
        follower.channel.close()
        failure = await failure_of(request)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "GROUP_ENDED")
        assert "process 1 is gone" in failure.info.metadata["cause"]
        assert await rig.health_of() == 2  # NOT_SERVING
        assert isinstance(await follower.ended(), GroupEnded)
        await until(lambda: bool(forced))
    with pytest.raises(GroupEnded):
        leader.append(Call(Kind.WINDOW))


async def test_a_call_while_the_last_follower_leaves_is_told_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's thread may append a call just before the group ends, and must not see a group of none."""
    leader = GroupLeader(options(), never)
    ended: list[str] = []
    end = leader.end

    def late_end(reason: str) -> GroupEnded:
        leader.append(Call(Kind.WINDOW))
        ended.append(reason)
        return end(reason)

    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await met(leader)
        monkeypatch.setattr(leader, "end", late_end)
        follower.channel.close()
        await until(lambda: leader.failure is not None)
        assert "process 1 is gone" in ended[0]


def test_each_thread_raises_an_end_of_its_own() -> None:
    """The engine's thread clears the frames of what it raises, so no coroutine may raise the same error."""
    leader = GroupLeader(options(), never)
    first = leader.end("process 1 is gone")
    with pytest.raises(GroupEnded, match="process 1 is gone") as raised:
        leader.append(Call(Kind.WINDOW))
    explained = leader.explained(RuntimeError(""))
    assert str(explained) == str(first)
    assert len({id(first), id(raised.value), id(explained)}) == 3


async def test_a_follower_that_says_nothing_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped, whose connection stays."""
    leader = GroupLeader(options(timeout_s=2.0), never)
    monkeypatch.setattr(FollowerLink, "_told", _only_what_was_asked)
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig, timeout_s=2.0)
        await met(leader)
        await until(lambda: leader.failure is not None)
        assert "process 1 has said nothing for 1 s" in str(leader.failure)
        error = await follower.ended()
        assert isinstance(error, GroupEnded)
        assert "said nothing" in str(error)


def _only_what_was_asked(link: Any) -> Iterator[Any]:
    yield from iter(link._reports.get, None)


async def test_a_leader_that_says_nothing_is_left() -> None:
    """As one that was stopped: a server that takes the call and never answers."""

    async def answer(requests: Any, context: Any) -> None:
        await anext(aiter(requests))
        await context.write(group_pb2.FollowResponse(welcome=group_pb2.Welcome()))
        await asyncio.sleep(WAIT_S)

    server = grpc.aio.server()
    follow = grpc.stream_stream_rpc_method_handler(
        answer, group_pb2.FollowRequest.FromString, group_pb2.FollowResponse.SerializeToString
    )
    server.add_registered_method_handlers(SERVICE, {"Follow": follow})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        rig: Any = type("Silent", (), {"server": type("Server", (), {"address": f"127.0.0.1:{port}"})})
        follower = Follower(rig, timeout_s=2.0)
        error = await follower.ended()
        assert isinstance(error, GroupEnded)
        assert "the leader has said nothing for 1 s" in str(error)
        assert follower.lost == [error]
    finally:
        await server.stop(0)


async def test_an_engine_that_hangs_ends_the_group() -> None:
    """As in a collective in which a follower is missing that still says that it lives."""
    leader = GroupLeader(options(timeout_s=2.0), never)
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig, timeout_s=2.0)
        await met(leader)
        leader.watch(lambda: Pulse(progress=7, has_work=True, thread_id=None))
        error = await follower.ended()
        assert isinstance(error, GroupEnded)
        assert "a process hangs" in str(leader.failure)
        assert "a process hangs" in str(error)


async def test_a_leader_that_stops_waits_until_its_followers_are_gone(leader: GroupLeader) -> None:
    """JAX aborts a process that still runs when its coordinator is gone, which is in the leader's process."""
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig, stays=True)
        await met(leader)
        stopping = asyncio.ensure_future(in_thread(leader.stop))
        assert await follower.ended() is None
        await asyncio.sleep(0.3)
        assert not stopping.done()
        follower.channel.close()
        await stopping
    assert leader.failure is None


async def test_a_leader_that_stops_does_not_wait_for_ever() -> None:
    leader = GroupLeader(options(timeout_s=2.0), never)
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig, timeout_s=2.0, stays=True)
        await met(leader)
        await in_thread(leader.stop)
        assert await follower.ended() is None
        follower.channel.close()
    assert leader.failure is None


async def test_a_follower_that_is_told_to_stop_asks_for_the_end(leader: GroupLeader) -> None:
    asked = asyncio.Event()
    leader.on_leaving = asked.set
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await met(leader)
        follower.link.leave()
        async with asyncio.timeout(WAIT_S):
            await asked.wait()
        assert leader.failure is None


async def test_a_follower_that_is_told_to_stop_waits_for_no_leader() -> None:
    """Nothing listens there, so nobody could be asked for the end of the group."""
    rig: Any = type("Absent", (), {"server": type("Server", (), {"address": "127.0.0.1:1"})})
    follower = Follower(rig)
    follower.link.leave()
    error = await follower.ended()
    assert isinstance(error, GroupEnded)
    assert "told to stop before its leader was there" in str(error)
    assert follower.link.is_stopped
    assert follower.lost == []


async def test_a_leader_that_stops_before_all_is_compiled_has_stopped_gracefully(
    leader: GroupLeader,
) -> None:
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await in_thread(lambda: leader.meet(FACTS))
        await in_thread(leader.stop)
        assert "the leader has stopped" in str(await follower.ended())
        assert follower.link.is_stopped


async def test_why_a_follower_failed_is_told_to_the_leader(leader: GroupLeader) -> None:
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await met(leader)
        await in_thread(lambda: follower.link.fail("the disk is full"))
        await until(lambda: leader.failure is not None)
    with pytest.raises(GroupEnded, match=r"process 1 .*the disk is full"):
        leader.append(Call(Kind.WINDOW))


def begun(leader: GroupLeader) -> int:
    number = leader.open_update()
    leader.tell(UpdateBegin(number, (SentTensor("w", "F32", (5 * MIB,)),), Staging.HOST))
    return number


async def test_calls_pass_the_tensors_of_an_update_of_which_few_are_under_way(leader: GroupLeader) -> None:
    """A follower that takes no tensor holds up the update, and not the steps."""
    told: list[int] = []
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await met(leader)

        def tell_all() -> None:
            number = begun(leader)
            for index in range(20):
                leader.tell(Piece(number, 0, bytes(MIB)))
                told.append(index)

        telling = asyncio.ensure_future(in_thread(tell_all))
        await until(lambda: len(told) == 8 and len(follower.calls) == 9)
        leader.append(Call(Kind.WINDOW))
        await until(lambda: len(follower.calls) == 10)
        assert (follower.calls[-1].kind, len(told)) == (Kind.WINDOW, 8)
        follower.link.report(Taken(MIB))
        await until(lambda: len(told) == 9)
        leader.give_up_update(1)
        with pytest.raises(WeightsError, match="taken back"):
            await telling
        leader.close_update(1)
        await until(lambda: follower.calls[-1] == UpdateOver(1))


async def test_a_piece_goes_to_one_follower_and_waits_for_that_one_alone() -> None:
    leader = GroupLeader(options(processes=3), never)
    async with serving(fake(), group=leader) as rig:
        first, second = (Follower(rig, number) for number in (1, 2))
        await met(leader)
        number = begun(leader)
        for _ in range(8):
            leader.tell(Piece(number, 0, bytes(MIB)), 1)
        waiting = asyncio.ensure_future(in_thread(lambda: leader.tell(Piece(number, 0, b"first"), 1)))
        leader.tell(Piece(number, 0, b"second"), 2)
        await until(lambda: len(first.calls) == 9 and len(second.calls) == 2)
        assert second.calls[1] == Piece(number, 0, b"second")
        assert not waiting.done()
        first.link.report(Taken(MIB))
        await waiting
        await until(lambda: len(first.calls) == 10)
        assert first.calls[9] == Piece(number, 0, b"first")
        assert len(second.calls) == 2
        await in_thread(leader.stop)


async def test_an_update_waits_until_all_are_ready(leader: GroupLeader) -> None:
    ready = Prepared(1, b"digest", {"w": "BF16"})
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await met(leader)
        number = begun(leader)
        leader.tell(UpdateEnd(number))
        waiting = asyncio.ensure_future(in_thread(lambda: leader.prepared(number)))
        await until(lambda: len(follower.calls) == 2)
        assert not waiting.done()
        follower.link.report(ready)
        assert await waiting == {1: ready}


async def test_what_a_follower_cannot_make_is_told_at_once(leader: GroupLeader) -> None:
    """Its later words about an update that is over are not heard."""
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await met(leader)
        number = begun(leader)
        follower.link.report(Prepared(number, problem="no room"))
        with pytest.raises(WeightsError, match="process 1 of the group: no room"):
            await in_thread(lambda: leader.prepared(number))
        with pytest.raises(WeightsError, match="no room"):
            leader.tell(Piece(number, 0, b"1234"))
        leader.close_update(number)
        follower.link.report(Prepared(number, problem="no room"))
        other = begun(leader)
        follower.link.report(Prepared(other))
        assert await in_thread(lambda: leader.prepared(other)) == {1: Prepared(other)}


async def test_a_follower_that_is_lost_ends_the_wait_for_it(leader: GroupLeader) -> None:
    async with serving(fake(), group=leader) as rig:
        follower = Follower(rig)
        await met(leader)
        number = begun(leader)
        waiting = asyncio.ensure_future(in_thread(lambda: leader.prepared(number)))
        follower.channel.close()
        with pytest.raises(GroupEnded, match="process 1 is gone"):
            await waiting
        leader.close_update(number)
