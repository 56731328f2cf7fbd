"""The RPCs of the contract: generation, control and reflection."""
