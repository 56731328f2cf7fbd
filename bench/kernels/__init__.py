"""What the native kernels reach alone, beside the machine's limits."""
