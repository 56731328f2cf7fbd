"""Structured output: the grammars that a request may ask for, which llguidance compiles to masks over tokens.
No jax.

1. `requests.grammar.Grammar` is what was asked for: a kind and its source, with its size checked.
2. `compile.compiler.GrammarCompiler`, one per model, makes a `CompiledGrammar` of it, in bounded time.
3. `CompiledGrammar.constraint()` is a `TokenConstraint` for one output (`matcher`).
4. `bad_words.BadWords` forbids sequences of tokens, alone or on top of a grammar.
5. `masks` fills the masks of many rows, on threads of its own.

docs/reference/grammars.md says what each kind accepts, and the limits.

A complete grammar ends the output, also before min_tokens. A required call of a tool is a grammar like any
other, and on a chat every grammar is wrapped in one that lets the model think first (`chat.enforce`).
"""
