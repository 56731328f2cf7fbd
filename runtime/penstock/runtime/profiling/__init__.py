"""Profiles: what the host and the device do during some steps, recorded by JAX's profiler."""
