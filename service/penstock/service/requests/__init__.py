"""From the contract's messages to values that were checked field by field."""
