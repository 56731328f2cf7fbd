"""From the engine's outputs to the contract's messages, and how many bytes of them may wait."""
