"""What the device holds for a runner: its state, the steps on their way, and calls of its programs."""
