"""Makes prometheus_client's metric families of what registries hold, under Prometheus' names and vLLM's.

`prometheus_name` and the functions beside it make Prometheus' names of the names of instruments: dots become
underscores, and the unit is appended.

`vllm_families` gives vLLM's names to what Penstock measures, so that dashboards and gateways made for vLLM
read it. Each is a view of one of our instruments: nothing is measured twice. The names and meanings are those
of vLLM's V1 engine (vllm/v1/metrics/loggers.py). Buckets are ours, which quantiles do not depend on. Labels
that vLLM does not have are summed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from penstock.runtime.measuring import engine_instruments as engine
from penstock.runtime.measuring.instruments import Instrument, Kind
from penstock.runtime.measuring.snapshot import Exemplar, HistogramPoint, Labels, Metric

_UNITS = {"s": "seconds", "By": "bytes"}
_INFO = ".info"


def is_info(instrument: Instrument) -> bool:
    """Say whether the instrument only carries labels, and its value is always 1."""
    return instrument.kind is Kind.GAUGE and instrument.name.endswith(_INFO)


def prometheus_unit(instrument: Instrument) -> str:
    """Return the unit as it stands at the end of the name. Empty for what is counted, which names itself."""
    if instrument.unit == "1":
        return "ratio" if instrument.kind is Kind.GAUGE else ""
    return _UNITS.get(instrument.unit, "")


def family_name(instrument: Instrument) -> str:
    """Return the name of the metric family: without the "_total" of a counter's samples, and the "_info" of
    an info's.
    """
    name = underscored(instrument.name.removesuffix(_INFO) if is_info(instrument) else instrument.name)
    unit = prometheus_unit(instrument)
    return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"


def prometheus_name(instrument: Instrument) -> str:
    """Return the name to ask Prometheus for. A histogram's series also end in "_bucket", "_sum" and
    "_count".
    """
    name = family_name(instrument)
    if instrument.kind is Kind.COUNTER:
        return f"{name}_total"
    return f"{name}_info" if is_info(instrument) else name


def underscored(name: str) -> str:
    """Write the name of a label, or of an instrument without its unit, as Prometheus has it."""
    return name.replace(".", "_")


def families(metrics: Iterable[Metric]) -> Iterator[Family]:
    """Yield one family for each metric that has a point, made when it is asked for."""
    for metric in metrics:
        if metric.points:
            yield family(metric)


def family(metric: Metric) -> Family:
    """Make the family of one metric, under our own name."""
    instrument = metric.instrument
    kind = "info" if is_info(instrument) else instrument.kind.value
    made = Family(family_name(instrument), instrument.description, kind, prometheus_unit(instrument))
    fill(made, tuple(map(underscored, instrument.labels)), metric.points, instrument.buckets)
    return made


def fill(
    made: Family,
    names: Labels,
    points: Mapping[Labels, float | HistogramPoint],
    buckets: tuple[float, ...] = (),
) -> None:
    """Add samples to the family. `names` are those of the labels; a label without a value is left out, as
    Prometheus treats both alike.
    """
    suffix = {"counter": "_total", "info": "_info"}.get(made.type, "")
    for values, point in points.items():
        labels = {name: value for name, value in zip(names, values, strict=True) if value}
        if isinstance(point, HistogramPoint):
            made.samples.extend(_histogram(made.name, labels, buckets, point))
        else:
            made.samples.append(Sample(made.name + suffix, labels, point))


def _histogram(
    name: str, labels: dict[str, str], buckets: tuple[float, ...], point: HistogramPoint
) -> Iterator[Sample]:
    bounds = [*map(floatToGoString, buckets), "+Inf"]
    totals = accumulate(point.bucket_counts)
    for bound, total, exemplar in zip(bounds, totals, point.exemplars, strict=True):
        told = None if exemplar is None else _exemplar(exemplar)
        yield Sample(f"{name}_bucket", {**labels, "le": bound}, total, None, told)
    yield Sample(f"{name}_count", labels, point.count)
    yield Sample(f"{name}_sum", labels, point.sum)


def _exemplar(exemplar: Exemplar) -> PrometheusExemplar:
    spans = {"trace_id": exemplar.trace_id, "span_id": exemplar.span_id}
    return PrometheusExemplar(spans, exemplar.value, exemplar.at_s)


_LABELS = ("model_name", "engine")
_ENGINE = "0"
"""vLLM numbers its engines from 0; there is one here."""
_CACHE_CONFIG = "vllm:cache_config"
CACHE_CONFIG_INFO = f"{_CACHE_CONFIG}_info"
"""Its labels say how large the KV cache is; gateways compute free tokens from it."""
FINISHED_REASON = "finished_reason"
FINISHED_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "prompt_read": "stop",
    "max_tokens": "length",
    "context_full": "length",
    "time_limit": "length",
    "aborted": "abort",
    "cancelled": "abort",
    "error": "error",
}
"""Our reasons for the end of an output, to vLLM's."""


@dataclass(frozen=True, slots=True)
class View:
    """One of vLLM's metrics."""

    name: str
    """As in queries: with "_total" for a counter."""
    source: Instrument
    only: Labels | None = None
    """The last values of the labels that count; None: all do."""


VIEWS = (
    View("vllm:num_requests_running", engine.OUTPUTS_RUNNING),
    View("vllm:num_requests_waiting", engine.OUTPUTS_WAITING),
    View("vllm:kv_cache_usage_perc", engine.KV_USAGE),
    View("vllm:gpu_cache_usage_perc", engine.KV_USAGE),  # its name until vLLM 0.10
    View("vllm:prefix_cache_queries_total", engine.PREFIX_CACHE_QUERIED),
    View("vllm:prefix_cache_hits_total", engine.PREFIX_CACHE_HIT),
    View("vllm:num_preemptions_total", engine.PREEMPTIONS),
    View("vllm:prompt_tokens_total", engine.TOKENS_PROMPT),
    View("vllm:generation_tokens_total", engine.TOKENS_GENERATED),
    # A proposal has one token at the first position.
    View("vllm:spec_decode_num_drafts_total", engine.SPECULATION_PROPOSED, only=("1",)),
    View("vllm:spec_decode_num_draft_tokens_total", engine.SPECULATION_PROPOSED),
    View("vllm:spec_decode_num_accepted_tokens_total", engine.SPECULATION_ACCEPTED),
    View("vllm:request_success_total", engine.OUTPUTS_FINISHED),
    View("vllm:time_to_first_token_seconds", engine.TIME_TO_FIRST_TOKEN),
    View("vllm:inter_token_latency_seconds", engine.INTER_TOKEN_LATENCY),
    View("vllm:time_per_output_token_seconds", engine.INTER_TOKEN_LATENCY),  # its name until vLLM 0.11
    View("vllm:request_time_per_output_token_seconds", engine.TIME_PER_OUTPUT_TOKEN),
    View("vllm:e2e_request_latency_seconds", engine.REQUEST_DURATION),
    View("vllm:request_queue_time_seconds", engine.QUEUE_TIME),
    View("vllm:request_inference_time_seconds", engine.RUNNING_TIME),
    View("vllm:request_prefill_time_seconds", engine.PREFILL_TIME),
    View("vllm:request_decode_time_seconds", engine.DECODE_TIME),
    View("vllm:request_prompt_tokens", engine.PROMPT_TOKENS),
    View("vllm:request_generation_tokens", engine.GENERATED_TOKENS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLabels:
    """What vLLM's metrics say of the server in their labels."""

    model_name: str
    page_size: int
    """Tokens of one KV page."""
    num_pages: int
    has_prefix_cache: bool


def vllm_families(metrics: Iterable[Metric], labels: VllmLabels) -> Iterator[Family]:
    """Yield vLLM's metrics, made of ours when they are asked for. Those whose source is missing are left
    out.
    """
    by_name = {metric.instrument.name: metric for metric in metrics if metric.points}
    for view in VIEWS:
        if view.source.name in by_name:
            yield _family(view, by_name[view.source.name], labels)
    yield _cache_config(labels)


def _family(view: View, metric: Metric, labels: VllmLabels) -> Family:
    instrument = metric.instrument
    what = f"vLLM's name of {instrument.name}. {instrument.description}"
    made = Family(view.name.removesuffix("_total"), what, instrument.kind.value)
    values = (labels.model_name, _ENGINE)
    if instrument.name == engine.OUTPUTS_FINISHED.name:
        by_reason: dict[str, list[float | HistogramPoint]] = defaultdict(list)
        for (reason,), point in metric.points.items():
            by_reason[FINISHED_REASONS.get(reason, reason)].append(point)
        found: dict[Labels, float | HistogramPoint] = {
            (*values, reason): _sum(points) for reason, points in by_reason.items()
        }
        fill(made, (*_LABELS, FINISHED_REASON), found)
    else:
        only = view.only or ()
        points = [one for labels, one in metric.points.items() if labels[len(labels) - len(only) :] == only]
        fill(made, _LABELS, {values: _sum(points)}, instrument.buckets)
    return made


def _sum(points: Iterable[float | HistogramPoint]) -> float | HistogramPoint:
    found = list(points)
    histograms = [point for point in found if isinstance(point, HistogramPoint)]
    if len(found) == 1:
        return found[0]
    if not histograms:
        return sum(point for point in found if not isinstance(point, HistogramPoint))
    newest = (
        max((one for one in column if one is not None), key=lambda one: one.at_s, default=None)
        for column in zip(*(point.exemplars for point in histograms), strict=True)
    )
    return HistogramPoint(
        count=sum(point.count for point in histograms),
        sum=sum(point.sum for point in histograms),
        bucket_counts=tuple(map(sum, zip(*(point.bucket_counts for point in histograms), strict=True))),
        exemplars=tuple(newest),
    )


def _cache_config(labels: VllmLabels) -> Family:
    values: Mapping[str, str] = {
        "model_name": labels.model_name,
        "engine": _ENGINE,
        "block_size": str(labels.page_size),
        "num_gpu_blocks": str(labels.num_pages),
        "enable_prefix_caching": str(labels.has_prefix_cache),
    }
    made = Family(_CACHE_CONFIG, "Size of the KV cache: num_gpu_blocks pages of block_size tokens.", "info")
    points: Mapping[Labels, float] = {tuple(values.values()): 1.0}
    fill(made, tuple(values), points)
    return made
