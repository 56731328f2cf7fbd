"""Numbers in English words."""

from __future__ import annotations

from tools.demo_model.phrases import words


def in_words(number: int) -> str:
    """Write 0..999 in words; 41 -> "forty-one"."""
    ones_words = words("ones")
    if number < 20:
        return ones_words[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return words("tens")[tens - 2] + (f"-{ones_words[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{ones_words[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
