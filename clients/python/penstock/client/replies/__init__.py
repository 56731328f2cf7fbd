"""From the contract's replies and streams to the client's values."""
