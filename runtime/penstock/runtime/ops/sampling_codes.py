"""Numbers that the sampler, in XLA and in C++ (native/src/sample/sample_codes.h), shares with its callers."""

from __future__ import annotations

PENALTIES, BIAS, MASK, SAMPLING, LOGPROBS, BANNED = (1 << i for i in range(6))
"""Bits of a row's `features`, and of a step's flags, which have every bit that any of its rows has. A row's
history, bias or mask is looked at only if the row has the bit for it."""
IN_PROMPT = 1 << 30
"""Added to a token's count of occurrences in the output if the token is in the prompt."""
NON_FINITE = -2
"""Stands for a token if the row's logits hold a NaN, or their maximum is not finite."""
