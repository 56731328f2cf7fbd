"""What operators see of a running server: traces, and one line in the log for each refusal."""
