"""Random requests on the engine's real loop and the fake runner: what its journal tells, and what they got.

There are several outputs of one prompt, windows, prefixes that are shared, preemptions, constraints that
fail, aborts, cancellations, and requests that an engine which dies leaves behind.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.runtime.errors import EngineDead
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.journal import Entry, Journal
from penstock.runtime.loop.stepping import Pacer
from penstock.runtime.requests.request import CacheParams, Request, StoppingParams, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.load import Totals
from penstock.runtime.scheduling.plan import StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.collector import Collector
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner, LazyStep, Rota

MAX_LEN = 60


class Breaks(Rota):
    """A constraint that raises at its third token."""

    def accept(self, token_ids: Sequence[int]) -> None:
        super().accept(token_ids)
        if len(self.accepted) >= 3:
            raise ZeroDivisionError("the grammar is broken")


@dataclass
class Told:
    """All that happened to an engine."""

    entries: list[Entry] = field(default_factory=list)
    """What the journal told, in order."""
    sink: Collector = field(default_factory=Collector)
    """What the requests got."""
    requests: list[Request] = field(default_factory=list)
    """All that were submitted."""
    cancelled: set[str] = field(default_factory=set)
    """The ids of those that were cancelled, maybe after they had ended."""
    totals: Totals | None = None
    """What the scheduler has counted."""


def run_traffic(seed: int, *, dies: bool = False) -> Told:
    """Run one engine from its start to its end. `dies`: it ends by an error of its runner."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.choice([8, 16]),
        max_model_len=MAX_LEN,
        page_size=4,
        num_pages=rng.choice([18, 24, 60]),
        eos_token_ids=EOS,
        max_queued_requests=100,
        prefix_cache_pages=rng.choice([None, 0]),
    )
    runner, journal, told = LazyRunner(config), Journal(), Told()
    journal.read_by(told.entries.extend)
    core = EngineCore(
        runner,
        Scheduler(config),
        vocab_size=VOCAB,
        journal=journal,
        overlap=rng.random() < 0.7,
        pacer=Pacer(10.0, rng.choice([1, 8])),
    )
    step = _Step(runner, fails_after=rng.randint(5, 30) if dies else None)
    runner.wait = step.wait  # type: ignore[method-assign]
    core.start()
    try:
        _submit_all(core, told, rng, step.may_end)
        for request in told.requests:
            if request.request_id not in told.cancelled:
                told.sink.last(request.request_id)
        if not dies:
            assert core.drain(60)
    finally:
        core.shutdown()
    journal.flush()
    told.totals = core.totals()
    return told


class _Step:
    """Makes steps of the fake runner take a little time, so that something can happen meanwhile."""

    def __init__(self, runner: LazyRunner, fails_after: int | None) -> None:
        self._wait = runner.wait
        self._left = fails_after
        self.may_end = threading.Event()
        """While it is not set, no step ends."""
        self.may_end.set()

    def wait(self, step: LazyStep) -> StepResult:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("the device is gone")
        assert self.may_end.wait(60)
        time.sleep(0.0003)
        return self._wait(step)


def _submit_all(core: EngineCore, told: Told, rng: random.Random, may_end: threading.Event) -> None:
    shared = rng.choices(range(VOCAB), k=20)
    free: list[str] = []  # the runner wants the newest mask of those under a constraint, even if they ended
    for i in range(14):
        prompt = (*shared[: rng.randint(1, 20)], *rng.choices(range(VOCAB), k=rng.randint(0, 9)))
        stopping = StoppingParams(
            max_tokens=rng.choice([None, rng.randint(1, 25)]),
            stop_token_ids=(rng.randrange(VOCAB),),
            ignore_eos=rng.random() < 0.7,
        )
        sampling = ResolvedSampling(seed=i)
        request = Request(f"r{i}", prompt, sampling, stopping, cache=CacheParams(bypass=rng.random() < 0.2))
        n = rng.choice([1, 1, 2, 4])
        kinds = [Rota, Breaks] if rng.random() < 0.3 else []
        outputs = outputs_of(request, n, [rng.choice(kinds)(25) for _ in range(n if kinds else 0)])
        ends = None if kinds else rng.choice([None, None, None, "new", "any"])
        if ends == "new":
            may_end.clear()  # so these outputs cannot end before they are aborted or cancelled
        for output in outputs:
            try:
                core.submit(output, told.sink)
            except EngineDead:
                return
            told.requests.append(output)
        if kinds:
            continue
        free.append(request.request_id)
        if ends is None:
            continue
        time.sleep(0.002)
        if rng.random() < 0.5:
            told.cancelled.update(output.request_id for output in outputs)
            core.cancel(*(output.request_id for output in outputs))
        else:
            with contextlib.suppress(EngineDead):
                core.abort([request.request_id if ends == "new" else rng.choice(free)])
        may_end.set()
