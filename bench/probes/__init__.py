"""One program for each question about speed or accuracy that is no workload."""
