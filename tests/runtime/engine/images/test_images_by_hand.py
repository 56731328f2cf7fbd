"""Prompts with images make the tokens that are computed by hand, whatever chunks they are computed in, with
whatever else, and however often their images are encoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from penstock.runtime import Engine
from penstock.runtime.config import CPU_SIZES
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.execution.backend import Backend, mesh_of
from penstock.runtime.execution.images import encode_buckets, encode_call
from penstock.runtime.loop.interface import InFlightPolicy, StepRecord
from penstock.runtime.requests.images import MediaItem
from penstock.runtime.requests.request import CacheParams, Request, outputs_of
from penstock.runtime.scheduling.plan import Encode
from tests.support.chunks import set_chunk
from tests.support.collector import Collector, at_gate
from tests.support.models.toy import toy_engine
from tests.support.models.toy_images import (
    VISION,
    expected_tokens,
    image,
    request_of,
    toy_image_model,
)
from tests.support.scheduler.put_off import Anything, HalfPutOff
from tests.support.suite.drawing import few

CAT, DOG, FISH = image(1, 5), image(2, 32), image(3, 40)
NEWT = image(4, 28, row_tokens=7)
"""Its tokens are four rows of seven and a token of text."""
PROMPTS: dict[str, tuple[int | MediaItem, ...]] = {
    "one": (1, 2, CAT, 3),
    "two": (DOG, 4, CAT, 5, 6),
    "twice": (7, CAT, CAT, 8),
    "last": (9, 10, FISH),
    "only": (DOG,),
    "none": (1, 2, 3, 4, 5, 6),
    "rows": (1, NEWT, 2, CAT),
    "long": (3, FISH, 1, 2, DOG, 3, 4, CAT, 5),
}
SIZES: dict[str, Any] = {"max_image_tokens": 40, "media_pool_tokens": 128, "decode_window_s": 10.0}
"""The pool has four blocks, so all three images together do not fit beside each other and another one."""


def accelerator() -> Backend:
    """Make a backend with programs as on an accelerator: one for each length of windows."""
    return Backend(mesh=mesh_of(jax.devices("cpu")[:1]), sizes=CPU_SIZES)


def requests(num_tokens: int = 9, **changes: Any) -> list[Request]:
    return [
        request_of(name, parts, num_tokens + i, **changes) for i, (name, parts) in enumerate(PROMPTS.items())
    ]


ENGINES: dict[str, dict[str, Any]] = {
    "windows": {},
    "no overlap": {"overlap": False},
    "single steps": {"max_decode_steps": 1},
    "small": {"media_pool_tokens": 64, "max_encode_patches": 1, "prefix_cache_pages": 0},
    "as on an accelerator": {"kv_cache_bytes": 1 << 16},
}
ALWAYS = ("small",)
CI = ("windows",)


@pytest.fixture(
    scope="module",
    params=few(ENGINES, ALWAYS, CI, shared="engine of images"),
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    backend = accelerator() if request.param == "as on an accelerator" else None
    engine = toy_engine(toy_image_model(), backend=backend, **(SIZES | ENGINES[request.param]))
    yield engine
    assert engine.ready
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def run(engine: Engine, asked: Sequence[Request]) -> Collector:
    """All of them together."""
    gate, sink = at_gate(engine, tokens=1), Collector()
    for request in asked:
        engine.submit(request, sink)
    gate.open()
    for request in asked:
        assert sink.last(request.request_id).error is None
        assert sink.tokens(request.request_id) == expected_tokens(request), request.request_id
    return sink


@pytest.mark.parametrize("chunk", [None, 1, 4, 7])
def test_every_prompt_alone_and_all_packed_in_chunks(engine: Engine, chunk: int | None) -> None:
    """Chunks of 1 run where only decodes run otherwise; those of 4 end with pages."""
    set_chunk(engine, chunk)
    engine.flush_prefix_cache()
    for request in requests():
        run(engine, [request])
    engine.flush_prefix_cache()
    run(engine, requests())
    run(engine, requests())  # now from the cache, in slots that others have used
    set_chunk(engine, None)


def test_equal_texts_with_other_images_share_nothing(engine: Engine) -> None:
    engine.flush_prefix_cache()
    fish = image(30, 40)
    one = request_of("one", (1, 2, FISH, 3, 4), 6)
    other = request_of("other", (1, 2, fish, 3, 4), 6)
    assert one.prompt_token_ids == other.prompt_token_ids
    assert expected_tokens(one) != expected_tokens(other)
    sink = run(engine, [one])
    sink = run(engine, [other])
    timing = sink.last("other").timing
    assert timing is not None
    assert timing.cached_prompt_tokens == 0
    cached = run(engine, [dataclasses.replace(one, request_id="again")]).last("again").timing
    assert cached is not None
    assert (cached.cached_prompt_tokens > 0) is (engine.config.prefix_cache_pages != 0)
    run(engine, [one, other])


def test_forks_share_prompts_with_images(engine: Engine) -> None:
    for name in ("two", "last", "only"):
        asked = request_of(name, PROMPTS[name], 8, cache=CacheParams(bypass=True))
        outputs = outputs_of(asked, 3)
        sink = run(engine, outputs)
        fork = sink.last(outputs[1].request_id).timing
        assert fork is not None
        assert fork.cached_prompt_tokens == len(asked.prompt_token_ids) - 1


def test_tokens_that_are_put_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """About half of the masks are not ready in time. Then a prompt's last token is computed again, which may
    be one of an image that the pool no longer has.
    """
    put_off = HalfPutOff(monkeypatch)
    run(engine, [dataclasses.replace(request, constraint=Anything()) for request in requests()])
    assert put_off.num_skipped > 10


@pytest.mark.sweep
def test_preempted_requests_have_their_images_again() -> None:
    """The cache holds them when they enter, and not when they have grown; the pool holds two images."""
    page_bytes = 2 * 4 * 4 * 4
    engine = toy_engine(
        toy_image_model(),
        **SIZES | {"media_pool_tokens": 64},
        kv_cache_bytes=40 * page_bytes,
        max_model_len=150,
    )
    try:
        asked = [
            request_of(f"r{i}", (i, CAT, 2, DOG, 3), 60, cache=CacheParams(bypass=True)) for i in range(3)
        ]
        sink = run(engine, asked)
        timings = [sink.last(request.request_id).timing for request in asked]
        assert sum(timing.preemptions for timing in timings if timing is not None) > 0
    finally:
        engine.shutdown()


class Plans:
    """An observer that notes how many images each step encodes that encodes any."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def on_step(self, record: StepRecord) -> None:
        if record.plan.encodes:
            self.encoded.append(len(record.plan.encodes))


@pytest.mark.ci
def test_images_are_encoded_once_and_one_a_step() -> None:
    plans = Plans()
    engine = toy_engine(
        toy_image_model(), **SIZES | {"max_encode_patches": 1}, observer=plans, prefix_cache_pages=0
    )
    try:
        run(engine, [request_of("long", PROMPTS["long"], 5)])
        assert plans.encoded == [1, 1, 1]
        run(engine, [request_of("again", PROMPTS["long"], 5), request_of("two", PROMPTS["two"], 5)])
        assert plans.encoded == [1, 1, 1]
    finally:
        engine.shutdown()


@pytest.mark.ci
def test_new_weights_encode_images_anew() -> None:
    engine = toy_engine(toy_image_model(), **SIZES)
    try:
        request = request_of("one", PROMPTS["long"], 6)
        run(engine, [request])
        gate = at_gate(engine, tokens=30)
        done = engine.update_weights(
            {"offset": np.full((1,), 4, np.float32)}, label="new", in_flight=InFlightPolicy.RECOMPUTE
        )
        gate.open()
        done.result(60)
        sink = Collector()
        engine.submit(request, sink)
        sink.last("one")
        assert sink.tokens("one") == expected_tokens(request, offset=4) != expected_tokens(request)
    finally:
        engine.shutdown()


TWENTY = image(9, 20)


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(image(9, 129), id="larger than the pool"),
        pytest.param(image(9, 41), id="larger than the largest program"),
        pytest.param(dataclasses.replace(TWENTY, num_tokens=5), id="more patches than its tokens"),
        pytest.param(dataclasses.replace(TWENTY, num_tokens=30), id="fewer patches than its tokens"),
        pytest.param(dataclasses.replace(TWENTY, patches=np.zeros((80, 3), np.float32)), id="wide patches"),
        pytest.param(dataclasses.replace(TWENTY, grid=(1, 1, 80)), id="a grid that does not merge"),
        pytest.param(dataclasses.replace(TWENTY, grid=(1, -8, -10)), id="a negative grid"),
    ],
)
def test_an_image_that_no_program_takes_is_refused(item: MediaItem) -> None:
    engine = toy_engine(toy_image_model(), start=False, **SIZES)
    try:
        with pytest.raises(InvalidRequest) as raised:
            engine.submit(request_of("r", (1, item), 1), Collector())
        assert [bad.field for bad in raised.value.violations] == ["media[0]"]
    finally:
        engine.shutdown()


def test_images_without_rotary_positions_have_those_of_the_prompt(engine: Engine) -> None:
    """In chunks of one token, too, which otherwise run in the program of decode steps."""
    engine.flush_prefix_cache()
    set_chunk(engine, 1)
    run(engine, [dataclasses.replace(request_of("plain", PROMPTS["two"], 6), rotary=None)])
    set_chunk(engine, None)


def test_a_call_takes_one_image_and_the_smallest_bucket_that_holds_it() -> None:
    buckets = encode_buckets(VISION, 100, 4)
    assert buckets == (256, 400)
    assert encode_buckets(VISION, 40, 2) == (160,)
    small, large = (
        encode_call(VISION, buckets, 1000, Encode(image(1, size), (3, 7, 2))) for size in (40, 65)
    )
    assert (small.bucket, large.bucket) == (256, 400)
    assert small.packed[0] == 160
    assert small.packed[1:].tolist() == [*range(96, 128), *range(224, 232), *[1000] * 24]
    assert large.packed[1:].tolist() == [*range(96, 128), *range(224, 256), 64, *[1000] * 35]
    nothing = encode_call(VISION, buckets, 1000, None)
    assert (nothing.bucket, nothing.packed.tolist()) == (256, [0, *[1000] * 64])
