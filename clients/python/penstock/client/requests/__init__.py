"""From keyword arguments to the contract's requests."""
