"""The prefix cache: whose KV pages another request may share. No jax.

A full page is known by a key chained over everything its KV depends on: key(i) = hash(key(i - 1), tokens of
page i), from a root of salt, adapter and weights generation. (The chain is vLLM's idea; keyed hashing answers
collisions made on purpose.) Tokens are not compared: the hash is BLAKE2b with a secret of this process and
128 bits, so that two prefixes with one key neither happen nor can be searched for.

Which pages may have a key: their KV is written by a step that is dispatched, all their tokens are known, and
nobody writes them again. A prefill's pages are published when the chunk that fills them is scheduled. Even a
row of the same step may share them: the attention op writes all KV of a step before it reads any. Pages of
generated tokens are published at commit; what is still in flight, even of a row past its end, writes behind
the last committed token. Whoever shares, shares full pages before its own first input, so no shared page is
written.

Requests that arrive together share too: a running prefill promises the keys of the pages it is going to
publish, and who needs a promised page next waits for it instead of computing it again.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b

from penstock.runtime.pages import PagePool
from penstock.runtime.sequence import NEVER, Sequence

_KEY_BYTES = 16


class PrefixCache:
    """Keys of sequences over one pool. Switched off, it finds and promises nothing."""

    def __init__(self, pool: PagePool, *, enabled: bool = True, secret: bytes | None = None) -> None:
        """`secret` (1 to 64 bytes): the hash's key; None draws one."""
        self._pool = pool
        self._enabled = enabled
        self._secret = secret or secrets.token_bytes(32)
        self._generation = 0
        self._promised: dict[bytes, Sequence] = {}

    def match(self, seq: Sequence) -> list[int]:
        """The pages that hold the longest cached prefix of a waiting sequence, not retained yet.

        At least its last token is left to compute; all of its prompt, while log-probabilities of that are
        wanted: a cached page has none. Notes in `seq.awaits` the key of the next page, if there
        is one that could be shared.
        """
        seq.awaits = None
        if not self._enabled or seq.request.cache.bypass or seq.needs_whole_prompt:
            return []
        pages: list[int] = []
        for key in self._keys(seq)[: (len(seq.token_ids) - 1) // self._pool.page_size]:
            page = self._pool.lookup(key)
            if page is None:
                seq.awaits = key
                break
            pages.append(page)
        return pages

    def is_promised(self, seq: Sequence) -> bool:
        """Whether a running prefill, of no lower priority, is about to publish what `match` did not find."""
        if seq.awaits is None:
            return False
        promiser = self._promised.get(seq.awaits)
        return promiser is not None and promiser.rank[0] <= seq.rank[0]

    def begin(self, seq: Sequence, num_shared: int) -> None:
        """A sequence enters with that many shared pages."""
        seq.published, seq.is_shareable = num_shared, True
        if self._enabled and not seq.request.cache.bypass:
            seq.publish_at = (num_shared + 1) * self._pool.page_size

    def promise(self, seq: Sequence) -> None:
        """A prefill will publish what full pages it has not yet."""
        if seq.publish_at != NEVER:
            keys = self._keys(seq)
            for key in keys[seq.published : seq.prefill_until // self._pool.page_size]:
                self._promised.setdefault(key, seq)

    def publish(self, seq: Sequence, end: int) -> None:
        """The KV of all positions below `end` is written once the dispatched steps have run, and these tokens
        are known. To be called when `end` is at least `seq.publish_at`.
        """
        keys = self._keys(seq)
        until = end // self._pool.page_size
        for index in range(seq.published, until):
            self._pool.publish(seq.pages[index], keys[index])
            if self._promised:
                self._promised.pop(keys[index], None)
        seq.published = until
        seq.publish_at = (until + 1) * self._pool.page_size

    def leave(self, seq: Sequence) -> None:
        """A sequence stops running, or has KV of before a flush: it shares no more, and will not keep its
        promises.
        """
        seq.publish_at, seq.is_shareable = NEVER, False
        if self._promised:
            for key in seq.page_keys[seq.published :]:
                if self._promised.get(key) is seq:
                    del self._promised[key]

    def flush(self, generation: int) -> tuple[int, int]:
        """Forget everything; from now on it is the KV of this generation of weights. Returns what
        `PagePool.forget_keys` does.

        Who is running must `leave`: with KV of before the flush they publish nothing.
        """
        self._generation = generation
        self._promised.clear()
        return self._pool.forget_keys()

    def _keys(self, seq: Sequence) -> list[bytes]:
        """The keys of all full pages of the tokens known now."""
        keys = seq.page_keys
        if seq.keys_generation != self._generation:
            keys.clear()
            seq.keys_generation = self._generation
        page_size = self._pool.page_size
        first, last = len(keys), len(seq.token_ids) // page_size
        if first < last:
            parent = keys[-1] if keys else self._root(seq)
            tokens = array("i", seq.token_ids[first * page_size : last * page_size])
            data, width = tokens.tobytes(), tokens.itemsize * page_size
            for at in range(0, len(data), width):
                parent = self._hash(parent + data[at : at + width])
                keys.append(parent)
        return keys

    def _root(self, seq: Sequence) -> bytes:
        adapter = ""  # there are none yet
        salt = seq.request.cache.salt
        text = f"{self._generation}:{len(adapter)}:{adapter}{salt}"
        return self._hash(text.encode(errors="surrogatepass"))

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_KEY_BYTES, key=self._secret).digest()
