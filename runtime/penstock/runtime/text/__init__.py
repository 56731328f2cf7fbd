"""From text to token ids, and from the tokens of a request back to text."""
