"""The prefix cache: whose KV pages another request may share. No jax.

A full page is known by a key chained over all that tells its KV from another's, but for the weights:
key(i) = hash(key(i - 1), tokens of page i), from a root of salt and adapter. (The chain is vLLM's idea; keyed
hashing answers collisions made on purpose.) New weights flush the cache instead, so a prompt's keys never
change: whoever submits it makes them (`keys_of`), outside the engine's lock. Tokens are not compared: the
hash is BLAKE2b with a secret of this process and 128 bits, so that two prefixes with one key neither happen
nor can be searched for.

Which pages may have a key: their KV is written by a step that is dispatched, all their tokens are known, and
nobody writes them again. A prefill's pages are published when the chunk that fills them is scheduled. Even a
row of the same step may share them: the attention op writes all KV of a step before it reads any. Pages of
generated tokens are published at commit; what is still in flight, even of a row past its end, writes behind
the last committed token. Whoever shares, shares full pages before its own first input, so no shared page is
written.

Requests that arrive together share too: a running prefill promises the keys of the pages it is going to
publish, and who needs a promised page next waits for it instead of computing it again. It waits for the last
page that both have in common, and is told when that is published, or when the promise falls.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b

from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.pages import PagePool
from penstock.runtime.scheduling.sequence import NEVER, Sequence
from penstock.runtime.scheduling.waiting import Waiting

_KEY_BYTES = 16


class PrefixCache:
    """Keys of sequences over one pool. Switched off, it finds and promises nothing."""

    def __init__(
        self, pool: PagePool, waiting: Waiting, *, enabled: bool = True, secret: bytes | None = None
    ) -> None:
        """`waiting` is told which keys were published and which never will be. `secret` (1 to 64 bytes): the
        hash's key; None draws one.
        """
        self._pool = pool
        self._waiting = waiting
        self._enabled = enabled
        self._secret = secret or secrets.token_bytes(32)
        self._latest: Sequence | None = None  # the last that entered and publishes
        self._promising: dict[Sequence, None] = {}  # running prefills with pages to publish, oldest first

    def keys_of(self, request: Request) -> list[bytes]:
        """The keys of the full pages of a prompt; none if it will share nothing. May be called from any
        thread, and takes about a millisecond for 16,000 tokens.
        """
        keys: list[bytes] = []
        if self._enabled and not request.cache.bypass:
            self._extend(keys, request, request.prompt_token_ids)
        return keys

    def match(self, seq: Sequence) -> list[int]:
        """The pages that hold the longest cached prefix of a waiting sequence, not retained yet.

        What it has in common with the sequence that entered last need not be looked up: of many that wait
        for one prefix, only the first is.
        """
        keys, latest = self._shareable_keys(seq), self._latest
        pages: list[int] = []
        if keys and latest is not None and latest.is_shareable and not latest.num_dropped:
            pages = latest.pages[: _num_common(keys, latest.page_keys, min(len(keys), latest.published))]
        lookup = self._pool.lookup
        for key in keys[len(pages) :]:
            page = lookup(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def promised(self, seq: Sequence, num_found: int) -> bytes | None:
        """The key to wait for, if a running prefill of no lower priority is about to publish the page that
        comes after the `num_found` that `match` has found: that of the last page they have in common.
        """
        keys = self._shareable_keys(seq)
        if num_found >= len(keys):
            return None
        for other in self._promising:
            theirs = other.page_keys
            end = min(len(keys), other.prefill_until // self._pool.page_size)
            is_due = other.published <= num_found < end
            if is_due and theirs[num_found] == keys[num_found] and other.rank[0] <= seq.rank[0]:
                return keys[_num_common(keys, theirs, end) - 1]
        return None

    def begin(self, seq: Sequence, num_shared: int) -> None:
        """A sequence enters with that many shared pages."""
        seq.published, seq.is_shareable = num_shared, True
        if self._enabled and not seq.request.cache.bypass:
            page_size = self._pool.page_size
            self._extend(seq.page_keys, seq.request, seq.token_ids)
            seq.publish_at = (num_shared + 1) * page_size
            self._latest = seq
            if num_shared < seq.prefill_until // page_size:
                self._promising[seq] = None

    def publish(self, seq: Sequence, end: int) -> None:
        """The KV of all positions below `end` is written once the dispatched steps have run, and these tokens
        are known. To be called when `end` is at least `seq.publish_at`.
        """
        keys = seq.page_keys
        until = end // self._pool.page_size
        if until > len(keys):
            self._extend(keys, seq.request, seq.token_ids)
        for index in range(seq.published, until):
            self._pool.publish(seq.pages[index], keys[index])
        if self._waiting.any_aside:
            for index in range(seq.published, until):
                self._waiting.happened(keys[index])
        seq.published = until
        seq.publish_at = (until + 1) * self._pool.page_size
        if seq in self._promising and until >= seq.prefill_until // self._pool.page_size:
            del self._promising[seq]

    def leave(self, seq: Sequence) -> None:
        """A sequence stops running, or has KV of before a flush: it shares no more, and will not keep its
        promises.
        """
        seq.publish_at, seq.is_shareable = NEVER, False
        if seq is self._latest:
            self._latest = None
        if seq in self._promising:
            del self._promising[seq]
            if self._waiting.any_aside:
                for key in seq.page_keys[seq.published :]:
                    self._waiting.happened(key)
        self._waiting.happened(seq)

    def flush(self) -> tuple[int, int]:
        """Forget everything; from now on it is the KV of other weights, if you like. Returns what
        `PagePool.forget_keys` does.

        Who is running must `leave`: with KV of before the flush they publish nothing.
        """
        return self._pool.forget_keys()

    def _shareable_keys(self, seq: Sequence) -> list[bytes]:
        """The keys of the pages that a waiting sequence may share. The page of its last token is never among
        them, because that token must be computed. There are none while log-probabilities of the prompt are
        needed: cached pages do not store them.
        """
        if not self._enabled or seq.request.cache.bypass or seq.needs_whole_prompt:
            return []
        num_pages = (len(seq.token_ids) - 1) // self._pool.page_size
        keys = seq.page_keys
        if len(keys) < num_pages:
            self._extend(keys, seq.request, seq.token_ids)
        return keys if len(keys) == num_pages else keys[:num_pages]

    def _extend(self, keys: list[bytes], request: Request, token_ids: list[int] | tuple[int, ...]) -> None:
        """Appends what `keys` lacks of the full pages of these tokens."""
        page_size = self._pool.page_size
        first, last = len(keys), len(token_ids) // page_size
        if first < last:
            parent = keys[-1] if keys else self._root(request)
            tokens = array("i", token_ids[first * page_size : last * page_size])
            data, width = tokens.tobytes(), tokens.itemsize * page_size
            for at in range(0, len(data), width):
                parent = self._hash(parent + data[at : at + width])
                keys.append(parent)

    def _root(self, request: Request) -> bytes:
        adapter = ""  # there are none yet
        text = f"{len(adapter)}:{adapter}{request.cache.salt}"
        return self._hash(text.encode(errors="surrogatepass"))

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_KEY_BYTES, key=self._secret).digest()


def _num_common(keys: list[bytes], others: list[bytes], most: int) -> int:
    """How many of the first `most` keys are equal: chained as they are, up to some page all, then none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if keys[middle - 1] == others[middle - 1] else (low, middle - 1)
    return low
