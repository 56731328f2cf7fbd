"""LoRA adapters of random values for a checkpoint, and what they cost. Each module is a command."""
