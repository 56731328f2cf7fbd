"""Drives an Engine in this process, to measure it without gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measures.record import own_peak_rss_bytes
from bench.measures.steps import StepRecorder, accepted_by_position, summary
from bench.workloads import Job
from penstock.cli.measuring.stats import RequestTrace
from penstock.runtime import Engine, EngineConfig
from penstock.runtime.errors import PenstockError
from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.requests.request import Request, StepOutput, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling

_GREEDY = ResolvedSampling(temperature=0.0)
_TIMEOUT_S = 1800.0


class Collector:
    """The sink of one wave. It records, on the engine's thread, when tokens came."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.arrivals: dict[str, list[tuple[float, int]]] = {request_id: [] for request_id in ids}
        self.ended: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self.proposed_tokens = self.accepted_tokens = 0
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[StepOutput]) -> None:
        now = time.perf_counter()
        with self._changed:
            for output in outputs:
                if output.token_ids:
                    self.arrivals[output.request_id].append((now, len(output.token_ids)))
                if output.error is not None:
                    self.errors[output.request_id] = str(output.error)
                if output.last:
                    self.ended[output.request_id] = now
                    # the engine may be an older one (`bench.compare`), whose timing has no such numbers
                    self.proposed_tokens += getattr(output.timing, "proposed_tokens", 0)
                    self.accepted_tokens += getattr(output.timing, "accepted_tokens", 0)
            self._changed.notify_all()

    def wait_for_tokens(self, ids: Sequence[str], count: int) -> None:
        """Wait until each of `ids` has `count` tokens, or has ended."""
        self._wait(lambda: all(i in self.ended or sum(n for _, n in self.arrivals[i]) >= count for i in ids))

    def wait_for_end(self) -> None:
        """Wait until every request has ended."""
        self._wait(lambda: len(self.ended) == len(self.arrivals))

    def _wait(self, is_so: Any) -> None:
        with self._changed:
            if not self._changed.wait_for(is_so, _TIMEOUT_S):
                raise ValueError(f"nothing came for {_TIMEOUT_S:.0f} s")


def _entries(cache: Path | None) -> set[str]:
    """List the files of programs in the compilation cache, of JAX and of `program_store`."""
    if cache is None or not cache.is_dir():
        return set()
    return {entry.name for entry in cache.iterdir() if not entry.name.startswith(("programs-", "last-"))}


class InProcess:
    """A loaded, started engine; `startup` says how long that took."""

    def __init__(self, checkpoint: str, config: EngineConfig, *, observe: bool = True) -> None:
        """Load and start. With `observe` the engine's step records are taken, which costs some microseconds a
        step.
        """
        self._recorder = StepRecorder() if observe else None
        kept = _entries(config.compilation_cache)
        began = time.perf_counter()
        self.engine = Engine.from_pretrained(checkpoint, config, observer=self._recorder)
        loaded = time.perf_counter()
        self.engine.start()
        ready = time.perf_counter()
        self.startup = {
            "load_s": round(loaded - began, 2),
            "compile_s": round(ready - loaded, 2),
            "newly_compiled": len(_entries(config.compilation_cache) - kept),
        }
        self._wave = 0
        self._proposed_tokens = self._accepted_tokens = 0

    def run_wave(self, jobs: Sequence[Job]) -> list[RequestTrace]:
        self._wave += 1
        ids = [f"{self._wave}-{i}" for i in range(len(jobs))]
        requests = [
            Request(i, job.token_ids, _GREEDY, StoppingParams(max_tokens=job.max_tokens, ignore_eos=True))
            for i, job in zip(ids, jobs, strict=True)
        ]
        sink = Collector(ids)
        early = [i for i, job in zip(ids, jobs, strict=True) if not job.after_tokens]
        sent: dict[str, float] = {}
        for job, request in sorted(zip(jobs, requests, strict=True), key=lambda pair: pair[0].after_tokens):
            if job.after_tokens:
                sink.wait_for_tokens(early, job.after_tokens)
            sent[request.request_id] = time.perf_counter()
            try:
                self.engine.submit(request, sink)
            except PenstockError as error:
                self.engine.abort(all_requests=True)
                raise ValueError(f"refused: {error}") from error
        sink.wait_for_end()
        self._proposed_tokens += sink.proposed_tokens
        self._accepted_tokens += sink.accepted_tokens
        return [
            RequestTrace(
                sent[i], tuple(sink.arrivals[i]), sink.ended[i], len(job.token_ids), sink.errors.get(i)
            )
            for i, job in zip(ids, jobs, strict=True)
        ]

    def about_repeat(self) -> Mapping[str, Any]:
        counts = {"proposed_tokens": self._proposed_tokens, "accepted_tokens": self._accepted_tokens}
        self._proposed_tokens = self._accepted_tokens = 0
        records = self.take_steps()
        return {
            "peak_rss_bytes": own_peak_rss_bytes(),
            "compiles_after_warmup": self.engine.compiles_after_warmup,
            "steps": summary(records),
            "accepted_by_position": accepted_by_position(records),
            **counts,
        }

    def take_steps(self) -> list[StepRecord]:
        """Return the step records since the last call; none unless observed. To be called while no request
        runs.
        """
        if self._recorder is None:
            return []
        self.engine.journal.flush()  # until then the last step may not have been shown to the recorder
        return self._recorder.take()

    def close(self) -> None:
        self.engine.shutdown()
