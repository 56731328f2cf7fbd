"""Structured output: grammars a request may ask for, compiled by llguidance to masks over tokens. No jax.

1. `spec.Grammar` is what was asked: a kind and its source, checked for size.
2. `compiler.GrammarCompiler`, one per model, makes a `CompiledGrammar` of it, in bounded time.
3. `CompiledGrammar.constraint()` is a `TokenConstraint` for one output (`matcher`).
4. `bad_words.BadWords` forbids sequences of tokens, alone or on top of a grammar.
5. `fill.MaskFiller` fills the masks of many rows at once.

docs/reference/grammars.md says what each kind accepts, and the limits.
"""
