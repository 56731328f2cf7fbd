"""The pool of picture embeddings: which blocks of rows hold which picture. No jax: here a block is only a
number.

The pool is a cache by digest. A picture stays until its blocks are needed for another one; the picture that
was used longest ago goes first. Two kinds stay in any case: those that a sequence holds, because it has
computed a part of the picture's tokens, and those that the plan in the making uses. A picture that only
earlier plans use may go although they are not computed yet, because the device runs them first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

BLOCK_TOKENS = 32
"""Rows of a block, each of which is the embedding of one token."""


def blocks_of(num_tokens: int) -> int:
    """Tell how many blocks hold the embeddings of so many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class Encoded:
    """A picture in the pool. Only the pool changes it."""

    __slots__ = ("blocks", "digest", "num_holders")

    def __init__(self, digest: bytes, blocks: tuple[int, ...]) -> None:
        self.digest = digest
        self.blocks = blocks
        """Block i holds the embeddings of the tokens [i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)."""
        self.num_holders = 0


class PicturePool:
    """Blocks 0 .. num_blocks - 1, each free or of one picture."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block is at the end
        self._pictures: dict[bytes, Encoded] = {}  # the one that was used longest ago comes first
        self._planned: set[Encoded] = set()

    @property
    def num_pictures(self) -> int:
        """How many pictures are in the pool."""
        return len(self._pictures)

    def begin_plan(self) -> None:
        """Note that a new plan is made, which uses no picture yet."""
        self._planned.clear()

    def find(self, digest: bytes) -> Encoded | None:
        """Return the picture with this digest; None if it is not in the pool."""
        return self._pictures.get(digest)

    def has_room(self, num_tokens: int) -> bool:
        """Say whether a picture of so many tokens can be added."""
        missing = blocks_of(num_tokens) - len(self._free)
        for picture in self._pictures.values():
            if missing <= 0:
                break
            if not self._must_stay(picture):
                missing -= len(picture.blocks)
        return missing <= 0

    def use(self, picture: Encoded) -> None:
        """Note that the plan in the making uses a picture of the pool."""
        self._planned.add(picture)
        del self._pictures[picture.digest]
        self._pictures[picture.digest] = picture

    def add(self, digest: bytes, num_tokens: int) -> Encoded:
        """Take blocks for a picture that the plan in the making encodes and uses. RuntimeError if there is
        no room, or if the picture is in the pool.
        """
        if digest in self._pictures or not self.has_room(num_tokens):
            raise RuntimeError(
                f"a picture of {num_tokens} tokens is in the pool already, or has no room there"
            )
        wanted = blocks_of(num_tokens)
        for picture in list(self._pictures.values()):
            if len(self._free) >= wanted:
                break
            if not self._must_stay(picture):
                self._remove(picture)
        blocks = tuple(self._free.pop() for _ in range(wanted))
        added = self._pictures[digest] = Encoded(digest, blocks)
        self._planned.add(added)
        return added

    def hold(self, picture: Encoded) -> None:
        """Add a holder, for whom the picture stays."""
        picture.num_holders += 1

    def let_go(self, picture: Encoded) -> None:
        """Take a holder away."""
        picture.num_holders -= 1

    def forget(self) -> None:
        """Remove all pictures, for example because the weights have changed. Nobody may hold one."""
        for picture in list(self._pictures.values()):
            self._remove(picture)
        self._planned.clear()

    def _must_stay(self, picture: Encoded) -> bool:
        return picture.num_holders > 0 or picture in self._planned

    def _remove(self, picture: Encoded) -> None:
        del self._pictures[picture.digest]
        self._free.extend(reversed(picture.blocks))

    def check(self, held: Iterable[Encoded]) -> None:
        """Check all invariants against the pictures that sequences hold, for tests; the AssertionError says
        what is wrong.
        """
        pictures = self._pictures.values()
        blocks = [*self._free, *(block for picture in pictures for block in picture.blocks)]
        if sorted(blocks) != list(range(self.num_blocks)):
            raise AssertionError(f"the blocks {sorted(blocks)} are not all there, each once")
        holders = Counter(held)
        if any(picture.num_holders != holders.pop(picture, 0) for picture in pictures) or holders:
            raise AssertionError("a picture that is held is not in the pool, or its holders were miscounted")
