"""What OpenTelemetry's SDK is given by flags and environment variables: what decides which calls are
recorded, and what telemetry says about its sender. ConfigErrors are as in `environment`.
"""

from __future__ import annotations

import os

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import sampling

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.options import TracingOptions
from penstock.service.telemetry.otlp.environment import Environ, named_values, number_in

RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
_SAMPLERS = {
    "always_on": sampling.ALWAYS_ON,
    "always_off": sampling.ALWAYS_OFF,
    "parentbased_always_on": sampling.DEFAULT_ON,
    "parentbased_always_off": sampling.DEFAULT_OFF,
}
_RATIO_SAMPLERS = {
    "traceidratio": sampling.TraceIdRatioBased,
    "parentbased_traceidratio": sampling.ParentBasedTraceIdRatio,
}


def sampler(options: TracingOptions, environ: Environ = os.environ) -> sampling.Sampler:
    """Make what decides which calls are recorded. By default all are, unless the caller has decided."""
    if options.trace_sample_ratio is not None:
        return sampling.ParentBasedTraceIdRatio(options.trace_sample_ratio)
    variable, argument = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
    name = environ.get(variable, "").strip().lower() or "parentbased_always_on"
    if name in _SAMPLERS:
        return _SAMPLERS[name]
    if name not in _RATIO_SAMPLERS:
        raise ConfigError(f"{variable}: must be of {', '.join((*_SAMPLERS, *_RATIO_SAMPLERS))}, not {name!r}")
    text = environ.get(argument, "").strip() or "1"
    ratio = number_in(text)
    if ratio is None or not 0 <= ratio <= 1:
        raise ConfigError(f"{argument}: must be from 0 to 1, not {text!r}")
    return _RATIO_SAMPLERS[name](ratio)


def service_resource(*, version: str, instance_id: str, environ: Environ = os.environ) -> Resource:
    """Say what telemetry says about its sender. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override the
    name and the version; only the instance is always `instance_id`, because GetServerInfo answers with it.
    """
    given = dict(named_values(RESOURCE, environ.get(RESOURCE, "")))
    if environ.get("OTEL_SERVICE_NAME"):
        given["service.name"] = environ["OTEL_SERVICE_NAME"]
    named = {"service.name": "penstock", "service.version": version}
    return Resource.create({**named, **given, "service.instance.id": instance_id})
