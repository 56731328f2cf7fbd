"""Chat: conversations to prompts, and outputs back to words, reasoning and tool calls. No jax.

`messages` holds the values, `template` renders them, `parser` chooses forms and parses outputs, `enforce`
writes the grammar of calls that must be made. docs/reference/chat.md tells the rules.
"""
