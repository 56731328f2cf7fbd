"""vLLM's names show the values of our instruments."""

from __future__ import annotations

import re

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from penstock.runtime.measuring import engine_instruments as engine
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.snapshot import Exemplar
from penstock.service.telemetry.metrics.endpoint import Pages
from penstock.service.telemetry.metrics.families import VIEWS, VllmLabels, vllm_families
from tests.service.telemetry.metrics.sample_metrics import CHAT, SPAN_ID, TEXT, TRACE_ID, sample_registry

LABELS = VllmLabels(model_name="demo", page_size=16, num_pages=1024, has_prefix_cache=True)
COMMON = {"model_name": "demo", "engine": "0"}
FROM_VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
}
"""As vllm/v1/metrics/loggers.py has them, with the "_total" that prometheus_client appends to counters."""


def page_of(registry: Registry, accept: str = "") -> str:
    pages = Pages(lambda: vllm_families(registry.snapshot().metrics, LABELS))
    return pages.page(accept, "").body.decode()


def values(page: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """From the name of a sample to labels and values."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_names_are_vllms():
    assert {view.name for view in VIEWS} == FROM_VLLM


def test_gauges_have_the_label_of_the_model():
    found = values(page_of(sample_registry()))
    assert found["vllm:num_requests_running"] == [(COMMON, 3)]
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == [(COMMON, 0.25)]


def test_reasons_are_vllms_and_added_up():
    found = values(page_of(sample_registry()))["vllm:request_success_total"]
    by_reason = {labels["finished_reason"]: value for labels, value in found}
    assert by_reason == {"stop": 5, "length": 2, "abort": 5}


def test_a_proposal_counts_by_its_first_token():
    """Eight proposals, of which five had a second token."""
    registry = Registry()
    proposed: dict[tuple[str, ...], float] = {
        ("lookup", "1"): 5,
        ("lookup", "2"): 4,
        ("other", "1"): 3,
        ("other", "2"): 1,
    }
    registry.observed_counter(engine.SPECULATION_PROPOSED, lambda: proposed)
    accepted: dict[tuple[str, ...], float] = {("lookup", "1"): 4, ("lookup", "2"): 2}
    registry.observed_counter(engine.SPECULATION_ACCEPTED, lambda: accepted)
    found = values(page_of(registry))
    assert found["vllm:spec_decode_num_drafts_total"] == [(COMMON, 8)]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == [(COMMON, 13)]
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == [(COMMON, 6)]


def test_histograms_are_added_up_over_our_labels():
    found = values(page_of(sample_registry()))
    assert found["vllm:time_to_first_token_seconds_count"] == [(COMMON, 4)]
    buckets = {labels["le"]: n for labels, n in found["vllm:time_to_first_token_seconds_bucket"]}
    assert (buckets["0.001"], buckets["0.005"], buckets["0.04"], buckets["+Inf"]) == (0, 1, 3, 4)


def test_the_newest_exemplar_of_what_is_added_up_is_kept():
    registry = Registry()
    first = registry.histogram(engine.TIME_TO_FIRST_TOKEN)
    first.record(0.03, labels=CHAT, exemplar=Exemplar(0.03, "f" * 32, "e" * 16, 1.0))
    first.record(0.031, labels=TEXT, exemplar=Exemplar(0.031, TRACE_ID, SPAN_ID, 2.0))
    found = [
        sample.exemplar.labels["trace_id"]
        for family in openmetrics_families(page_of(registry, "application/openmetrics-text"))
        for sample in family.samples
        if sample.exemplar is not None
    ]
    assert found == [TRACE_ID]


def test_gateways_learn_the_size_of_the_cache():
    """The endpoint picker of the Gateway API Inference Extension reads these two labels as numbers."""
    ((labels, value),) = values(page_of(sample_registry()))["vllm:cache_config_info"]
    assert (int(labels["block_size"]), int(labels["num_gpu_blocks"]), value) == (16, 1024, 1)


def test_what_is_not_measured_has_no_view():
    assert re.findall(r"^vllm:(\w+)", page_of(Registry()), re.M) == ["cache_config_info"]
