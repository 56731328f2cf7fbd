"""The page of traces names exactly what the code records, and OpenTelemetry's names are its own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv.attributes import error_attributes

from penstock.service.telemetry.tracing import tracer
from tests.docs.pages import ROOT, text_of

_ATTRIBUTE = re.compile(r"(penstock|gen_ai|rpc|error)(\.[a-z_]+)+")
_SCOPE = {"penstock.service"}
SPANS = {
    "engine.step", "schedule", "pack", "dispatch", "wait", "emit", "tokenize", "grammar", "submit", "queue",
    "prefill", "decode", "reply", "prefill_chunk", "decode_window", "decode_step",
}  # fmt: skip
EVENTS = {"preempted", "weights_updated", "weights_broken", "paused", "resumed", "stalled"}


def strings() -> set[str]:
    """All strings in the code that makes spans."""
    assert tracer.__file__ is not None
    sources = [*Path(tracer.__file__).parent.glob("*.py")]
    sources.append(ROOT / "service" / "penstock" / "service" / "servicers" / "inference.py")
    return {
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def page() -> set[str]:
    """All that the page quotes as code."""
    return set(re.findall(r"`([^`\s]+)`", text_of(ROOT / "docs" / "reference" / "traces.md")))


def attributes(names: set[str]) -> set[str]:
    return {name for name in names if _ATTRIBUTE.fullmatch(name)} - _SCOPE


def test_the_page_names_every_attribute_and_no_other() -> None:
    assert attributes(page()) == attributes(strings())


def test_the_page_names_every_span_and_event() -> None:
    assert sorted((SPANS | EVENTS) - page()) == []
    assert sorted((SPANS | EVENTS) - strings()) == []


def test_names_of_the_conventions_are_theirs() -> None:
    modules = (gen_ai_attributes, rpc_attributes, error_attributes)
    theirs = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    ours = {name for name in attributes(strings()) if not name.startswith("penstock.")}
    assert sorted(ours - theirs) == []
    assert len(ours) > 15
