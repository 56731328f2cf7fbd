"""A storm of faults against a real server: see `python -m tests.storm --help`."""
