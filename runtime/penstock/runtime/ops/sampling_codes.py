"""Numbers that the sampler, in XLA and in C++ (ops/native/src/sample/sample_row.h), shares with those who
call it.
"""

from __future__ import annotations

PENALTIES, BIAS, MASK, SAMPLING, LOGPROBS, BANNED = (1 << i for i in range(6))
"""Bits of a row's `features`, and of a step's flags, which have each bit that any of its rows has. A row's
history, bias or mask is not looked at without its bit."""
IN_PROMPT = 1 << 30
"""Added to a token's count of occurrences in the output if it is in the prompt."""
NON_FINITE = -2
"""Stands for a token where the row's logits hold a NaN, or their maximum is not finite."""
