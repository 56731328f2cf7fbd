"""From conversations to prompts, and from outputs to words, reasoning and calls (docs/reference/chat.md).
No jax.
"""
