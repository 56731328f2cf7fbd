"""LoRA adapters: small changes of a model's weights, which requests name, and many of which serve at once."""
