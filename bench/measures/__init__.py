"""What is written down of a run, and the figures that are computed from it."""
