"""Compiles grammars in bounded time and memory, after a trial in a process of its own."""
