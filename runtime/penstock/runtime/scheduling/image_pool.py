"""The pool of image embeddings: which blocks of rows hold which image. No jax: here a block is only a
number.

The pool is a cache by digest. An image stays until its blocks are needed for another one; the image that
was used longest ago goes first. Two kinds stay in any case: those that a sequence holds, because it has
computed a part of the image's tokens, and those that the plan in the making uses. An image that only
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
    """An image in the pool. Only the pool changes it."""

    __slots__ = ("blocks", "digest", "num_holders")

    def __init__(self, digest: bytes, blocks: tuple[int, ...]) -> None:
        self.digest = digest
        self.blocks = blocks
        """Block i holds the embeddings of the tokens [i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)."""
        self.num_holders = 0


class ImagePool:
    """Blocks 0 .. num_blocks - 1, each free or of one image."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block is at the end
        self._images: dict[bytes, Encoded] = {}  # the one that was used longest ago comes first
        self._planned: set[Encoded] = set()

    @property
    def num_images(self) -> int:
        """How many images are in the pool."""
        return len(self._images)

    def begin_plan(self) -> None:
        """Note that a new plan is made, which uses no image yet."""
        self._planned.clear()

    def find(self, digest: bytes) -> Encoded | None:
        """Return the image with this digest; None if it is not in the pool."""
        return self._images.get(digest)

    def has_room(self, num_tokens: int) -> bool:
        """Say whether an image of so many tokens can be added."""
        missing = blocks_of(num_tokens) - len(self._free)
        for image in self._images.values():
            if missing <= 0:
                break
            if not self._must_stay(image):
                missing -= len(image.blocks)
        return missing <= 0

    def use(self, image: Encoded) -> None:
        """Note that the plan in the making uses an image of the pool."""
        self._planned.add(image)
        del self._images[image.digest]
        self._images[image.digest] = image

    def add(self, digest: bytes, num_tokens: int) -> Encoded:
        """Take blocks for an image that the plan in the making encodes and uses. RuntimeError if there is
        no room, or if the image is in the pool.
        """
        if digest in self._images or not self.has_room(num_tokens):
            raise RuntimeError(
                f"an image of {num_tokens} tokens is in the pool already, or has no room there"
            )
        wanted = blocks_of(num_tokens)
        for image in list(self._images.values()):
            if len(self._free) >= wanted:
                break
            if not self._must_stay(image):
                self._remove(image)
        blocks = tuple(self._free.pop() for _ in range(wanted))
        added = self._images[digest] = Encoded(digest, blocks)
        self._planned.add(added)
        return added

    def hold(self, image: Encoded) -> None:
        """Add a holder, for whom the image stays."""
        image.num_holders += 1

    def let_go(self, image: Encoded) -> None:
        """Take a holder away."""
        image.num_holders -= 1

    def forget(self) -> None:
        """Remove all images, for example because the weights have changed. Nobody may hold one."""
        for image in list(self._images.values()):
            self._remove(image)
        self._planned.clear()

    def _must_stay(self, image: Encoded) -> bool:
        return image.num_holders > 0 or image in self._planned

    def _remove(self, image: Encoded) -> None:
        del self._images[image.digest]
        self._free.extend(reversed(image.blocks))

    def check(self, held: Iterable[Encoded]) -> None:
        """Check all invariants against the images that sequences hold, for tests; the AssertionError says
        what is wrong.
        """
        images = self._images.values()
        blocks = [*self._free, *(block for image in images for block in image.blocks)]
        if sorted(blocks) != list(range(self.num_blocks)):
            raise AssertionError(f"the blocks {sorted(blocks)} are not all there, each once")
        holders = Counter(held)
        if any(image.num_holders != holders.pop(image, 0) for image in images) or holders:
            raise AssertionError("an image that is held is not in the pool, or its holders were miscounted")
