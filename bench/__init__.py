"""Benchmarks of the engine and its server; see bench/README.md."""
