"""Says what a model takes on chips that are not there: their memory, the least time of a step, and what XLA
makes of the engine's programs for them.
"""
