"""A registry with values that tests know, in a spirit of the real one, and how promtool is asked."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from penstock.runtime.measuring import engine_instruments as engine
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.snapshot import Exemplar

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
CHAT = ("chat", "penstock", "demo")
TEXT = ("text_completion", "penstock", "demo")


def sample_registry(exemplar_at_s: float = 1_700_000_000.5) -> Registry:
    """Two gauges, two counters, two histograms and an info, each with values."""
    registry = Registry()
    registry.gauge(engine.OUTPUTS_RUNNING, lambda: {(): 3})
    registry.gauge(engine.KV_USAGE, lambda: {(): 0.25})
    finished = registry.counter(engine.OUTPUTS_FINISHED)
    for reason, count in (("eos", 4), ("stop", 1), ("max_tokens", 2), ("cancelled", 5)):
        finished.add(count, (reason,))
    registry.counter(engine.STEP_TIME).add(1.5, ("wait",))
    first = registry.histogram(engine.TIME_TO_FIRST_TOKEN)
    first.record(0.002, labels=CHAT)
    first.record(0.03, times=2, labels=TEXT, exemplar=Exemplar(0.03, TRACE_ID, SPAN_ID, exemplar_at_s))
    first.record(99.0, labels=TEXT)
    registry.histogram(engine.REQUEST_DURATION).record(0.5, labels=(*CHAT, ""))
    info = ("1.0", "0.10", "cpu", 'a "name"\nof\\two lines', "bfloat16", "none", "bfloat16")
    registry.gauge(engine.BUILD_INFO, lambda: {info: 1})
    return registry


def promtool_complaints(page: bytes) -> list[str]:
    """Return what `promtool check metrics` says about a page in the text format. Raises if it cannot be
    parsed.
    """
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, of Prometheus, is not installed")
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, timeout=60)
    said = (done.stdout + done.stderr).decode()
    assert "error while linting" not in said, said
    return said.splitlines()
