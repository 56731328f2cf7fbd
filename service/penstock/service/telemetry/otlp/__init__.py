"""Sends spans and metrics to a collector, by OpenTelemetry's protocol (OTLP)."""
