"""What the native kernels reach alone, without a model."""
