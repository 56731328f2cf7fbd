"""Metrics on their way out: a port for Prometheus, an OTLP push, and what the service itself measures."""
