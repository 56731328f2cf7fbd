"""One storm: a server, honest callers, faults, and what was found."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from penstock.v1 import control_pb2, control_pb2_grpc
from tests.storm.apart import Answered, Callers, honest_callers
from tests.storm.attack import Attack
from tests.storm.faults import FAULTS, TEMPLATES, grammar, template
from tests.storm.honest import p99
from tests.storm.target import Remains, Target, running

NUM_CHANNELS = 8
GRACE_S = 10.0
LAST_REPLIES_S = 10.0
"""Seconds beyond the grace that the server may take to end while the machine is busy."""
Fault = Callable[[Attack], Awaitable[str]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a storm showed."""

    num_faults: int
    seconds: float
    outcomes: Counter[tuple[str, str]]
    """How often each fault ended in which way."""
    num_answers: int
    num_wrong: int
    """Honest answers whose bits differ from those without the storm."""
    honest_refusals: Counter[str]
    quiet_p99_s: float
    """The honest callers' time to their first token (p99) before the storm."""
    storm_p99_s: float
    before: Remains
    after: Remains
    load: control_pb2.GetLoadResponse
    """The load after the storm."""
    exit_code: int | None
    """The exit code after a SIGTERM in the middle of another attack; None if the server did not end within
    the grace.
    """
    exit_s: float

    @property
    def bare(self) -> Counter[tuple[str, str]]:
        """Outcomes that are a status without a reason. gRPC's own statuses are fine if the peer
        caused them.
        """
        return Counter({what: n for what, n in self.outcomes.items() if "bare " in what[1]})


async def storm(
    folder: Path,
    *,
    num_faults: int,
    seconds: float,
    seed: int,
    quiet_s: float = 20.0,
    at_once: int = 32,
    say: Callable[[str], None] = print,
    step_back: Callable[[], object] = lambda: None,
) -> Finding:
    """Start a server in `folder` and attack it. Each kind of fault comes at least once.

    `step_back` is called once the server and the honest callers run, each in its process, and before the
    attackers do anything: it may give the attackers' process a lower priority, for what they need of the
    processors is no work of the server's.
    """
    rng = random.Random(seed)
    async with (
        running(folder, ["--grace", f"{GRACE_S:g}"]) as target,
        honest_callers(target.address, target.secrets["honest"]) as honest,
        _attack(target, rng) as attack,
    ):
        await honest.learn()
        step_back()
        say("learned what is answered alone")
        _, quiet = await _beside(honest, asyncio.sleep(quiet_s))
        # What a server makes when it is first needed (threads, child processes, caches) is there afterwards.
        await _throw(attack, list(FAULTS), at_once=4, pause_s=0.0)
        # One that takes too long has its process stopped; the next one starts another.
        await template(attack, TEMPLATES[-1])
        await grammar(attack, 'start: "a"')
        before = await _settled(target, attack)
        say(f"before: {before}")
        began = time.monotonic()
        kinds = _chosen(rng, num_faults)
        outcomes, stormy = await _beside(
            honest, _throw(attack, kinds, at_once=at_once, pause_s=seconds / len(kinds), say=say)
        )
        took_s = time.monotonic() - began
        after = await _settled(target, attack, like=before)
        say(f"after: {after}")
        load = await _load(attack)
        exit_code, exit_s = await _ended_in_an_attack(target, attack)
    return Finding(
        num_faults=len(kinds),
        seconds=took_s,
        outcomes=outcomes,
        num_answers=len(stormy.first_token_s),
        num_wrong=len(quiet.wrong) + len(stormy.wrong),
        honest_refusals=stormy.refused,
        quiet_p99_s=p99(quiet.first_token_s),
        storm_p99_s=p99(stormy.first_token_s),
        before=before,
        after=after,
        load=load,
        exit_code=exit_code,
        exit_s=exit_s,
    )


@contextlib.asynccontextmanager
async def _attack(target: Target, rng: random.Random) -> Any:
    channels = [
        grpc.aio.insecure_channel(target.address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(NUM_CHANNELS)
    ]
    try:
        for channel in channels:  # so that the server's descriptors do not depend on which one was used
            await channel.channel_ready()
        yield Attack(target.address, target.secrets, rng, channels)
    finally:
        for channel in channels:
            await channel.close()


def _chosen(rng: random.Random, count: int) -> list[Fault]:
    kinds = list(FAULTS)
    drawn = rng.choices(kinds, weights=list(FAULTS.values()), k=max(0, count - len(kinds)))
    order = kinds + drawn
    rng.shuffle(order)
    return order


async def _beside(honest: Callers, work: Awaitable[_T]) -> tuple[_T, Answered]:
    """Run something while honest callers ask. Returns both results."""
    await honest.go_on()
    done = await work
    return done, await honest.rest()


async def _throw(
    attack: Attack,
    kinds: Sequence[Fault],
    *,
    at_once: int,
    pause_s: float,
    say: Callable[[str], None] = lambda line: None,
) -> Counter[tuple[str, str]]:
    """Start one fault every `pause_s`, at most `at_once` together. Returns how they ended."""
    outcomes: Counter[tuple[str, str]] = Counter()
    places = asyncio.Semaphore(at_once)

    async def one(fault: Any) -> None:
        try:
            outcomes[fault.__name__, await fault(attack)] += 1
        except OSError as error:  # the server closed the connection
            outcomes[fault.__name__, f"cut off: {type(error).__name__}"] += 1
        finally:
            places.release()

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, fault in enumerate(kinds):
            await places.acquire()
            await asyncio.sleep(began + number * pause_s - time.monotonic())
            group.create_task(one(fault))
            if number % 500 == 499:
                say(f"{number + 1} faults")
    return outcomes


async def _load(attack: Attack) -> control_pb2.GetLoadResponse:
    stub: Any = control_pb2_grpc.ControlServiceStub(attack.channels[0])
    request = control_pb2.GetLoadRequest()
    reply: control_pb2.GetLoadResponse = await stub.GetLoad(request, metadata=attack.bearer("operator"))
    return reply


async def _settled(target: Target, attack: Attack, like: Remains | None = None) -> Remains:
    """Return what the server holds once nothing runs: as little as in `like`, if that is reached within a
    minute.
    """
    deadline = time.monotonic() + 60
    while True:
        load = await _load(attack)
        remains = await target.counted()
        idle = (load.running_requests, load.queued_requests, load.kv_pages_used) == (0, 0, 0)
        if like is None:
            is_back = idle and remains.tasks <= 5
        else:
            is_back = idle and remains.tasks <= like.tasks and remains.descriptors <= like.descriptors
        if is_back or time.monotonic() > deadline:
            return remains
        await asyncio.sleep(0.5)


async def _ended_in_an_attack(target: Target, attack: Attack) -> tuple[int | None, float]:
    """Send SIGTERM while faults go on. Returns the exit code, and how long it took."""
    faults = asyncio.create_task(
        _throw(attack, _chosen(attack.rng, 3 * len(FAULTS)), at_once=16, pause_s=0.05)
    )
    await asyncio.sleep(1.0)
    began = time.monotonic()
    target.process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(GRACE_S + LAST_REPLIES_S):
            code = await target.process.wait()
    except TimeoutError:
        return None, time.monotonic() - began
    finally:
        faults.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await faults
    return code, time.monotonic() - began
