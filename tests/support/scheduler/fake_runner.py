"""A runner on Python lists, which does what the compiled steps do, without jax, for the scheduler's tests.

At each position its KV cache stores, for each group of layers, the token and a digest of all tokens up to it.
The digest is computed from the one that the cache holds for the position before, as a model's KV depends on
the whole prefix. Each group reads its history, or what its window leaves of it, back through its page table.
So a wrong page, position, order, length or prefix makes a wrong token, and reading a place that was never
written fails.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from zlib import crc32

import numpy as np

from penstock.runtime.loop.interface import StepShape
from penstock.runtime.requests.constraint import Mask, mask_words
from penstock.runtime.requests.images import MediaItem
from penstock.runtime.requests.request import FinishReason, Request, TokenLogprobs
from penstock.runtime.scheduling.image_pool import BLOCK_TOKENS
from penstock.runtime.scheduling.plan import FIRST_DRAFTED, Plan, PlanRow, StepResult, drafted_tokens
from penstock.runtime.scheduling.scheduler import SchedulerConfig
from tests.support.scheduler.fake_state import FakeState

VOCAB = 50
EOS = frozenset({3, 17})
Entry = tuple[int, int]
"""A token, and the digest of all tokens up to it."""
GARBAGE = (0, 4711)
WEIGHT_BYTES = 1000
"""As many bytes as `LazyRunner` says that its weights have."""


def root_digest(request: Request, generation: int) -> int:
    """Return the digest before the first token. Requests with different salts or adapters, or on different
    weights, have no digest in common.
    """
    return crc32(f"{generation} {request.cache.salt} {request.adapter_digest}".encode())


def digest(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 1) % (2**61 - 1)


def embedding(item: MediaItem, index: int, generation: int) -> int:
    """Return what the encoder makes of one token of an image, which takes the place of the token."""
    return crc32(item.digest, 31 * index + generation)


def inputs_of(request: Request, generation: int) -> list[int]:
    """Return the prompt, with embeddings in the places of its images."""
    inputs = list(request.prompt_token_ids)
    for item in request.media:
        inputs[item.start : item.end] = [embedding(item, i, generation) for i in range(item.num_tokens)]
    return inputs


def next_token(request: Request, digests: Sequence[int], length: int, banned: frozenset[int]) -> int:
    """Compute the next token: a function of all digests that are read, of the length and, unless greedy, of
    the seed. Banned ids are skipped, which stands for the mask.
    """
    seed = 0 if request.sampling.greedy else request.sampling.seed or 0
    token = (sum(digests) + 7 * length + seed) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def forbidden(request: Request, index: int) -> frozenset[int]:
    """Return the tokens that the tests' constraint forbids for the generated token of this index."""
    if request.constraint is None:
        return frozenset()
    return frozenset(token for token in range(VOCAB) if (token + index) % 3 == 0)


@dataclass(eq=False)
class Rota:
    """A constraint that forbids token t as the i-th generated token if (t + i) % 3 is 0, and is complete
    after `limit` tokens.
    """

    limit: int
    accepted: list[int] = field(default_factory=list)

    def fill(self, mask: Mask) -> None:
        bits = np.ones(32 * mask_words(VOCAB), np.uint8)
        bits[[t for t in range(VOCAB) if (t + len(self.accepted)) % 3 == 0]] = 0
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def fill_ahead(self, masks: Mask, token_ids: Sequence[int]) -> None:
        """Nothing here reads these masks. That there is such a method allows proposals."""

    def forced(self) -> Sequence[int]:
        return ()

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert (token + len(self.accepted)) % 3
            self.accepted.append(token)

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) >= self.limit


def constraint_limit(request: Request) -> int | None:
    return request.constraint.limit if isinstance(request.constraint, Rota) else None


def end_ids(request: Request, eos: frozenset[int] = EOS) -> frozenset[int]:
    stopping = request.stopping
    return (frozenset() if stopping.ignore_eos else eos) | frozenset(stopping.stop_token_ids)


def run_alone(
    request: Request,
    context_limit: int,
    *,
    windows: Sequence[int | None] = (None,),
    generation: int = 0,
    made: Sequence[int] = (),
    has_state: bool = False,
) -> tuple[list[int], FinishReason]:
    """Compute the tokens that the request must produce, beginning with `made`, and why it ends, from the
    definition of its parameters: without a scheduler, pages, chunks, dispatches of several steps or
    preemptions. `windows` has the sliding window of each group of layers; with `has_state` the tokens depend
    on a recurrent state too.
    """
    stopping = request.stopping
    eos = frozenset() if stopping.ignore_eos else EOS
    history = [*inputs_of(request, generation), *made]
    out = list(made)
    while True:
        seen: list[int] = []
        for window in windows:
            digests, last = [], root_digest(request, generation)
            for token in history:
                last = digest(root_digest(request, generation) if window == 1 else last, token)
                digests.append(last)
            seen += digests if window is None else digests[-window:]
        if has_state:
            seen.append(reduce(digest, history, root_digest(request, generation)))
        may_stop = len(out) >= stopping.min_tokens
        banned = (frozenset() if may_stop else end_ids(request)) | forbidden(request, len(out))
        token = next_token(request, seen, len(history), banned)
        history.append(token)
        out.append(token)
        if may_stop and token in eos:
            return out, FinishReason.EOS
        if may_stop and token in stopping.stop_token_ids:
            return out, FinishReason.STOP
        if len(out) == stopping.max_tokens:
            return out, FinishReason.MAX_TOKENS
        if len(history) == context_limit:
            return out, FinishReason.CONTEXT_FULL
        if len(out) == constraint_limit(request):
            return out, FinishReason.EOS


class FakeRunner:
    """Holds page tables, KV and last tokens, as the device does; it knows a row by its slot only."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.generation = 0
        self.requests: dict[int, Request] = {}
        self.windows = tuple(group.window for group in config.groups)
        """The sliding window of each group of layers."""
        self.tables: dict[int, tuple[dict[int, int], ...]] = {}
        """Slot to its page table in each group."""
        self.last: dict[int, int] = {}
        self.ended: set[int] = set()
        """Slots whose request has sampled its end: the rows that these slots still have compute garbage."""
        self.kv = self.new_kv()
        self.state = self._new_state()
        self.embeddings: list[int | None] = [None] * (config.image_blocks * BLOCK_TOKENS)
        """The pool of image embeddings."""
        self.draft: Callable[[PlanRow], tuple[int, ...]] = lambda row: (0,) * len(row.proposed)
        """What a draft model guesses for a row."""
        self.num_computed_tokens = 0
        """The number of input tokens of all rows so far, for tests that nothing is computed twice."""

    def new_kv(self) -> list[list[list[Entry | None]]]:
        """Group to page to offset to what is stored there."""
        config = self.config
        return [[[None] * config.page_size for _ in range(group.num_pages)] for group in config.groups]

    def _new_state(self) -> FakeState | None:
        """Return the recurrent state; None if the model has none."""
        return FakeState(self.config.num_snapshots, digest) if self.config.has_state else None

    def _drafted(self, row: PlanRow) -> PlanRow:
        """Return the row with what a draft model guesses for it, where it does."""
        if not row.proposed or row.proposed[0] != FIRST_DRAFTED:
            return row
        assert row.proposed == drafted_tokens(len(row.proposed))
        guesses = self.draft(row)
        assert len(guesses) == len(row.proposed) <= self.config.drafted_tokens
        return row._replace(proposed=guesses)

    def execute(self, plan: Plan, skipped: Collection[int] = ()) -> StepResult:
        """Run the plan. The rows `skipped` compute, but make no token."""
        if self.config.drafted_tokens:
            plan = dataclasses.replace(plan, rows=tuple(map(self._drafted, plan.rows)))
        shared = {row.slot: row.start // self.config.page_size for row in plan.rows}
        entered = {slot for slot, _ in plan.new_requests}
        for slot, request in plan.new_requests:
            self.requests[slot], self.tables[slot] = request, tuple({} for _ in self.windows)
            self.ended.discard(slot)
            if self.state is not None:
                self.state.enter(slot)
            self.last.pop(slot, None)  # from another request, or from a history that is now recomputed
        for write in plan.page_writes:
            for index, page in enumerate(write.pages, write.first_index):
                self.tables[write.slot][write.group][index] = page
                # Shared pages are full already, or will be when this step has written. All other pages are
                # new to this row, and what they hold is of an earlier owner.
                if write.slot not in entered or index >= shared[write.slot]:
                    self.kv[write.group][page] = [None] * self.config.page_size
        for source, destination, group in plan.page_copies:
            self.kv[group][destination] = self.kv[group][source][:]
        for item, blocks in plan.encodes:
            for index in range(item.num_tokens):
                place = blocks[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
                self.embeddings[place] = embedding(item, index, self.generation)
        images: dict[tuple[int, int], int] = {}
        for part in plan.images:
            for i in range(part.num_tokens):
                index = part.first + i
                place = part.blocks[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
                found = self.embeddings[place]
                assert found is not None, "read an embedding that was never written"
                images[part.row, part.at + i] = found
        made: list[list[int]] = [[] for _ in plan.rows]
        for step in range(plan.num_steps):
            rows = [
                (i, row)
                for i, row in enumerate(plan.rows)
                if step == 0 or (row.slot not in self.ended and len(made[i]) < row.max_samples)
            ]
            self._write(plan, rows, step, images)
            samples = [
                (i, row, self.sample(row, step))
                for i, row in rows
                if row.samples and i not in skipped and not row.proposed
            ]
            for i, row in rows:
                if row.proposed and i not in skipped:
                    made[i] = self._check(row)
            for i, row, token in samples:
                self.last[row.slot] = token
                made[i].append(token)
                request = self.requests[row.slot]
                num_made = row.start + row.num_tokens + step + 1 - len(request.prompt_token_ids)
                is_end = step >= row.bans and token in self.end_ids(request)
                if is_end or num_made == constraint_limit(request):
                    self.ended.add(row.slot)
        logprobs = [[TokenLogprobs(-float(token)) for token in tokens] for tokens in made]
        return StepResult(made, logprobs)

    def end_ids(self, request: Request) -> frozenset[int]:
        """Return the tokens that end the output."""
        return end_ids(request, self.config.eos_token_ids)

    def where(self, slot: int, group: int, position: int) -> tuple[int, int]:
        """Return the page and the offset in it."""
        table, page_size = self.tables[slot][group], self.config.page_size
        return table[position // page_size], position % page_size

    def _write(
        self,
        plan: Plan,
        rows: Sequence[tuple[int, PlanRow]],
        step: int,
        images: Mapping[tuple[int, int], int],
    ) -> None:
        """`images` has what takes the place of token i of row r at (r, i)."""
        inputs = []
        recurrent = []
        for number, row in rows:
            tokens = (self.last[row.slot], *row.proposed) if step or row.token_ids is None else row.token_ids
            assert len(tokens) == (1 if step else row.num_tokens)
            seen = [token if step else images.get((number, i), token) for i, token in enumerate(tokens)]
            inputs += [(row.start + step + i, row.slot, token) for i, token in enumerate(seen)]
            if row.slot not in self.ended:
                recurrent.append((number, row.slot, row.start + step, seen))
        if self.state is not None:
            roots = {row.slot: root_digest(self.requests[row.slot], self.generation) for _, row in rows}
            self.state.step(plan, recurrent, roots, step)
        self.num_computed_tokens += len(inputs)
        for group, window in enumerate(self.windows):
            places = {self.where(slot, group, position) for position, slot, _ in inputs}
            assert len(places) == len(inputs), "two rows write one place"
            # In order of position, because a row may build on what another row of this step writes.
            for position, slot, token in sorted(inputs):
                page, offset = self.where(slot, group, position)
                if slot in self.ended:
                    self.kv[group][page][offset] = GARBAGE
                    continue
                previous = root_digest(self.requests[slot], self.generation)
                if position and window != 1:
                    previous = self.read(slot, group, position - 1)[1]
                self.kv[group][page][offset] = (token, digest(previous, token))

    def read(self, slot: int, group: int, position: int) -> Entry:
        page, offset = self.where(slot, group, position)
        entry = self.kv[group][page][offset]
        assert entry is not None, f"read position {position} in group {group}, which was never written"
        return entry

    def _check(self, row: PlanRow) -> list[int]:
        """Compute what a row makes for which tokens were proposed: a sample after each input, up to the first
        that was not proposed. A row under a constraint ends where it is complete, and now and then where its
        masks are said not to be ready.
        """
        request, made = self.requests[row.slot], list[int]()
        masks = 1 + row.start % 4
        for step, guessed in enumerate((*row.proposed, None)):
            made.append(self.sample(row._replace(num_tokens=1), step))
            num_made = row.start + 2 + step - len(request.prompt_token_ids)
            if num_made == constraint_limit(request):
                self.ended.add(row.slot)
                break
            if made[-1] != guessed or (request.constraint is not None and len(made) == masks):
                break
        self.last[row.slot] = made[-1]
        if any(token in self.end_ids(request) for token in made[row.bans :]):
            self.ended.add(row.slot)
        return made

    def sample(self, row: PlanRow, step: int) -> int:
        """Return the token after the row's last input; in a later step, after what it has sampled since."""
        if row.slot in self.ended:
            return GARBAGE[0]
        length = row.start + row.num_tokens + step
        digests: list[int] = []
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(length - window, 0)
            digests += [self.read(row.slot, group, position)[1] for position in range(first, length)]
        if self.state is not None:
            digests.append(self.state.passed(row.slot, length))
        request = self.requests[row.slot]
        banned = self.end_ids(request) if step < row.bans else frozenset[int]()
        banned |= forbidden(request, length - len(request.prompt_token_ids))
        return next_token(request, digests, length, banned)


@dataclass(frozen=True)
class LazyStep:
    """A step that `LazyRunner` has not computed yet."""

    plan: Plan
    awaits_choice: bool
    packed_ns: int = field(default_factory=time.monotonic_ns)
    shape: StepShape | None = None
    skipped: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    has_ended: Callable[[], bool] = lambda: False

    @property
    def is_done(self) -> bool:
        return self.has_ended()


class LazyRunner(FakeRunner):
    """A `Runner` for the engine's loop. It computes a step only when the step is waited for, because nothing
    may depend on an earlier computation.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.thread: int | None = None
        """The thread that `start` was called on; None before that, and after `shutdown`."""
        self.log: list[tuple[str, int]] = []
        """Every call, in order: "dispatch", "choose" or "wait", and the step's id."""
        self.plans: list[Plan] = []
        self.holders: dict[int, Request] = {}
        """The request that holds each slot, as of the newest dispatched step."""
        self.unchosen: dict[int, frozenset[int]] = {}
        """The steps whose tokens are yet to be chosen, and the slots of the rows that make some."""
        self.behind: list[Request] = []
        """Those whose mask was not that of their tokens when a token was to be chosen, so they had ended."""
        self.offloaded = False
        self.skip: Callable[[int], bool] = lambda row: False
        """Whether the row of this index, which is under a constraint, shall make no token in this step."""

    def start(self) -> None:
        assert self.thread is None
        self.thread = threading.get_ident()
        self.unchosen.clear()

    def execute_async(self, plan: Plan) -> LazyStep:
        assert self.thread == threading.get_ident()
        assert not self.offloaded
        self.log.append(("dispatch", plan.step_id))
        self.plans.append(plan)
        self.holders.update(plan.new_requests)
        assert not any(self.holders[row.slot] is each for row in plan.rows for each in self.behind)
        inputs = {row.slot for row in plan.rows if row.token_ids is None}
        assert all(inputs.isdisjoint(slots) for slots in self.unchosen.values()), "read before it was chosen"
        constrained = any(r.samples and self.holders[r.slot].constraint for r in plan.rows)
        if constrained:
            self.unchosen[plan.step_id] = frozenset(row.slot for row in plan.rows if row.samples)
        return LazyStep(plan, constrained)

    def choose(self, step: LazyStep) -> LazyStep:
        """Each mask must be that of the tokens committed so far, unless the request has ended: then no later
        step may have it, which `execute_async` asserts.
        """
        self.log.append(("choose", step.plan.step_id))
        self.unchosen.pop(step.plan.step_id, None)
        skipped = set()
        for i, row in enumerate(step.plan.rows):
            request = self.holders[row.slot]
            if row.samples and request.constraint is not None and self.skip(i):
                skipped.add(i)
            if row.samples and isinstance(request.constraint, Rota) and not request.constraint.is_complete:
                mask = np.zeros(mask_words(VOCAB), np.int32)
                request.constraint.fill(mask)
                index = row.start + row.num_tokens - len(row.proposed) - len(request.prompt_token_ids)
                allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
                if set(np.flatnonzero(allowed == 0).tolist()) != forbidden(request, index):
                    self.behind.append(request)
        return dataclasses.replace(
            step, awaits_choice=False, skipped=frozenset(skipped), late=frozenset(skipped)
        )

    def wait(self, step: LazyStep) -> StepResult:
        assert not step.awaits_choice
        self.log.append(("wait", step.plan.step_id))
        return self.execute(step.plan, step.skipped)

    def free_kv_cache(self) -> int:
        """Free the cache: what was in it is lost, and reading or writing it fails until it is restored."""
        assert self.thread == threading.get_ident()
        freed = sum(map(len, self.kv))
        self.kv = []
        return freed

    def restore_kv_cache(self) -> None:
        assert self.thread == threading.get_ident()
        if not self.kv:
            self.kv, self.state = self.new_kv(), self._new_state()

    def offload_weights(self) -> int:
        assert self.thread == threading.get_ident()
        freed, self.offloaded = 0 if self.offloaded else WEIGHT_BYTES, True
        return freed

    def restore_weights(self) -> None:
        assert self.thread == threading.get_ident()
        self.offloaded = False

    def shutdown(self) -> None:
        self.thread = None
