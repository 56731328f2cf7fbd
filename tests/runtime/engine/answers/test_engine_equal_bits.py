"""With native kernels, neither a request's tokens nor the bits of its log-probabilities depend on how it is
computed: alone or among 24 others, in chunks of any size, in windows or step by step, from the prefix cache,
or after preemption; as one of several outputs, or with a pause or a weight update in between.

This is tested with every instruction set of this machine and with emulated AMX, with weights in bfloat16,
int8 and int4, and with a KV cache of int8. (Whole engines on emulated AVX-512 would take too long; the tests
of each operation run that.)
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.checkpoint import Shape, write_checkpoint
from penstock.runtime import Engine, EngineConfig, StoppingParams
from penstock.runtime.errors import NonFiniteLogits
from penstock.runtime.loop.interface import InFlightPolicy, StepRecord
from penstock.runtime.ops.native import library
from penstock.runtime.requests.request import Request, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.batch import Answer, answer, answers
from tests.support.chunks import set_chunk
from tests.support.collector import Gate, at_gate
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.native.kernels import EMULATED_AMX, NATIVE, mark_of, running

pytestmark = [
    pytest.mark.ci,
    pytest.mark.users_xla,
    pytest.mark.skipif(not library.available(), reason="no native library on this machine"),
]

SHAPE = Shape(
    hidden_size=192,  # 3 steps of 64 bytes in int8, 6 in bfloat16; sums of fewer have only one order
    intermediate_size=320,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=512,
    num_words=400,
    max_position_embeddings=1024,
)
ROWS = 25
PAGE = 16
PAGE_ROWS = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * PAGE
"""Keys and values of single heads in a page."""


class MostRows:
    """An observer that keeps the largest number of rows of a decode step."""

    def __init__(self) -> None:
        self.decoding = 0

    def on_step(self, record: StepRecord) -> None:
        if record.decode_only:
            self.decoding = max(self.decoding, record.num_rows)


@dataclasses.dataclass
class Served:
    """An engine with its observer, and the folder of its model."""

    engine: Engine
    rows: MostRows
    folder: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    write_checkpoint(folder, SHAPE)
    return folder


FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 KV": {"kv_cache_dtype": "int8"},
}
"""Options that say how weights and KV cache are kept."""
CI = ("bf16", "int8")
"""int8 stands for packed weights, of which int4 is the other."""
EMULATED = pytest.mark.sweep("emulated AMX")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in CI else pytest.mark.sweep(f"{name} on real kernels"))
        for name in FORMATS
    ],
)
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """Yield an engine for all instruction sets of this machine, which are chosen when a program runs."""
    yield from serving(folder, FORMATS[request.param], "avx2")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=mark_of(EMULATED_AMX) if name == "bf16" else EMULATED) for name in FORMATS
    ],
)
def emulated(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """Yield an engine for emulated AMX, which takes rows of every format in the same way;
    test_native_linear.py has its bits for each.
    """
    yield from serving(folder, FORMATS[request.param], EMULATED_AMX)


def serving(folder: Path, formats: dict[str, Any], kernels: str) -> Iterator[Served]:
    """Run an engine with the library that has these kernels."""
    row_bytes = SHAPE.head_dim + 4 if "kv_cache_dtype" in formats else SHAPE.head_dim * 2
    config = EngineConfig(
        **formats,
        dtype="bfloat16",
        max_num_seqs=ROWS,
        max_num_batched_tokens=128,
        max_model_len=512,
        page_size=PAGE,
        target_itl_s=0.0,  # steps must not be sized by their measured speed
        kv_cache_bytes=72 * PAGE_ROWS * row_bytes,
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    rows = MostRows()

    def serve() -> Engine:
        engine = Engine.from_pretrained(str(folder), config, observer=rows)
        engine.start()
        return engine

    with running(kernels):
        engine = serve()
    yield Served(engine, rows, folder)
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def requests() -> list[Request]:
    """Short requests that together outgrow the cache, of which some share a prefix, and one whose prompt
    takes several chunks.
    """
    rng = np.random.default_rng(3)
    shared = tuple(rng.integers(0, 400, 35).tolist())

    def request(i: int) -> Request:
        own = tuple(rng.integers(0, 400, 300 if i == 0 else rng.integers(2, 28)).tolist())
        seeded = ResolvedSampling(temperature=1.0, top_p=0.9, seed=i)
        return Request(
            f"r{i}",
            (shared if i % 6 == 1 else ()) + own,
            seeded if i % 2 else ResolvedSampling(temperature=0.0),
            StoppingParams(max_tokens=4 if i == 0 else 28, ignore_eos=True),
            logprobs=i % 4,
            prompt_logprobs=2 if i % 5 == 0 else None,
        )

    return [request(i) for i in range(ROWS)]


def bits(result: Answer) -> object:
    """Return the parts of an answer that must be equal. Log-probabilities are compared as numbers, so every
    bit counts.
    """
    assert result.error is None
    return result.tokens, result.finish, result.logprobs, result.prompt_logprobs


@pytest.mark.parametrize("kernel", NATIVE)
def test_answers_have_the_same_bits_however_they_are_computed(served: Served, kernel: str) -> None:
    check_answers(served, kernel)


def test_answers_have_the_same_bits_in_emulated_tiles(emulated: Served) -> None:
    check_answers(emulated, EMULATED_AMX)


def check_answers(served: Served, kernel: str) -> None:
    engine = served.engine
    with running(kernel):
        expected: dict[str, object] = {}
        for request in requests():
            engine.flush_prefix_cache()
            expected[request.request_id] = bits(answer(engine, request))
        shuffle = random.Random(5)
        preemptions = cached = 0
        served.rows.decoding = 0
        for chunk in (None, None, 5, 17, 1):  # at the second None the prefix cache is warm
            set_chunk(engine, chunk)
            together = requests()
            shuffle.shuffle(together)
            for request, result in zip(together, answers(engine, together, together=True), strict=True):
                assert bits(result) == expected[request.request_id], (request, chunk)
                preemptions += result.preemptions
                cached += result.cached_prompt_tokens
        set_chunk(engine, None)
        assert served.rows.decoding > 16
        assert preemptions > 0
        assert cached > 0


def test_forks_pauses_and_updates_leave_the_bits(served: Served) -> None:
    check_changes(served, "avx2")


@EMULATED
def test_forks_pauses_and_updates_leave_the_bits_of_emulated_tiles(emulated: Served) -> None:
    check_changes(emulated, EMULATED_AMX)


def check_changes(served: Served, kernel: str) -> None:
    """Three outputs of one prompt, which share its pages and then copy one: each is as it is alone. A pause
    that frees the KV cache, and an update to the same weights, both have the outputs computed again that run.
    """
    engine, name = served.engine, "model.norm.weight"
    good = load_file(served.folder / "model.safetensors")[name]
    outputs = outputs_of(requests()[7], 3)
    with running(kernel):
        expected = []
        for output in outputs:
            engine.flush_prefix_cache()
            alone = dataclasses.replace(output, request_id="alone", fork_of=None, num_outputs=1)
            expected.append(bits(answer(engine, alone)))
        for change in ("none", "pause", "update"):
            engine.flush_prefix_cache()
            before, gate = at_gate(engine, tokens=1), Gate()
            for output in outputs:
                engine.submit(output, gate)
            before.open()
            assert gate.reached.wait(60)  # so the change comes while the outputs run
            recompute = InFlightPolicy.RECOMPUTE
            changed: Future[Any] | None = None
            if change == "pause":
                changed = engine.pause(recompute, free_kv_cache=True)
            elif change == "update":
                changed = engine.update_weights({name: good}, label="same", in_flight=recompute, partial=True)
            gate.open()
            if changed is not None:
                assert changed.result(60).in_flight.recomputed > 0
            if change == "pause":
                engine.resume().result(60)
            for output in outputs:
                gate.sink.last(output.request_id)
            found = [Answer.of(gate.sink.outputs[output.request_id]) for output in outputs]
            assert [bits(each) for each in found] == expected


def test_weights_that_are_not_numbers_end_requests(served: Served) -> None:
    check_not_numbers(served)


@EMULATED
def test_weights_that_are_not_numbers_end_requests_of_emulated_tiles(emulated: Served) -> None:
    check_not_numbers(emulated)


def check_not_numbers(served: Served) -> None:
    """NaN must reach the logits under int8 too: int8 cannot hold it, so the scale of a row of activations
    must.
    """
    engine, name = served.engine, "model.norm.weight"
    good = load_file(served.folder / "model.safetensors")[name]
    engine.flush_prefix_cache()  # tests before may have filled it with another instruction set
    before = bits(answer(engine, requests()[1]))
    engine.update_weights({name: np.full_like(good, np.nan)}, label="bad", partial=True).result(60)
    try:
        for result in answers(engine, requests(), together=True):
            assert isinstance(result.error, NonFiniteLogits)
            assert not result.tokens
    finally:
        engine.update_weights({name: good}, label="good", partial=True).result(60)
    assert bits(answer(engine, requests()[1])) == before
