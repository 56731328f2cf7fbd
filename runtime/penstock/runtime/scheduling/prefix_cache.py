"""The prefix cache: finds KV pages of earlier requests that another request may share. No jax.

Keys. A full page has a key that stands for everything its KV depends on, except the weights: key(i) =
hash(key(i - 1), tokens of page i), where key(-1) is made of the salt and the adapter's content. (Chained
keys are vLLM's idea; hashing with a secret protects from collisions made on purpose.) New weights flush the
cache, so the keys of a prompt never change, and the thread that submits it can make them (`keys_of`) outside
the engine's lock. Tokens are not compared: the hash is BLAKE2b of 128 bits with a secret of this process, so
equal keys for different prefixes neither happen by chance nor can be searched for.

The keys of pages with tokens of images also depend on the images, because these tokens are all equal.

Which pages may have a key. All of this must hold: a dispatched step writes their KV, all their tokens are
known, and nothing writes them again. The pages of a prefill are published when the chunk that fills them is
scheduled. Even rows of the same step may share them, because the attention operation writes all KV of a step
before it reads any. Pages of generated tokens are published at commit; tokens still in flight, even of a row
past its end, are written behind the last committed token. A sequence shares only full pages before its own
first input, so no shared page is written.

Groups. A page's key is the same in all groups of layers, each of which has its own page for it. A sequence
may begin with m pages if the group without a window has all m of them, and each group with a window has those
that the window reaches back to from there. The longest such m is taken.

Promises. Requests that arrive together share too. A running prefill promises the keys of the pages that it is
going to publish; a sequence that needs a promised page next waits for it instead of computing it again. It
waits for the last page that both have in common, until that is published or the promise falls.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b

from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.pages import FlushedPages, PageGroups, Prefix
from penstock.runtime.scheduling.sequence import NEVER, Sequence
from penstock.runtime.scheduling.snapshots import Snapshots
from penstock.runtime.scheduling.waiting import Waiting

_KEY_BYTES = 16


class PrefixCache:
    """Finds and publishes the pages of sequences in their groups. Without `enabled` it finds and promises
    nothing.
    """

    def __init__(
        self,
        groups: PageGroups,
        waiting: Waiting,
        snapshots: Snapshots | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        """Take as `waiting` what is told which keys were published, and which never will be. `snapshots` are
        those of a model with recurrent state.
        """
        self._groups = groups
        self._snapshots = snapshots
        self._page_size = groups.page_size
        self._waiting = waiting
        self._enabled = enabled
        self._secret = secrets.token_bytes(32)  # the key of the hash
        self._latest: Sequence | None = None  # the sequence that entered last and publishes
        self._promising: dict[Sequence, None] = {}  # running prefills with pages to publish, oldest first

    def serves(self, request: Request) -> bool:
        """Say whether a request may share pages by this cache, and adds its own to it."""
        return self._enabled and not request.cache.bypass

    def keys_of(self, request: Request) -> list[bytes]:
        """Compute the keys of the full pages of a prompt; none if the request will share nothing. May be
        called from any thread, and takes about a millisecond for 16,000 tokens.
        """
        keys: list[bytes] = []
        if self.serves(request):
            self._extend(keys, request, request.prompt_token_ids)
        return keys

    def match(self, seq: Sequence) -> Prefix:
        """Find the longest cached prefix of a waiting sequence. Its pages are not retained yet."""
        keys, (first, *others) = self._shareable_keys(seq), self._groups.all
        if first.window is None:
            pages = self._longest_run(keys, seq)
            if not others and self._snapshots is None:
                return Prefix((pages,), len(pages) * self._page_size)
            num_pages = len(pages)
        else:
            num_pages = len(keys)
        num_found = num_pages = self._last_end(keys, num_pages)
        snapshot = None
        if self._snapshots is not None:
            while num_pages:
                end = self._last_end(keys, self._snapshots.last_end(keys, num_pages))
                if end == num_pages:
                    snapshot = self._snapshots.find(keys[num_pages - 1])
                    break
                num_pages = end
        found = tuple(group.find(keys, num_pages) for group in self._groups.windowed)
        if first.window is None:
            found = (pages[:num_pages], *found)
        beyond = num_found if num_found > num_pages else 0
        return Prefix(found, num_pages * self._page_size, snapshot, beyond)

    def _last_end(self, keys: list[bytes], num_pages: int) -> int:
        """Return the largest m up to `num_pages` for which each group with a window has all pages, by their
        `keys`, that it reaches back to from there.
        """
        windowed = self._groups.windowed
        while num_pages and windowed:
            end = min(group.last_end(keys, num_pages) for group in windowed)
            if end == num_pages:
                break
            num_pages = end
        return num_pages

    def _longest_run(self, keys: list[bytes], seq: Sequence) -> list[int]:
        """Return the pages of the first group, which has no window, that hold the longest prefix with these
        keys.

        The part that the sequence has in common with the one that entered last is taken from there, without
        look-ups: when many sequences wait for one prefix, only the first is looked up.
        """
        latest = self._latest
        pages: list[int] = []
        if keys and latest is not None and latest.sharing.is_shareable:
            theirs = latest.sharing
            num_common = _num_common(keys, theirs.keys, min(len(keys), theirs.num_published))
            pages = latest.tables[0].pages[:num_common]
        lookup = self._groups.pools[0].lookup
        for key in keys[len(pages) :]:
            page = lookup(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def promised(self, seq: Sequence, num_found: int) -> bytes | None:
        """Return the key to wait for, if a running prefill of no lower priority is about to publish the page
        after the `num_found` pages that `match` has found: the key of the last page that both have in common.
        None if there is no such prefill.
        """
        keys = self._shareable_keys(seq)
        if num_found >= len(keys):
            return None
        for other in self._promising:
            theirs = other.sharing
            end = min(len(keys), other.prefill_until // self._page_size)
            # Where there are snapshots, a page behind those that were found may be published already.
            is_due = num_found < end and (theirs.num_published <= num_found or self._snapshots is not None)
            if is_due and theirs.keys[num_found] == keys[num_found] and other.rank[0] <= seq.rank[0]:
                common = _num_common(keys, theirs.keys, end)
                if theirs.num_published < common:
                    return keys[common - 1]
        return None

    def begin(self, seq: Sequence, num_shared: int) -> None:
        """Note that a sequence enters with this many shared pages."""
        sharing = seq.sharing
        sharing.num_published, sharing.is_shareable = num_shared, True
        if self.serves(seq.request):
            page_size = self._page_size
            self._extend(sharing.keys, seq.request, seq.token_ids)
            sharing.publish_at = (num_shared + 1) * page_size
            self._latest = seq
            if num_shared < seq.prefill_until // page_size:
                self._promising[seq] = None

    def publish(self, seq: Sequence, end: int) -> None:
        """Publish the full pages of a sequence below position `end`: their tokens are known, and their KV
        is written once the dispatched steps have run. To be called when `end` is at least `publish_at`.
        """
        sharing, keys = seq.sharing, seq.sharing.keys
        until = end // self._page_size
        if until > len(keys):
            self._extend(keys, seq.request, seq.token_ids)
        self._groups.publish(seq, keys, sharing.num_published, until)
        if self._waiting.any_aside:
            for index in range(sharing.num_published, until):
                self._waiting.happened(keys[index])
        sharing.num_published = until
        sharing.publish_at = (until + 1) * self._page_size
        if seq in self._promising and until >= seq.prefill_until // self._page_size:
            del self._promising[seq]

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence stops running, or that its KV is older than a flush: it shares no more pages,
        and its promises fall.
        """
        sharing = seq.sharing
        sharing.publish_at, sharing.is_shareable = NEVER, False
        if seq is self._latest:
            self._latest = None
        if seq in self._promising:
            del self._promising[seq]
            if self._waiting.any_aside:
                for key in sharing.keys[sharing.num_published :]:
                    self._waiting.happened(key)
        self._waiting.happened(seq)

    def flush(self) -> FlushedPages:
        """Forget all prefixes, for example because the weights have changed. Running sequences must `leave`
        before: they hold KV from before the flush, and must not publish it.
        """
        return self._groups.forget_keys()

    def _shareable_keys(self, seq: Sequence) -> list[bytes]:
        """Return the keys of the pages that a waiting sequence may share. They never cover its last token,
        which must be computed, nor what is needed for log-probabilities or an embedding of its prompt,
        because cached pages do not store them.
        """
        if not self.serves(seq.request):
            return []
        num_pages = min(seq.of_prompt.first_needed, len(seq.token_ids) - 1) // self._page_size
        keys = seq.sharing.keys
        if len(keys) < num_pages:
            self._extend(keys, seq.request, seq.token_ids)
        return keys if len(keys) == num_pages else keys[:num_pages]

    def _extend(self, keys: list[bytes], request: Request, token_ids: list[int] | tuple[int, ...]) -> None:
        """Append the missing keys of the full pages of these tokens."""
        page_size = self._page_size
        first, last = len(keys), len(token_ids) // page_size
        if first < last:
            parent = keys[-1] if keys else self._root(request)
            tokens = array("i", token_ids[first * page_size : last * page_size])
            data, width = tokens.tobytes(), tokens.itemsize * page_size
            for index, at in enumerate(range(0, len(data), width), first):
                images = _images_of(request, index * page_size, page_size) if request.media else b""
                parent = self._hash(parent + data[at : at + width] + images)
                keys.append(parent)

    def _root(self, request: Request) -> bytes:
        adapter = request.adapter_digest
        text = f"{len(adapter)}:{adapter}{request.cache.salt}"
        return self._hash(text.encode(errors="surrogatepass"))

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_KEY_BYTES, key=self._secret).digest()


def _images_of(request: Request, start: int, page_size: int) -> bytes:
    """Return what a page from position `start` on has of images: their digests, and where they begin in
    it.
    """
    return b"".join(
        item.digest + (item.start - start).to_bytes(8, "little", signed=True)
        for item in request.media
        if item.start < start + page_size and item.end > start
    )


def _num_common(keys: list[bytes], others: list[bytes], most: int) -> int:
    """Tell how many of the first `most` keys are equal in both lists. Keys are chained, so after the first
    difference all differ, and a binary search finds it.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if keys[middle - 1] == others[middle - 1] else (low, middle - 1)
    return low
