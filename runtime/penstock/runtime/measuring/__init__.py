"""What is counted and measured of an engine and its service, without any library of telemetry. No jax."""
