"""Structured output: the masks over tokens that keep an output in the grammar that its request asks for.

llguidance makes them; docs/reference/grammars.md says what each kind of grammar accepts.
No jax.
"""
