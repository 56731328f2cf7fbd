"""What the loop tells a profiler, on the fake runner: the names of its parts in order, and the end of each
step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import pytest

from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.stepping import Pacer
from penstock.runtime.requests.request import Request, StepOutput, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.collector import Collector
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner

CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=12,
    max_model_len=60,
    page_size=4,
    num_pages=24,
    eos_token_ids=EOS,
    max_queued_requests=100,
)
TOKENS = 21


class Told:
    """Keeps what the loop tells, in the order of time: "(name" at a part's begin and "name)" at its end, with
    the step's number.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[str, int | None]] = []
        self.steps: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def annotate(self, name: str, step: int | None = None) -> Iterator[None]:
        self.entries.append((f"({name}", step))
        yield
        self.entries.append((f"{name})", step))

    def watch(self, started_ns: int, num_steps: int) -> None:
        self.steps.append((started_ns, num_steps))
        self.entries.append(("end", None))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [1, 4])
def test_parts_are_named_and_the_ends_of_steps_told(overlap: bool, window: int) -> None:
    told = Told()
    engine = EngineCore(
        LazyRunner(CONFIG),
        Scheduler(CONFIG),
        vocab_size=VOCAB,
        overlap=overlap,
        pacer=Pacer(10.0, window),
        annotate=told.annotate,
    )
    engine.watch_steps(told.watch)
    began_ns = time.monotonic_ns()
    engine.start()
    try:
        collector = Collector()
        request = Request(
            "r",
            (1, 2, 3),
            ResolvedSampling(temperature=0.0),
            StoppingParams(max_tokens=TOKENS, ignore_eos=True),
        )

        def sink(outputs: Sequence[StepOutput]) -> None:
            told.entries.append(("outputs", None))
            collector(outputs)

        engine.submit(request, sink)
        collector.last("r")
        assert len(collector.tokens("r")) == TOKENS
    finally:
        engine.shutdown()

    waits = [step for name, step in told.entries if name == "(wait" and step is not None]
    assert waits == sorted(set(waits))
    assert [step for name, step in told.entries if name == "(emit"] == waits
    assert sum(name == "end" for name, _ in told.entries) == len(waits) == len(told.steps)
    # Each step is waited for, then emitted, then told, and nothing of another step lies in between.
    for step in waits:
        at = told.entries.index(("(wait", step))
        names = [name for name, _ in told.entries[at : at + 6]]
        if "outputs" in names:
            names.remove("outputs")
        assert names[:5] == ["(wait", "wait)", "(emit", "emit)", "end"]
    names = [name for name, _ in told.entries]
    assert "outputs" in names
    for at, name in enumerate(names):
        if name == "outputs":
            assert (names[at - 1], names[at + 1]) == ("(emit", "emit)")
    assert sum(name == "(schedule" for name, _ in told.entries) >= len(waits)
    # The first token comes of the prefill. A window may run beyond the last one.
    assert sum(num_steps for _, num_steps in told.steps) >= TOKENS
    assert (max(num_steps for _, num_steps in told.steps) > 1) == (window > 1)
    starts = [started_ns for started_ns, _ in told.steps]
    assert starts == sorted(starts)
    assert began_ns <= starts[0]


def test_nobody_is_told_any_more() -> None:
    told = Told()
    engine = EngineCore(LazyRunner(CONFIG), Scheduler(CONFIG), vocab_size=VOCAB)
    engine.watch_steps(told.watch)
    engine.watch_steps(None)
    engine.start()
    try:
        collector = Collector()
        engine.submit(Request("r", (1, 2, 3), ResolvedSampling(temperature=0.0)), collector)
        collector.last("r")
        assert told.steps == []
    finally:
        engine.shutdown()
