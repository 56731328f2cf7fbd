"""A profile of the demo model: the written trace is opened, and what it says is compared with what the engine
did.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from penstock.runtime import Engine, SamplingParams, StoppingParams
from penstock.runtime.errors import Draining, ProfileFailed, ProfileUnderWay
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.profiling.profile import Profile
from tests.support.models.demo import demo_engine
from tests.support.models.toy import toy_engine

pytestmark = pytest.mark.ci

WAIT_S = 120.0
PARTS = ("schedule", "pack", "dispatch", "wait", "emit")
Event = dict[str, Any]


def events_of(profile: Profile) -> list[Event]:
    events: list[Event] = json.loads(gzip.decompress(profile.trace.read_bytes()))["traceEvents"]
    return events


def slices(events: list[Event], *names: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["name"] in names]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Profile]]:
    """Yield an engine, and the profile of its generating."""
    with demo_engine() as engine:
        stopping = StoppingParams(max_tokens=24, ignore_eos=True)
        run = engine.profile(tmp_path_factory.mktemp("profiles"), steps=1000, timeout_s=300.0)
        engine.generate(["Once upon a time", "The"], stopping=stopping, show_progress=False)
        engine.generate("A", sampling=SamplingParams(temperature=0.5, top_k=5), stopping=stopping)
        engine.pause().result(
            WAIT_S
        )  # a step may have been dispatched ahead, and the profile would end within it
        run.stop()
        engine.resume().result(WAIT_S)
        yield engine, run.result(WAIT_S)


def test_the_parts_of_each_step_are_on_the_engines_thread(profiled: tuple[Engine, Profile]) -> None:
    _, profile = profiled
    events = events_of(profile)
    found = slices(events, *PARTS)
    assert {event["name"] for event in found} == set(PARTS)
    (thread,) = {(event["pid"], event["tid"]) for event in found}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named[thread] == "penstock-engine"
    steps = {name: Counter(e["args"]["step"] for e in slices(events, name)) for name in PARTS[1:]}
    assert len(steps["wait"]) >= 2
    assert set(steps["wait"].values()) == {1}
    assert steps["pack"] == steps["dispatch"] == steps["wait"] == steps["emit"]
    assert 0 < len(steps["wait"]) <= profile.steps  # a window counts as many steps as it holds
    for step in steps["wait"]:  # a step's parts follow one another
        order = [slices(events, name) for name in PARTS[1:]]
        times = [next(e for e in part if e["args"]["step"] == step) for part in order]
        ends = [event["ts"] + event["dur"] for event in times]
        assert all(end <= later["ts"] for end, later in zip(ends, times[1:], strict=False))


def test_model_and_sampler_are_told_apart(profiled: tuple[Engine, Profile]) -> None:
    engine, profile = profiled
    events = events_of(profile)
    operations = [event for event in events if event["ph"] == "X" and "hlo_op" in event.get("args", {})]
    scopes = {event["args"].get("scope", "") for event in operations}
    assert {"model/attention", "model/mlp", "model/head"} <= scopes
    assert any(scope.split("/")[0] == "sampler" for scope in scopes)
    for part in ("model", "sampler"):
        track = slices(events, part)
        (thread,) = {(event["pid"], event["tid"]) for event in track}
        names = [
            e["args"]["name"] for e in events if e["name"] == "thread_name" and (e["pid"], e["tid"]) == thread
        ]
        assert names == [part]
        # every operation of the part lies within a slice of its track
        for event in operations:
            is_part = event["args"].get("scope", "").split("/")[0] == part
            if is_part and not event["args"]["hlo_op"].startswith(("while", "cond", "call")):
                assert any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in track)
    modules = {event["args"]["hlo_module"] for event in operations}
    assert {m.split("_")[1] for m in modules} >= {"window", "forward", "choice"}
    if engine.info.batch_invariant:  # then native kernels compute the model
        assert {"penstock_linear", "penstock_attention"} <= {event["name"] for event in operations}
    assert not [event for event in events if event["name"].startswith("end: ")]


def test_the_file_for_tensorboard_has_the_same(profiled: tuple[Engine, Profile]) -> None:
    """Read by JAX's own reader."""
    _, profile = profiled
    (file,) = profile.folder.glob("plugins/profile/*/*.xplane.pb")
    data = ProfileData.from_file(str(file))
    counts = Counter(event.name for plane in data.planes for line in plane.lines for event in line.events)
    events = events_of(profile)
    for name in PARTS:
        assert counts[name] == len(slices(events, name)) > 0


def test_it_ends_by_itself_after_its_steps(profiled: tuple[Engine, Profile], tmp_path: Path) -> None:
    engine, _ = profiled
    run = engine.profile(tmp_path, steps=3, timeout_s=300.0)
    with pytest.raises(ProfileUnderWay):
        engine.profile(tmp_path, steps=3)
    engine.generate("The", stopping=StoppingParams(max_tokens=60, ignore_eos=True))
    profile = run.result(WAIT_S)
    assert profile.steps >= 3
    assert profile.folder.parent == tmp_path
    waited = slices(events_of(profile), "wait")
    assert len(waited) < 60


def test_a_profile_ends_with_its_engine(tmp_path: Path) -> None:
    engine = toy_engine()
    run = engine.profile(tmp_path, timeout_s=300.0)
    engine.shutdown()
    try:
        assert run.result(WAIT_S).steps == 0
    except ProfileFailed as error:  # the engine waits a while for the trace, and not longer
        assert "the engine was shut down" in str(error)  # noqa: PT017 -- either end is right
    with pytest.raises(Draining):
        engine.profile(tmp_path)


def test_a_profile_ends_when_its_engine_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    try:
        run = engine.profile(tmp_path, timeout_s=300.0)

        def broken(_plan: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine.runner, "execute_async", broken)
        with pytest.raises(Exception, match="the device is gone"):
            engine.generate([1, 2, 3])
        assert run.result(WAIT_S).trace.is_file()
    finally:
        engine.shutdown()


def test_without_work_it_ends_at_the_timeout(tmp_path: Path) -> None:
    engine = toy_engine()
    try:
        engine.pause(InFlightPolicy.WAIT).result(WAIT_S)
        began_s = time.monotonic()
        profile = engine.profile(tmp_path, timeout_s=0.1).result(WAIT_S)
        assert profile.steps == 0
        assert 0.1 <= profile.duration_s <= time.monotonic() - began_s
        assert not slices(events_of(profile), "wait")
    finally:
        engine.shutdown()
