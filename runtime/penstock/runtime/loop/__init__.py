"""The engine's thread: it schedules steps, has them run, hands their outputs out and puts new weights in.
No jax.
"""
