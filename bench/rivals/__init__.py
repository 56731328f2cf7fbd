"""Other engines on the same workloads; see bench/README.md. Each runs in an environment of its own."""
