"""Makes the Grafana dashboard of deploy/observability/: `python -m tools.dashboard` writes it."""
