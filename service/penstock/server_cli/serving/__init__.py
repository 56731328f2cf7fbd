"""The options of `penstock serve`, in groups, and the form of its log lines."""
